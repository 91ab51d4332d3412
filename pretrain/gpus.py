"""GPU table with memory, peak FLOP/s, bandwidths, power and default prices, for plan.py and for MFU.

Peaks (dense, without sparsity), bandwidths and power are from NVIDIA's and AMD's data sheets. Memory is the value
reported by torch, which is slightly less than nominal. Prices are typical on-demand cloud prices per GPU-hour in 2025.
--price_per_gpu_hour overrides them.
"""

import re
from dataclasses import dataclass

GIB = 2**30
CPU = "cpu"
"""Name of this machine's CPU in plans."""


@dataclass(frozen=True)
class Gpu:
    """A GPU model. Rates are per second."""

    name: str
    memory_bytes: float
    bf16_flops: float
    """Dense bf16 peak, or the fp16 peak if the GPU has no bf16."""
    fp8_flops: float | None
    """Dense fp8 peak; None if the GPU has no fp8."""
    fp32_flops: float | None
    """fp32 peak without TF32, which training doesn't use. If None, `bf16_flops` is assumed."""
    memory_bytes_per_second: float
    link_bytes_per_second: float
    """One-way bandwidth to the machine's other GPUs, through NVLink or PCIe."""
    network_bytes_per_second: float
    """One-way bandwidth per GPU to other machines."""
    watts: float
    price_per_hour: float
    """Price in US dollars."""
    has_bf16: bool = True

    def peak_flops(self, precision: str) -> float:
        """Returns the peak for MFU, which is the bf16 peak except in fp32."""
        return (precision == "fp32" and self.fp32_flops) or self.bf16_flops


def _gpu(name: str, *figures: float | None, has_bf16: bool = True) -> Gpu:
    """Builds a Gpu from data-sheet units: GiB, TFLOP/s (bf16, fp8, fp32), GB/s (memory, link, network), W, USD."""
    units = (GIB, 1e12, 1e12, 1e12, 1e9, 1e9, 1e9, 1, 1)
    scaled = (figure and figure * unit for figure, unit in zip(figures, units, strict=True))
    return Gpu(name, *scaled, has_bf16=has_bf16)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("b200", 178, 2250, 4500, 80, 8000, 900, 50, 1000, 5.0),
        _gpu("gh200", 94, 989, 1979, 67, 4000, 450, 50, 700, 2.5),
        _gpu("h200", 139, 989, 1979, 67, 4800, 450, 50, 700, 3.3),
        _gpu("h100", 79, 989, 1979, 67, 3350, 450, 50, 700, 2.8),
        _gpu("h100_nvl", 93, 835.5, 1671, 60, 3938, 300, 25, 400, 2.5),
        _gpu("h100_pcie", 79, 756, 1513, 51, 2000, 64, 25, 350, 2.4),
        _gpu("a100", 79, 312, None, 19.5, 2039, 300, 25, 400, 1.8),
        _gpu("a800", 79, 312, None, 19.5, 2039, 200, 25, 400, 1.6),
        _gpu("a100_40gb", 39, 312, None, 19.5, 1555, 300, 25, 400, 1.3),
        _gpu("l40s", 44, 362, 733, 91.6, 864, 32, 12.5, 350, 1.1),
        _gpu("l40", 44, 181, 362, 90.5, 864, 32, 12.5, 300, 1.0),
        _gpu("l4", 22, 121, 242, 30.3, 300, 16, 6, 72, 0.6),
        _gpu("a40", 44, 149.7, None, 37.4, 696, 56, 12.5, 300, 0.5),
        _gpu("a10", 22, 125, None, 31.2, 600, 32, 6, 150, 0.7),
        _gpu("a10g", 22, 70, None, 35, 600, 32, 6, 300, 0.9),
        _gpu("a6000", 47, 154.8, None, 38.7, 768, 56, 12.5, 300, 0.7),
        _gpu("rtx_5090", 31, 209.5, 419, 104.8, 1792, 64, 3, 575, 0.6),
        _gpu("rtx_4090", 23.5, 165.2, 330, 82.6, 1008, 32, 3, 450, 0.4),
        _gpu("rtx_3090", 23.5, 71, None, 35.6, 936, 32, 3, 350, 0.25),
        _gpu("v100", 31.7, 125, None, 15.7, 900, 150, 12.5, 300, 0.9, has_bf16=False),
        _gpu("t4", 14.6, 65, None, 8.1, 320, 16, 3, 70, 0.35, has_bf16=False),
        _gpu("mi300x", 191, 1307, 2614, 163.4, 5300, 448, 50, 750, 2.5),
    )
}


VARIANTS = {"d", "laptop", "max", "mig", "nvl", "super", "ti"}
"""Words in a GPU name that indicate a different model or a MIG slice."""


def gpu_called(name: str) -> Gpu | None:
    """Finds a GPU by its torch.cuda.get_device_name or an informal name. Returns None for unknown names.

    Examples: 'NVIDIA A100-SXM4-80GB', 'GeForce RTX 4090', 'rtx4090', '4090', 'h100 pcie'.
    """
    words = _words(name)
    joined = {known.replace("_", ""): gpu for known, gpu in GPUS.items()}
    found = [gpu for known, gpu in GPUS.items() if (own := _words(known)) <= words and not (words - own) & VARIANTS]
    return joined.get(name.lower()) or max(found, key=lambda gpu: len(gpu.name), default=None)


def _words(name: str) -> set[str]:
    """Splits a name into words. Drops 'rtx', which may be missing or joined to the next word."""
    return set(re.split(r"[ _-]", name.lower().replace("rtx", ""))) - {""}
