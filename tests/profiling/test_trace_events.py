"""Tests for the time breakdown of a step, from synthetic CPU and GPU traces."""

import pytest

from pretrain_tools.profiling.trace_events import (
    COMMUNICATION,
    MARK,
    Spans,
    TraceEvent,
    kernel_kind,
    read_steps,
)

MAIN, OTHER = 1, 2
MS = 1_000_000


def event(name, start, end, kind="operator", thread=MAIN, correlation=0):
    """Returns an event; times are in ms."""
    return TraceEvent(name, int(start * MS), int(end * MS), thread, kind, correlation)


def marks(*phases):
    """Returns the markers for a step with these (name, start, end) phases."""
    begin, end = phases[0][1], phases[-1][2]
    step = event(f"{MARK}step 7", begin, end, "mark")
    return [step, *(event(MARK + name, *times, "mark") for name, *times in phases)]


PHASES = ("data", 0, 10), ("forward", 10, 40), ("backward", 40, 80), ("update", 80, 90), ("between", 90, 100)


def in_ms(seconds: dict) -> dict:
    return {name: round(1e3 * value, 6) for name, value in seconds.items() if value}


def test_spans_are_sets_of_time():
    spans = Spans([(30, 40), (0, 10), (5, 20), (20, 25)])
    assert spans.pairs.tolist() == [[0, 25], [30, 40]]
    assert spans.seconds(24, 31) == pytest.approx(2e-9) and spans.seconds(0, 99) == pytest.approx(35e-9)
    assert Spans([]).seconds(0, 9) == 0


def test_on_a_cpu_the_main_threads_operators_are_the_work():
    events = [
        *marks(*PHASES),
        event("aten::linear", 12, 20), event("aten::addmm", 13, 20),
        event("groundwork::blockwise_attention", 20, 30), event("aten::bmm", 21, 24),
        event("autograd::engine::evaluate_function: MmBackward0", 40, 60), event("MmBackward0", 40, 60),
        event("aten::mm", 45, 50),
        event("aten::_fused_adamw_", 81, 88),
        # Gradients are exchanged from 55 on, while the main thread computes until 58 and then waits.
        event("gloo:all_reduce", 55, 79, "collective", OTHER), event("aten::mul", 56, 58),
        event("aten::copy_", 0, 100, thread=OTHER),
    ]  # fmt: skip
    (record,) = read_steps(events, on_device=False)
    assert record.step == 7
    figures = {name: getattr(record, name) for name in ("seconds", "busy", "blocked", "data", "idle", "own")}
    assert in_ms(figures) == {"seconds": 100, "busy": 32, "blocked": 22, "data": 10, "idle": 36, "own": 68}
    assert in_ms(record.kernels) == {
        "matmuls": 12, "attention": 10, "optimizer": 7, "pointwise and others": 3,
    }, "matmuls inside attention must count as attention, and linear's own time as other"  # fmt: skip
    assert in_ms(record.blocked_in) == {"backward": 22}
    assert in_ms(record.idle_in) == {"forward": 12, "backward": 11, "update": 3, "between": 10}
    assert in_ms(record.phases) == {"data": 10, "forward": 30, "backward": 40, "update": 10, "between": 10}


def test_waiting_inside_operators_is_not_compute():
    """An operator on a sharded tensor communicates and then dispatches itself again."""
    events = [
        *marks(*PHASES),
        event("aten::mm", 10, 38), event("_c10d_functional::all_gather_into_tensor", 11, 12),
        event("aten::mm", 30, 37), event("gloo:all_gather", 11, 29, "collective", OTHER),
    ]  # fmt: skip
    (record,) = read_steps(events, on_device=False)
    assert in_ms({"busy": record.busy, "blocked": record.blocked}) == {"busy": 7, "blocked": 18}


def test_compiled_code_computes_between_its_calls():
    name = "## Call CompiledFxGraph abc ##"
    (record,) = read_steps([*marks(*PHASES), event(name, 10, 30), event("aten::mm", 15, 25)], on_device=False)
    assert in_ms(record.kernels) == {"matmuls": 10, "pointwise and others": 10}


def test_on_a_gpu_the_gpu_timeline_is_used():
    events = [
        *marks(*PHASES),
        event("aten::mm", 10, 11), event("cudaLaunchKernel", 10.2, 10.4, correlation=1),
        event("groundwork::chunked_loss", 11, 13), event("cudaLaunchKernel", 12, 12.2, correlation=2),
        event("cudaLaunchKernel", 81, 81.2, correlation=3),
        event("aten::mm", 40, 41, thread=OTHER), event("cudaLaunchKernel", 40.2, 40.4, thread=OTHER, correlation=4),
        event("sm90_xmma_gemm_bf16bf16", 12, 30, "kernel", 7, 1),
        event("sm90_xmma_gemm_bf16bf16", 30, 36, "kernel", 7, 2),
        event("cutlass::device_kernel<flash_bwd>", 41, 50, "kernel", 7, 4),
        event("void vectorized_elementwise_kernel", 50, 60, "kernel", 7),
        event("ncclDevKernel_AllReduce_Sum", 55, 75, "kernel", 8),
        event("multi_tensor_apply_kernel", 82, 92, "kernel", 7, 3),
    ]  # fmt: skip
    (record,) = read_steps(events, on_device=True)
    figures = {name: getattr(record, name) for name in ("seconds", "busy", "blocked", "data", "idle")}
    assert in_ms(figures) == {"seconds": 100, "busy": 53, "blocked": 15, "data": 10, "idle": 22}
    assert in_ms(record.kernels) == {
        "matmuls": 18, "loss": 6, "attention": 9, "pointwise and others": 10, "optimizer": 10,
    }  # fmt: skip
    assert record.launched == 6


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matmuls"),
        ("mkldnn::_linear_pointwise", "matmuls"),
        ("nvjet_tst_128x256_64x4", "matmuls"),
        ("triton_per_fused_add_mul_sum_3", "pointwise and others"),
        ("pytorch_flash::flash_fwd_kernel", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", COMMUNICATION),
        ("aten::sum", "pointwise and others"),
        ("aten::comm", "pointwise and others"),
    ],
)
def test_kernels_are_classified_by_name(name, kind):
    assert kernel_kind(name) == kind
