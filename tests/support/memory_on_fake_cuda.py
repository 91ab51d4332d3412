"""Fake CUDA cases for tests/planning/test_step_memory.py: the peak GPU memory of a training step.

Each case trains a full-width model with full-size micro-batches on one of eight simulated GPUs, and adds up the sizes
of all live tensor storages. For compiled layers, it uses the allocations planned by Inductor's scheduler. Attention
workspaces and allocator rounding are not included. ZeRO runs on the CPU, uncompiled and with fewer tokens, because
DeepSpeed reads tensor values.
"""

import contextlib
import copy
import functools
import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._inductor.graph import GraphLowering
from torch._inductor.memory import estimate_peak_memory, prepare_planning_info

import pretrain.model.loss
from pretrain.model.compile import checkpoint_activations, compile_model
from pretrain.model.loss import LanguageModelLoss
from support import ranks_on_fake_cuda
from support.kernels_on_fake_cuda import inductor, lowered, schedule
from support.memory_setups import SETUPS, MemorySetup
from support.products_on_fake_cuda import LiveBytes
from support.ranks_on_fake_cuda import MODELS, prepared

ATEN = torch.library.Library("aten", "IMPL")
# Without a CUDA kernel, torch computes this with several operators, which need more memory.
ATEN.impl("silu_backward", lambda grad, x: torch.empty_like(grad), "CUDA")


class PeakOfStep(LiveBytes):
    """Live bytes, including the loss's temporary tensors and the memory that compiled graphs allocate."""

    runs_graph = False

    def __init__(self, device_type: str):
        self.host = LiveBytes("cpu")
        """Live bytes in CPU memory, such as offloaded states."""
        super().__init__(device_type)

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # otherwise compiled code would run uncompiled

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.runs_graph or torch._guards.TracingContext.try_get():  # or the compiler is tracing
            return func(*args, **(kwargs or {}))
        if func is torch.ops.groundwork.chunked_loss.default:
            with self:
                return pretrain.model.loss._chunked_loss._init_fn(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            self.host.add_all(result)
        return result

    def graph(self, run: Callable, beyond_inputs: int) -> Callable:
        """Wraps a compiled graph that needs `beyond_inputs` bytes in addition to its inputs."""

        def called(*args):
            before = self.now()
            self.runs_graph = True
            try:
                results = run(*args)
            finally:
                self.runs_graph = False
            self.peak = max(self.peak, before + beyond_inputs)
            self.add_all(results)
            return results

        return called


@contextlib.contextmanager
def compiled_as(live: PeakOfStep, needs: list[int]) -> Iterator[None]:
    """Counts the memory that Inductor allocates for the layers compiled in this context.

    needs: receives the bytes that each graph needs in addition to its inputs.
    """

    def plan(_direction: str, graph: torch.fx.GraphModule, lowering: GraphLowering) -> Callable:
        scheduler = schedule(lowering)
        nodes = list(scheduler.nodes)
        outputs = set(lowering.get_output_names())
        names = (scheduler.name_to_buf, scheduler.name_to_fused_node)
        _, inputs = prepare_planning_info(nodes, *names, set(lowering.graph_inputs), outputs)
        peak, _ = estimate_peak_memory(nodes, inputs, outputs)
        needs.append(peak - sum(buffer.mpi_buffer.size_free for buffer in inputs.values()))
        return live.graph(graph.forward, needs[-1])

    with inductor(lowered(plan)):
        yield


def softmax_in_place(cap: float | None) -> Callable:
    """Returns a stand-in for the compiled softmax, which works in place on the logits."""
    return lambda logits_CV, target_C1, z_loss: (logits_CV.new_zeros(len(logits_CV), 1, dtype=torch.float32),) * 2


def zero_settings(setup: MemorySetup, stack: ExitStack) -> tuple[dict[str, Any], Path]:
    """Returns the setup's DeepSpeed settings, and a temporary folder that they offload to if they use NVMe."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    settings = copy.deepcopy(setup.layout.zero)
    if setup.strategy == "zero3_offload_nvme":
        settings["offload_optimizer"]["nvme_path"] = str(folder)
    return {"zero_optimization": settings}, folder


def peak(setup: MemorySetup, rank: int) -> dict[str, Any]:
    """Measures the memory of a step after the first, in bytes.

    device: {phase: peak}.
    host: peak in CPU memory during the update.
    disk: size of DeepSpeed's swap files.
    """
    MODELS[setup.model] = setup.model_config()
    launch = setup.launch(rank)
    even_loss = functools.partial(LanguageModelLoss, backend="chunked_compiled")
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ranks_on_fake_cuda, "LanguageModelLoss", even_loss))
        # ZeRO-3 replaces F.linear permanently, which would change the saved activations of other strategies.
        stack.enter_context(mock.patch.object(torch.nn.functional, "linear", torch.nn.functional.linear))
        stack.enter_context(mock.patch.object(pretrain.model.loss, "_compiled_softmax_less_target_", softmax_in_place))
        disk = None
        if launch.on_host:
            settings, disk = zero_settings(setup, stack)
            stack.enter_context(mock.patch("pretrain.parallel.zero.deepspeed_file", lambda: settings))
            # ZeRO-3 compares the order of its layers with rank 0's, which a fake process group doesn't send.
            compare = "deepspeed.runtime.zero.partitioned_param_coordinator.assert_ints_same_as_other_ranks"
            stack.enter_context(mock.patch(compare))
        live = PeakOfStep("cpu" if launch.on_host else "cuda")
        graphs: list[int] = []
        if setup.compiled:
            stack.enter_context(compiled_as(live, graphs))
        stack.enter_context(live)
        run = prepared(launch, stack)
        checkpoint_activations(run.causal_lm, setup.checkpointing)
        if setup.compiled:
            budget = getattr(setup.checkpointing, "memory_budget", 1.0)
            compile_model(run.model, run.causal_lm, "regional", memory_budget=budget)
        run.model.train()
        moments: dict[str, float] = {}
        known = -1
        while not moments or known < len(graphs):  # the first step creates optimizer state, and any step may compile
            known = len(graphs) if moments else -1
            gc.collect()  # frees objects left over from compilation
            moments = {}
            run.strategy.begin_step(0.001, micro_steps=setup.micro_steps)
            for micro_step in range(setup.micro_steps):
                with run.strategy.accumulate(is_last=micro_step == setup.micro_steps - 1):
                    live.peak = 0
                    loss, _ = run.model(**run.batch)
                    moments[f"forward {micro_step}"] = live.peak
                    live.peak = 0
                    run.strategy.backward(loss / setup.micro_steps)
                    del loss
                    moments[f"backward {micro_step}"] = live.peak
            live.peak = live.host.peak = 0
            run.strategy.update(1.0)
            moments["update"] = live.peak
        moments["between"] = live.now()
        on_disk = sum(file.stat().st_size for file in disk.rglob("*.swp")) if disk else 0
        return {"device": moments, "host": live.host.peak, "disk": on_disk}


def cases(setups: list[MemorySetup]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Returns a case for each rank to measure."""
    # ZeRO comes last, because later launches would destroy the process groups that DeepSpeed keeps.
    return {
        f"{setup.name}, rank {rank}": functools.partial(peak, setup, rank)
        for setup in sorted(setups, key=lambda setup: setup.strategy.startswith("zero"))
        for rank in setup.looked_at
    }


CASES = cases(SETUPS)
