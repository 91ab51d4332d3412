"""Names the GPU kernels that a run uses, and says why it does not use others."""

import importlib.metadata
import importlib.util

import torch
from transformers import PreTrainedConfig

from pretrain.config import WindowSpec
from pretrain.model.attention import ATTENTION_NAMES, FLASH_CAPABILITY, FLASH_PACKAGES, why_not, why_not_flash
from pretrain.model.cpu_attention import HALF_DTYPES


def kernels_used(
    attention: str, compile_mode: str, *, dtype: torch.dtype, window: WindowSpec, model_config: PreTrainedConfig
) -> str:
    """Names the kernels of a run on a GPU, with versions.

    Args:
        attention: the model's attention, one of `attention.candidates_of`.
        dtype: dtype of the matmuls.
    """
    varlen = why_not("varlen", device_type="cuda", dtype=dtype, window=window) or why_not_flash(model_config)
    if name := next((name for name in FLASH_PACKAGES if ATTENTION_NAMES[name] == attention), None):
        module, _ = FLASH_PACKAGES[name]
        used = f"{name} ({module} {version_of(module)})"
    elif attention != "groundwork_sdpa":
        used = f"{attention} of torch {torch.__version__}"
    elif varlen is None:
        used = f"varlen, the flash attention of torch {torch.__version__} for packed documents"
    elif window.document_mask:
        used = f"sdpa of torch {torch.__version__} with a dense mask for the documents"
    else:
        used = f"sdpa of torch {torch.__version__}"
    return f"{used}; layers compiled by Triton {version_of('triton')}" if compile_mode != "none" else used


def kernels_not_used(
    requested: str,
    attention: str,
    compile_mode: str,
    *,
    dtype: torch.dtype,
    window: WindowSpec,
    model_config: PreTrainedConfig,
) -> list[str]:
    """Lists faster, or possibly faster, options on a GPU and why this run does not use them.

    Args:
        requested: the recipe's `attention`; the others as in `kernels_used`.
    """
    reasons = []
    capability = torch.cuda.get_device_capability()
    if dtype not in HALF_DTYPES:
        half = "bf16" if capability >= FLASH_CAPABILITY else "fp16"
        reasons.append(f"{half} matrix units: precision is fp32")
    if compile_mode == "none":
        triton = "" if importlib.util.find_spec("triton") else ", and needs Triton, which is not installed"
        reasons.append(f"compiled layers: compile is none{triton}")
    for name in ("varlen", *FLASH_PACKAGES):
        problem = why_not(name, device_type="cuda", dtype=dtype, window=window)
        if name == "varlen":
            problem = problem or why_not_flash(model_config)
        if problem:
            reasons.append(f"{name}: {problem}")
        elif ATTENTION_NAMES[name] != attention:
            reasons.append(f"{name}: runs here, and attention is {requested}")
    return reasons


def version_of(module: str) -> str:
    """Returns the version of the package that provides a module; their names may differ."""
    packages = importlib.metadata.packages_distributions().get(module, [module])
    try:
        return importlib.metadata.version(packages[0])
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
