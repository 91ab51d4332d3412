"""Fake CUDA cases for tests/parallel/test_fp8_gathers.py: a sharded model on one of 8 or 16 GPUs."""

import functools
from dataclasses import replace

from pretrain.mesh_sizes import Sizes
from support.products_on_fake_cuda import launch_of, measured
from support.ranks_on_fake_cuda import Launch

SIZES = {"bf16": Sizes(dp_shard=8), "fp8": Sizes(dp_shard=8), "fp8 with tp": Sizes(dp_shard=8, tp=2)}


def launch_in(precision: str, sizes: Sizes) -> Launch:
    launch = launch_of("llama", sizes, 0)
    return replace(launch, layers=2, settings=(*launch.settings, ("precision", precision)))


LAUNCHES = {name: launch_in(name.split()[0], sizes) for name, sizes in SIZES.items()}
CASES = {name: functools.partial(measured, launch) for name, launch in LAUNCHES.items()}
