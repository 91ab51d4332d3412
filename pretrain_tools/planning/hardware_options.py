"""Reads and checks plan.py's hardware options before torch is imported."""

import argparse
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pretrain.errors import InputError, Problems, did_you_mean
from pretrain.gpus import CPU, GIB, GPUS, Gpu, gpu_called

if TYPE_CHECKING:
    from pretrain_tools.planning.step_time import Hardware


def add_hardware_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpus", type=int, default=1, help="total number of GPUs [1]")
    add("--gpu", help="GPU model, such as h100, a100 or rtx4090, or cpu for this machine's CPU; for other GPUs, "
        "also pass --gpu_memory and --peak_tflops [h100]")  # fmt: skip
    add("--machines", type=int, help="number of machines [one per 8 GPUs]")
    add("--gpu_memory", metavar="80GB", help="memory per GPU (1 GB is 2^30 bytes)")
    add("--peak_tflops", type=float, help="peak dense TFLOP/s per GPU in the run's precision")
    add("--price_per_gpu_hour", type=float, metavar="USD", help="price per GPU-hour")
    add("--network_gbits", type=float, help="network bandwidth per GPU between machines, in Gbit/s")


def option_problems(options: argparse.Namespace) -> Problems:
    """Lists problems with plan.py's own options."""
    problems = Problems()
    gpus = options.gpus
    machines = options.machines
    if gpus < 1:
        problems.append(f"--gpus {gpus}: must be at least 1")
    if machines is not None and (machines < 1 or (gpus > 0 and gpus % machines)):
        problems.append(f"--machines {machines}: must divide the number of GPUs ({gpus})")
    if machines is None and gpus > 8 and gpus % 8:
        problems.append(f"--gpus {gpus}: must be a multiple of 8, the default per machine; otherwise, set --machines")
    if options.mfu is not None and not 0 < options.mfu <= 1:
        problems.append(f"--mfu {options.mfu}: must be above 0 and at most 1; write 40% as 0.4")
    if options.price_per_gpu_hour is not None and options.price_per_gpu_hour < 0:
        problems.append(f"--price_per_gpu_hour {options.price_per_gpu_hour}: must be at least 0")
    for name in ("peak_tflops", "network_gbits"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            problems.append(f"--{name} {value}: must be above 0")
    return problems


def parse_size(text: str) -> float:
    """Converts '80GB' to bytes. GB is 2^30 bytes, as in GPU specifications. Raises InputError."""
    try:
        size = float(text.strip().upper().removesuffix("GB"))
    except ValueError:
        size = 0.0
    if not 0 < size < math.inf:
        raise InputError(f"--gpu_memory {text}: must be a size, such as 80GB")
    return size * GIB


def given_figures(options: argparse.Namespace) -> dict[str, float]:
    """Returns {field of Gpu: value given on the command line}. Raises InputError for an invalid --gpu_memory."""
    figures = {
        "memory_bytes": options.gpu_memory and parse_size(options.gpu_memory),
        "bf16_flops": options.peak_tflops and options.peak_tflops * 1e12,
        "fp32_flops": options.peak_tflops and options.peak_tflops * 1e12,
        "price_per_hour": options.price_per_gpu_hour,
        "network_bytes_per_second": options.network_gbits and options.network_gbits * 1e9 / 8,
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def gpu_of(options: argparse.Namespace) -> Gpu | None:
    """Returns the GPU named by --gpu, or None for this machine's CPU, because measuring it requires torch."""
    figures = given_figures(options)
    return None if options.gpu == CPU else find_gpu(options.gpu or "h100", **figures)


def hardware_of(options: argparse.Namespace, gpu: Gpu | None) -> "Hardware":
    from pretrain_tools.planning.step_time import Hardware

    gpu = gpu or replace(cpu_as_gpu(options.gpus), **given_figures(options))
    return Hardware(gpu, options.gpus, options.machines or -(-options.gpus // 8))


def find_gpu(name: str, **given: float) -> Gpu:
    """Looks up a GPU by name. Raises InputError for an unlisted GPU without memory_bytes and bf16_flops.

    given: fields of Gpu that override the table.
    """
    key = name.lower().replace("-", "_").replace(" ", "_")
    if (known := gpu_called(name)) is not None:
        return replace(known, **given)
    if not {"memory_bytes", "bf16_flops"} <= given.keys():
        raise InputError(
            f"--gpu: {name} is not a known GPU{did_you_mean(key, [*GPUS, CPU])}; for other GPUs, also pass "
            "--gpu_memory and --peak_tflops, such as --gpu_memory 80GB --peak_tflops 989"
        )
    # Defaults for a GPU in a typical machine: PCIe 4, 25 Gbit/s, 350 W.
    common = Gpu(key, 0, 0, None, None, 1e12, 32e9, 3e9, 350, 0.0)
    return replace(common, **given)


def cpu_as_gpu(processes: int) -> Gpu:
    """Describes this machine's CPU, shared by this many processes, as a GPU. Measures its speed for 0.5 s."""
    import torch

    from pretrain.hardware import missing_bf16, peak_flops
    from pretrain.limits import available_memory

    has_bf16 = missing_bf16("cpu") is None
    in_fp32 = peak_flops(torch.device("cpu"), "fp32")[0] / processes
    in_bf16 = peak_flops(torch.device("cpu"), "bf16")[0] / processes if has_bf16 else in_fp32
    return Gpu(
        CPU,
        memory_bytes=available_memory() / processes,
        bf16_flops=in_bf16,
        fp8_flops=None,
        fp32_flops=in_fp32,
        memory_bytes_per_second=2e10,
        link_bytes_per_second=5e9,
        network_bytes_per_second=1e8,
        watts=0.0,
        price_per_hour=0.0,
        has_bf16=has_bf16,
    )
