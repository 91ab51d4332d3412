"""Fake CUDA cases for tests/model/test_gpu_traffic.py: the GPU memory traffic of a layer.

Each case runs a full-width model with a full-size micro-batch on one of eight simulated GPUs, and adds up the bytes
read and written by the kernels that Inductor generates for an H100, except matmuls and attention. Each buffer is
counted once per kernel, as with perfect caches.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._inductor.graph import GraphLowering

from pretrain.model.compile import compile_model
from support.kernels_on_fake_cuda import inductor, schedule
from support.ranks_on_fake_cuda import MODELS, RANKS, Launch, prepared
from support.traffic_setups import SETUPS, TP_RANKS, Setup


@dataclass
class Traffic:
    """Memory traffic and saved activations of a layer's graphs, in bytes per micro-batch."""

    graphs: list[str] = field(default_factory=list)
    """'forward' or 'backward' for each graph."""
    kernels: dict[str, int] = field(default_factory=dict)
    """{kernel: bytes}."""
    kept: int = 0
    """Bytes saved for the backward pass, including the layer's input but not the weights."""


@contextmanager
def measured(hidden_shape: tuple[int, ...]) -> Iterator[Traffic]:
    """Measures layers that are compiled in this context."""
    traffic = Traffic()

    def count(direction: str, graph: fx.GraphModule, lowering: GraphLowering) -> None:
        for node in schedule(lowering).nodes:
            if not node.is_extern() and not node.is_template():
                traffic.kernels[f"{len(traffic.graphs)} {node.get_name()}"] = node.get_read_write_buffers_sizes()
        traffic.graphs.append(direction)
        if direction == "forward":
            traffic.kept += kept_by(graph.graph, hidden_shape)

    with inductor(count):
        yield traffic


def kept_by(graph: fx.Graph, hidden_shape: tuple[int, ...]) -> int:
    """Returns the bytes that a forward graph saves for its backward graph, with each storage counted once."""
    storages = {}
    result, *saved = graph.find_nodes(op="output")[0].args[0]
    for node in saved:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        # Hidden states are the only graph inputs that count.
        if isinstance(value, torch.Tensor) and (node.op != "placeholder" or value.shape == hidden_shape):
            storage = value.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    storages.pop(result.meta["val"].untyped_storage()._cdata, None)  # counted as the next layer's input
    return sum(storages.values())


MODELS |= {setup.model: setup.model_config() for setup in SETUPS}


def layer(setup: Setup) -> dict[str, object]:
    """Runs the forward and backward pass for a micro-batch with compiled layers."""
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
