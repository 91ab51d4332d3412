"""plan.py's options for the machines of a run. Answers a mistyped one before torch is imported."""

import argparse
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pretrain.errors import InputError, Problems
from pretrain.gpus import CPU, GIB, Gpu, find_gpu

if TYPE_CHECKING:
    from pretrain_tools.planning.step_time import Hardware


def add_hardware_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpus", type=int, default=1, help="total number of GPUs [1]")
    add("--gpu", help="GPU model: h100, a100, rtx4090 ...; cpu: this machine's processors; any other name with "
        "--gpu_memory and --peak_tflops [h100]")  # fmt: skip
    add("--machines", type=int, help="number of machines [8 GPUs each]")
    add("--gpu_memory", metavar="80GB", help="memory of one GPU; GB is 2^30 bytes")
    add("--peak_tflops", type=float, help="dense bf16 peak of one GPU in TFLOP/s")
    add("--price_per_gpu_hour", type=float, metavar="USD", help="price per GPU-hour")
    add("--network_gbits", type=float, help="network bandwidth between machines per GPU, in Gbit/s")


def option_problems(options: argparse.Namespace) -> Problems:
    """Finds what is wrong with plan.py's own options."""
    problems = Problems()
    gpus = options.gpus
    machines = options.machines
    if gpus < 1:
        problems.append(f"--gpus {gpus}: at least 1")
    if machines is not None and (machines < 1 or (gpus > 0 and gpus % machines)):
        problems.append(f"--machines {machines}: {gpus} GPUs cannot be divided equally; give a divisor of the GPUs")
    if machines is None and gpus > 8 and gpus % 8:
        problems.append(f"--gpus {gpus}: is not a multiple of 8 GPUs per machine; set --machines")
    if options.mfu is not None and not 0 < options.mfu <= 1:
        problems.append(f"--mfu {options.mfu}: must be above 0 and at most 1; 40 % is 0.4")
    for name in ("peak_tflops", "network_gbits", "price_per_gpu_hour"):
        value = getattr(options, name)
        if value is not None and (value < 0 or (value == 0 and name != "price_per_gpu_hour")):
            problems.append(f"--{name} {value}: must be above 0")
    # Read again by `given_figures`: here so that it is reported with the other problems.
    if options.gpu_memory is not None:
        problems.attempt(parse_size, options.gpu_memory)
    return problems


def parse_size(text: str) -> float:
    """Converts '80GB' to bytes, with GB as GPUs are sold: 2^30 bytes. Raises InputError."""
    try:
        size = float(text.strip().upper().removesuffix("GB"))
    except ValueError:
        size = 0.0
    if not 0 < size < math.inf:
        raise InputError(f"--gpu_memory {text}: a size such as 80GB")
    return size * GIB


def given_figures(options: argparse.Namespace) -> dict[str, float]:
    """Reads the fields of Gpu that the command line states; without a --gpu_memory that is no size."""
    memory = None if options.gpu_memory is None else Problems().attempt(parse_size, options.gpu_memory)
    figures = {
        "memory_bytes": memory,
        "bf16_flops": options.peak_tflops and options.peak_tflops * 1e12,
        "price_per_hour": options.price_per_gpu_hour,
        "network_bytes_per_second": options.network_gbits and options.network_gbits * 1e9 / 8,
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def gpu_of(options: argparse.Namespace) -> Gpu | None:
    """Finds the GPU that is named; None for this machine's processors, which torch has to measure."""
    if options.gpu == CPU:
        return None
    return find_gpu(options.gpu or "h100", **given_figures(options))


def hardware_of(options: argparse.Namespace, gpu: Gpu | None) -> "Hardware":
    from pretrain.hardware import cpu_as_gpu
    from pretrain_tools.planning.step_time import Hardware

    gpu = gpu or replace(cpu_as_gpu(options.gpus), **given_figures(options))
    return Hardware(gpu, options.gpus, options.machines or -(-options.gpus // 8))
