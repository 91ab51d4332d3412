"""Cases of tests/model/test_gpu_traffic.py, for support.fake_cuda to run: what a layer moves through a GPU's memory.

A strategy prepares a model of real widths as one of eight GPUs and runs a micro-batch of real size; Inductor writes
the kernels of its compiled layers as for an H100. Of every kernel that is neither a matrix product nor attention, the
bytes that it reads and writes are added up: each buffer once, as if caches were perfect.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import fx
from torch._inductor.graph import GraphLowering

from pretrain.model.compile import compile_model
from support import kernels_on_fake_cuda
from support.kernels_on_fake_cuda import inductor
from support.ranks_on_fake_cuda import MODELS, RANKS, Launch, prepared
from support.traffic_setups import SETUPS, TP_RANKS, Setup


@dataclass
class Traffic:
    """What a layer's graphs move and keep; bytes of the whole micro-batch."""

    graphs: list[str] = field(default_factory=list)
    """'forward' or 'backward', one for each graph."""
    kernels: dict[str, int] = field(default_factory=dict)
    """{kernel: bytes}."""
    kept: int = 0
    """Tensors that the forward pass leaves for the backward pass, the layer's input included, weights not."""


@contextmanager
def measured(hidden_shape: tuple[int, ...]) -> Iterator[Traffic]:
    """Counts the layers that are compiled inside."""
    traffic = Traffic()

    class Counting(GraphLowering):
        def codegen(self):
            code = super().codegen()
            for node in self.scheduler.nodes:
                if not node.is_extern() and not node.is_template():
                    name = f"{len(traffic.graphs)} {node.get_name()}"
                    traffic.kernels[name] = node.get_read_write_buffers_sizes()
            return code

    def seen(direction: str, graph: fx.GraphModule) -> None:
        traffic.graphs.append(direction)
        if direction == "forward":
            traffic.kept += kept_by(graph.graph, hidden_shape)

    with mock.patch.object(kernels_on_fake_cuda, "GraphLowering", Counting), inductor([], seen):
        yield traffic


def kept_by(graph: fx.Graph, hidden_shape: tuple[int, ...]) -> int:
    """Bytes that a forward graph hands to its backward graph, each storage once."""
    storages = {}
    result, *saved = graph.find_nodes(op="output")[0].args[0]
    for node in saved:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        # Of the graph's inputs, hidden states are kept by this layer alone.
        if isinstance(value, torch.Tensor) and (node.op != "placeholder" or value.shape == hidden_shape):
            storage = value.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    storages.pop(result.meta["val"].untyped_storage()._cdata, None)  # the next layer's input, counted there
    return sum(storages.values())


MODELS |= {setup.model: setup.model_config() for setup in SETUPS}


def layer(setup: Setup) -> dict[str, object]:
    """Forward and backward of a micro-batch under the strategy, its layers compiled."""
    launch = Launch(
        setup.strategy,
        model=setup.model,
        sequences=setup.sequences,
        length=setup.length,
        ranks=1 if setup.strategy == "single" else RANKS,
        environment=(("PARALLELISM_CONFIG_TP_SIZE", str(TP_RANKS)),) if setup.strategy == "tp" else (),
        settings=(("compile", "regional"),),
    )
    with ExitStack() as stack:
        traffic = stack.enter_context(measured((setup.sequences, setup.length, setup.width)))
        run = prepared(launch, stack)
        compile_model(run.model, run.causal_lm, "regional")
        run.model.train()
        with run.strategy.accumulate(is_last=True):
            loss, _ = run.model(**run.batch)
            run.strategy.backward(loss)
    largest = dict(sorted(traffic.kernels.items(), key=lambda pair: -pair[1]))
    return {
        "graphs": traffic.graphs,
        "bytes": sum(traffic.kernels.values()),
        "kept": traffic.kept,
        "kernels": largest if os.environ.get("TRAFFIC") else {},
    }


CASES = {setup.name: functools.partial(layer, setup) for setup in SETUPS}
