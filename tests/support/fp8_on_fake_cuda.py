"""Fake CUDA cases for tests/parallel/test_fp8_gathers.py: a sharded model on one of eight GPUs."""

import functools
from dataclasses import replace

from pretrain.mesh_sizes import Sizes
from support.products_on_fake_cuda import launch_of, measured

SIZES = Sizes(dp_shard=8)
LAUNCH = replace(launch_of("llama", SIZES, 0), layers=2)
LAUNCHES = {name: replace(LAUNCH, settings=(*LAUNCH.settings, ("precision", name))) for name in ("bf16", "fp8")}
CASES = {name: functools.partial(measured, launch) for name, launch in LAUNCHES.items()}
