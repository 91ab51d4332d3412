"""Tests for the profiler's rules with synthetic steps: each cause is reported with figures, and there are no false
alarms."""

from dataclasses import replace

import pytest

from pretrain_tools.profiling.causes import Evidence, RankSteps, find_causes
from pretrain_tools.profiling.report import RANKS_SHOWN, report_text
from pretrain_tools.profiling.trace_events import StepRecord


def rank(number, *, forward=40, backward=50, wait=0, facts=(), count=5, **more):
    """Returns a rank's steps with 4 ms of data loading, 4 ms of communication, 6 ms of Python, and the rest
    compute."""
    changes = {name: value for name, value in more.items() if name not in ("kernels", "idle_in")}
    data, idle = changes.pop("data", 1), changes.pop("idle", 6)
    blocked = 4 + wait
    seconds = forward + backward + data + idle + blocked
    record = StepRecord(
        step=0,
        seconds=seconds / 1e3,
        busy=(forward + backward) / 1e3,
        blocked=blocked / 1e3,
        data=data / 1e3,
        idle=idle / 1e3,
        phases={"data": data / 1e3, "forward": (forward + idle) / 1e3, "backward": (backward + blocked) / 1e3},
        blocked_in={"backward": blocked / 1e3},
        idle_in={name: value / 1e3 for name, value in more.get("idle_in", {"forward": idle}).items()},
        kernels={name: value / 1e3 for name, value in more.get("kernels", {"matmuls": 70, "copies": 5}).items()},
        **{name: value / 1e3 if name != "launched" else value for name, value in changes.items()},
    )
    steps = [StepRecord(**(vars(record) | {"step": 10 + n, "runnable": 9})) for n in range(count)]
    common = {
        "rank": number, "host": f"node{number}", "device": "CPU", "cores": 2, "sync_lines": [], "compilations": [],
        "retries_per_step": 0.0, "problems": [],
    }  # fmt: skip
    return RankSteps(steps=steps, **common | dict(facts))


def found(*ranks, micro_steps=2, on_device=False, **options):
    evidence = Evidence(list(ranks), micro_steps, on_device, **options)
    causes = find_causes(evidence)
    assert report_text(evidence, causes, "title").startswith("title\n\n")
    return {cause.name: cause.text for cause in causes}


@pytest.mark.parametrize("on_device", [False, True])
def test_nothing_is_wrong(on_device):
    ranks = [rank(number) for number in range(4)]
    assert found(*ranks, on_device=on_device) == {}
    text = report_text(Evidence(ranks, 2, on_device), [], "title")
    assert (
        "No problems found. A step takes 101 ms: computing 89%, waiting for data 1%, communication 4%, waiting for "
        "other ranks 0%, idle 6%"
    ) in text
    assert "matmuls 70.0 69%" in " ".join(text.split())
    assert found(rank(0)) == {}, "a single process must have no cause"


def test_a_slow_rank_and_who_waits_for_it():
    ranks = [rank(0, wait=31), rank(1, forward=71), rank(2, wait=31)]
    (text,) = found(*ranks).values()
    assert text == (
        "rank 1 on node1 (CPU) takes 31 ms longer per step than the other ranks' median (127 ms instead of 96 ms, "
        "23% of the step), mostly in forward (computing); the other ranks wait: rank 0 for 31 ms, rank 2 for 31 ms"
    )
    (asleep,) = found(rank(0, wait=31), rank(1, idle=37)).values()
    assert "outside any operator: Python, a lock or a sleep" in asleep


def test_a_single_odd_step_is_ignored():
    odd = rank(1)
    odd.steps[2].seconds, odd.steps[2].idle = 9.0, 8.0
    assert found(rank(0), odd) == {}


def test_a_rank_that_is_slower_in_half_of_the_steps_is_not_slow():
    slow, usual = rank(1, forward=90, count=4), rank(1, count=4)
    for slower, expected in ((3, ["slow rank"]), (2, [])):
        mixed = replace(slow, steps=slow.steps[:slower] + usual.steps[slower:])
        assert list(found(rank(0, wait=50, count=4), mixed)) == expected


