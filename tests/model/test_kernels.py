"""What a run on a GPU is told of its kernels: those in use, and why the others are not."""

import importlib.util

import pytest
import torch

from pretrain.config import WindowSpec
from pretrain.model import kernels
from pretrain.model.attention import ATTENTION_NAMES
from pretrain.model.kernels import kernels_not_used, kernels_used

PACKED, UNDIVIDED = WindowSpec(64, True), WindowSpec(64, False)
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def gpu(monkeypatch):
    """An H100 with Triton and nothing else; (capability, modules), which can be changed."""
    here = {"capability": (9, 0), "modules": {"triton"}}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: here["capability"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: module if module in here["modules"] else None)
    monkeypatch.setattr(
        kernels, "version_of", lambda module: "1.2" if module in here["modules"] else "(not installed)"
    )
    return here


@pytest.mark.parametrize(
    ("attention", "capability", "dtype", "window", "used"),
    [
        ("groundwork_sdpa", (9, 0), BF16, PACKED, "varlen, the flash attention of torch"),
        ("groundwork_sdpa", (7, 5), torch.float16, PACKED, "with a dense mask for the documents"),
        ("groundwork_sdpa", (9, 0), FP32, PACKED, "with a dense mask for the documents"),
        ("groundwork_sdpa", (9, 0), BF16, UNDIVIDED, f"sdpa of torch {torch.__version__}"),
        (ATTENTION_NAMES["flash_attention_2"], (9, 0), BF16, PACKED, "flash_attention_2 (flash_attn 1.2)"),
        ("eager+mask", (9, 0), BF16, PACKED, f"eager+mask of torch {torch.__version__}"),
    ],
)
def test_what_is_used(gpu, attention, capability, dtype, window, used):
    gpu |= {"capability": capability, "modules": {"flash_attn", "triton"}}
    plain = kernels_used(attention, "none", dtype=dtype, window=window)
    assert used in plain
    assert kernels_used(attention, "regional", dtype=dtype, window=window) == f"{plain}; layers compiled by Triton 1.2"


def test_nothing_faster_is_passed_over_in_silence(gpu):
    def told(compile_mode="regional", dtype=BF16, window=PACKED, attention="groundwork_sdpa"):
        return "; ".join(kernels_not_used("auto", attention, compile_mode, dtype=dtype, window=window))

    assert "flash_attention_2: needs the package flash_attn, which is not installed: see requirements-flash" in told()
    assert "flash_attention_3: needs the package" in told() and "varlen" not in told() and "compiled" not in told()
    assert "compiled layers: compile is none; " in told(compile_mode="none")
    assert "bf16 matrix units: precision is fp32; varlen: computes in bf16 or fp16 only" in told(dtype=FP32)
    assert "varlen: has no documents to keep apart" in told(window=UNDIVIDED)
    gpu["modules"] = {"flash_attn", "flash_attn_interface"}
    assert told() == "; ".join(f"flash_attention_{n}: runs here, and attention is auto" for n in (2, 3))
    assert told(attention=ATTENTION_NAMES["flash_attention_3"]).count("runs here") == 2
    assert "compile is none, and needs Triton, which is not installed" in told(compile_mode="none")
    gpu["capability"] = (7, 5)
    assert told().count("no kernels for a GPU of compute capability 7.5") == 3
    gpu["capability"] = (10, 0)
    assert "flash_attention_3: has no kernels for a GPU of compute capability 10.0" in told()


def test_versions_are_those_of_packages_with_other_names():
    assert kernels.version_of("yaml")[0].isdigit() and kernels.version_of("no_such_module") == "(not installed)"
