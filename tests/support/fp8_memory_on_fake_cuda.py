"""Fake CUDA cases for tests/planning/test_step_memory.py: the peak GPU memory of a training step in fp8."""

from support.memory_on_fake_cuda import cases
from support.memory_setups import SETUPS_IN_FP8

CASES = cases(SETUPS_IN_FP8)
