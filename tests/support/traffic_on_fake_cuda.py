"""Fake CUDA cases for tests/model/test_gpu_traffic.py: the GPU memory traffic of a layer.

Each case runs a full-width model with a full-size micro-batch on one of eight simulated GPUs, and adds up the bytes
read and written by the kernels that Inductor generates for an H100, except matmuls and attention. Each buffer is
counted once per kernel, as with perfect caches.
"""

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import fx
from torch._inductor.graph import GraphLowering

from pretrain.model.compile import compile_model
from support.kernels_on_fake_cuda import inductor, lowered, schedule
from support.ranks_on_fake_cuda import MODELS, RANKS, Launch, prepared
from support.traffic_setups import SETUPS, TP_RANKS, Setup


@dataclass(eq=False)
class Graph:
    """Memory traffic of a compiled graph, in bytes per micro-batch."""

    text: str
    """Text of Dynamo's graph, see `text_of`."""
    direction: str
    """'forward' or 'backward'."""
    kernels: dict[str, int]
    """{kernel: bytes}."""
    kept: int
    """Bytes saved for the backward pass, including the layer's input but not the weights."""


class Measured:
    """Graphs that were compiled in a measurement."""

    current: "Measured"

    def __init__(self):
        self.compilations: Counter[str] = Counter()
        """{text of Dynamo's graph: number of times that it was compiled}."""
        self.runs: Counter[Graph] = Counter()

    def graphs(self) -> list[Graph]:
        """Returns the graphs that ran. A graph that was compiled twice appears twice."""
        assert len(set(self.runs.values())) == 1, "forward and backward did not run equally often"
        return [graph for graph in self.runs for _ in range(self.compilations[graph.text])]


COMPILED: dict[str, Callable] = {}
"""{text of Dynamo's graph: compiled function}. Shared by all measurements, because `single` and `ddp` have the same
graphs."""


@contextmanager
def measured(hidden_shape: tuple[int, ...]) -> Iterator[Measured]:
    """Measures layers that are compiled in this context."""

    def count(text: str, direction: str, graph: fx.GraphModule, lowering: GraphLowering) -> Callable:
        nodes = [node for node in schedule(lowering).nodes if not node.is_extern() and not node.is_template()]
        kernels = {node.get_name(): node.get_read_write_buffers_sizes() for node in nodes}
        kept = kept_by(graph.graph, hidden_shape) if direction == "forward" else 0
        counted = Graph(text, direction, kernels, kept)

        def run(*arguments):
            Measured.current.runs[counted] += 1
            return graph.forward(*arguments)

        return run

    def backend(graph: fx.GraphModule, inputs: list) -> Callable:
        text = text_of(graph, inputs)
        Measured.current.compilations[text] += 1
        if text not in COMPILED:
            COMPILED[text] = lowered(functools.partial(count, text))(graph, inputs)
        return COMPILED[text]

    Measured.current = Measured()
    with inductor(backend):
        yield Measured.current


def text_of(graph: fx.GraphModule, inputs: list) -> str:
    """Returns a text that differs between graphs that could be compiled differently."""
    codes = [module.code for module in graph.modules() if isinstance(module, fx.GraphModule)]
    autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    return "\n".join([*codes, *map(described, inputs), str(autocast)])


def described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.shape} {value.stride()} {value.device} {value.requires_grad}"
    return repr(value)


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
    graphs = traffic.graphs()
    kernels = {f"{number} {name}": size for number, graph in enumerate(graphs) for name, size in graph.kernels.items()}
    return {
        "graphs": [graph.direction for graph in graphs],
        "bytes": sum(kernels.values()),
        "kept": sum(graph.kept for graph in graphs),
        "kernels": dict(sorted(kernels.items(), key=lambda pair: -pair[1])) if os.environ.get("TRAFFIC") else {},
    }


CASES = {setup.name: functools.partial(layer, setup) for setup in SETUPS}
