"""Tests for the report about the guards' overhead. tests/faults/test_fault_sweep.py measures real runs."""

import pytest

from bench.guards import GuardCost, parse_arguments, table
from pretrain.errors import InputError


def test_the_share_includes_all_guards():
    cost = GuardCost(step=2.0, after_step=0.002, watch=0.001, compare=1.0)
    assert cost.share == pytest.approx((0.002 + 0.001 + 0.001) / 2.0)
    assert "| share of a step's time | 0.200% |" in table("llama", 2, cost)
    assert "| agreement, checks, commands | 2,000 µs |" in table("llama", 2, cost)


def test_all_problems_with_the_command_are_reported_at_once():
    with pytest.raises(InputError) as caught:
        parse_arguments(["--shape", "lama", "--steps", "0"])
    assert len(caught.value.problems) == 2 and "llama" in caught.value.problems[0]