def test_a_rank_without_a_core_means_a_busy_machine():
    ranks = [rank(0, wait=40), rank(1, forward=80, starved=45)]
    (name, text), *more = found(*ranks).items()
    assert name == "busy machine" and not more
    assert "9 runnable processes and threads for 2 cores on node1; rank 1 waited 45 ms of a 141 ms step (32%)" in text


def test_waiting_for_data_on_one_rank_and_on_all():
    (one,) = found(rank(0, wait=60), rank(1, data=61)).values()
    assert one == (
        "rank 1 waited for data, up to 38% of the step (61 ms of 161 ms) on node1; all ranks wait for the slowest one"
    )
    (all_of_them,) = found(rank(0, data=61), rank(1, data=61)).values()
    assert all_of_them.startswith("ranks 0, 1 waited for data")


def test_communication():
    (text,) = found(rank(0, wait=60), rank(1, wait=62)).values()
    assert text.startswith("communication takes 40% of the step (64 ms of ")


def test_recompilations_with_their_reason():
    compiled = {"place": "forward in model.py:12", "reason": "size mismatch at index 1", "seconds": 2.0}
    (text,) = found(rank(0), rank(1, facts={"compilations": [compiled]})).values()
    assert text == (
        "1 compilation in 5 steps after the warm-up, 400 ms per step, on rank 1; the longest was forward in "
        "model.py:12: size mismatch at index 1"
    )


def test_lines_of_every_micro_step():
    line = {"place": "model.py:12", "phase": "forward", "count": 40}
    seldom = {**line, "place": "model.py:20", "count": 5}
    of_update = {**line, "place": "optimizer.py:3", "phase": "update"}
    facts = {"sync_lines": [line, seldom, of_update]}
    ranks = [rank(number, facts=facts, idle=12, launched=4000) for number in range(2)]
    (text,) = found(*ranks, micro_steps=4, on_device=True).values()
    assert text == (
        "1 line with a wait for the device in every micro-step, most often model.py:12 (in forward, 8 times per "
        "step); the GPU is idle for 12 ms per step"
    )


def test_a_gpu_waiting_for_the_host():
    (text,) = found(rank(0, idle=40, launched=4000), rank(1, idle=40, launched=4000), on_device=True).values()
    assert "idle for 30% of the step (40 ms of 135 ms): the CPU is too slow to launch 4,000 kernels per step" in text
    assert found(rank(0, idle=40), rank(1, idle=40)) == {}, "Python time must not be reported on a CPU"


def test_what_is_done_between_steps():
    (text,) = found(rank(0, idle=40, idle_in={"between": 35})).values()
    assert text.startswith("work between steps takes 26% of the step (35 ms of 135 ms)")


def test_memory_that_is_too_full():
    (text,) = found(rank(0, facts={"retries_per_step": 1.5}), on_device=True).values()
    assert "on rank 0, torch freed its cache and retried an allocation 1.5 times per step" in text


def test_kernels_of_a_gpu():
    kernels = {"matmuls": 40, "attention": 5, "pointwise and others": 35, "copies": 10}
    (text,) = found(rank(0, kernels=kernels), on_device=True, compile_mode="none").values()
    assert text.startswith("pointwise kernels and copies take 50% of the kernel time (45 ms per step)")


def test_causes_are_sorted_by_cost_after_a_busy_machine():
    ranks = [rank(0, wait=90, starved=20), rank(1, forward=70, data=61, starved=0)]
    assert list(found(*ranks)) == ["waiting for data", "slow rank"]
    ranks = [rank(0, wait=90, starved=40), rank(1, forward=70, data=61, starved=0)]
    assert next(iter(found(*ranks))) == "busy machine"


def test_only_the_slowest_ranks_are_shown():
    ranks = [rank(number, forward=40 + number / 10) for number in range(200)]
    text = report_text(Evidence(ranks, 2, False), [], "title")
    assert "rank 199" in text and "rank 183 " not in text and f"and {200 - RANKS_SHOWN} faster ranks" in text
