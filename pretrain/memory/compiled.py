"""What a compiled layer holds: its forward and backward graphs as torch.compile partitions them, counted.

Pointwise operations are fused into their neighbours and never reach memory, unless something that cannot be fused
reads them: a matrix product, an attention kernel, or the end of the graph.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx


@dataclass
class LayerGraphs:
    """Sizes in bytes, filled in while a layer is compiled and called."""

    kept: float = 0.0
    """Tensors that the forward graph hands to the backward graph, the layer's input included, weights not."""
    backward: float = 0.0
    """More than what is kept, at the peak of the backward graph."""


def graph_backend(graphs: LayerGraphs, hidden_shape: tuple[int, ...]) -> Callable:
    """A backend for torch.compile that generates no code: it counts into `graphs` and runs the graph as it is.

    hidden_shape is that of the layer's input: of the graph's inputs, the one that only this layer keeps alive.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    saved: dict[int, int] = {}

    def forward(graph_module: fx.GraphModule, inputs: list) -> Callable:
        outputs = graph_module.graph.find_nodes(op="output")[0].args[0]
        # The output itself is the next layer's input, and counted there.
        for node in outputs[1:]:
            if isinstance(node, fx.Node) and (node.op != "placeholder" or shape_of(node) == hidden_shape):
                saved.update(tensor_storage(node))
        graphs.kept = sum(saved.values())
        return make_boxed_func(graph_module.forward)

    def backward(graph_module: fx.GraphModule, inputs: list) -> Callable:
        graphs.backward = peak_beyond_inputs(graph_module.graph)
        return make_boxed_func(graph_module.forward)

    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table,
    )


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(getattr(node.meta.get("val"), "shape", ()))


def tensor_storage(node: fx.Node) -> list[tuple[int, int]]:
    """[(identity, bytes)] of the memory behind a node's tensor; views of one tensor share it."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return []
    storage = value.untyped_storage()
    return [(storage._cdata, storage.nbytes())]


def is_fusible(node: fx.Node) -> bool:
    """Pointwise operations, views and reductions: what the compiler computes on the way."""
    if node.op != "call_function":
        return False
    tags = getattr(node.target, "tags", ())
    name = str(node.target)
    return torch.Tag.pointwise in tags or any(word in name for word in FUSED)


FUSED = ("view", "permute", "expand", "slice", "getitem", "convert_element_type", "sum", "mean", "transpose", "clone")
FUSED += ("cat", "unsqueeze", "squeeze", "slice_scatter", "full", "select", "alias", "t.default", "reshape", "iota")


def peak_beyond_inputs(graph: fx.Graph) -> float:
    """Most bytes alive while the graph runs, beyond its inputs; inputs are freed after their last use."""
    nodes = list(graph.nodes)
    last_use: dict[int, int] = {}
    written: set[int] = set()
    for place, node in enumerate(nodes):
        for operand in node.all_input_nodes:
            for key, _ in tensor_storage(operand):
                last_use[key] = place
                if not is_fusible(node):
                    written.add(key)
        if node.op == "call_function" and not is_fusible(node):
            written |= {key for key, _ in tensor_storage(node)}
    live = {key: size for node in nodes if node.op == "placeholder" for key, size in tensor_storage(node)}
    at_start = peak = sum(live.values())
    for place, node in enumerate(nodes):
        if node.op == "call_function":
            live |= {key: size for key, size in tensor_storage(node) if key in written}
        peak = max(peak, sum(live.values()))
        live = {key: size for key, size in live.items() if last_use.get(key, len(nodes)) > place}
    return peak - at_start
