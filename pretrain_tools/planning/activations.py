"""Estimates activation memory by running the model on fake tensors.

The model runs once with one layer and once with two, while a dispatch mode counts the live tensors. Compiled layers
run the graphs from torch.compile's partitioner (a minimum cut between forward and backward, arXiv 2111.13257), and
their memory is computed from the tensors that these graphs would write.

Sizes are in bytes and linear in the number of sequences: a `Line` is a polynomial with the coefficients
[fixed, per sequence].
"""

import contextlib
import copy
import functools
import gc
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from numpy.polynomial import Polynomial as Line
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._guards import TracingContext

# Private, but torch's own memory profilers use them too.
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, register_flop_formula
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations import moe

from pretrain.config import MemoryBudget, WindowSpec
from pretrain.model.attention import autocast_dtype, with_rows
from pretrain.model.bf16_cpu_attention import empty_gradients, empty_heads_last
from pretrain.model.build import KeyedConfig, attention_width, build_meta_model, shared_meta_model
from pretrain.model.compile import checkpoint_activations, compile_layer, is_recomputed, layers_of
from pretrain.model.document_rows import MAX_CELLS_PER_TOKEN, DocumentRows
from pretrain.model.routers import routers_of
from pretrain.parallel.expert_parallel import expert_modules
from pretrain_tools.planning.fp8_shapes import use_fp8_shapes


@dataclass(frozen=True)
class Activations:
    """Activation memory of one process in bytes, from the embedding output to the last hidden states."""

    outside: Line
    """Memory in use outside the layers after the forward pass: rotary tables and the final norm's saved tensors."""
    before: Line
    """The part of `outside` that isn't the final norm's."""
    per_layer: Line
    """Bytes that each layer saves for its backward pass."""
    forward: Line
    """Additional memory at the peak of the last layer's forward pass, beyond what is in use after it."""
    norm: Line
    """Additional memory during the final norm's backward pass, including the gradient of the hidden states."""
    in_layer: Line
    """Additional memory during the last layer's backward pass, including the gradient of its output. The final norm's
    tensors are free by then."""
    first: Line
    """Bytes that the first layer saves or recomputes, plus the additional memory during its backward pass."""
    hidden: Line
    """Size of the last hidden states."""
    recomputed: float = 0.0
    """Fraction of the forward FLOPs recomputed in the backward pass to stay within a memory budget."""

    def kept(self, layers: int, sequences: int) -> float:
        """Returns the bytes alive between the forward and backward passes."""
        return self.outside(sequences) + layers * self.per_layer(sequences)


# A shape-only attention operator that saves the same tensors as flash attention: query, key, value, output and
# logsumexp. With an autograd.Function, torch.compile's partitioner would consider the outputs free and recompute them.
SHAPES = "groundwork::flash_shapes"
SHAPES_BACKWARD = "groundwork::flash_shapes_backward"
torch.library.define(SHAPES, "(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor)")
torch.library.define(
    SHAPES_BACKWARD,
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse) -> (Tensor, Tensor, Tensor)",
)


@torch.library.register_fake(SHAPES)
def _(query_BHTE, key_BGTE, value_BGTE):
    batch, heads, length, _ = query_BHTE.shape
    # In latent attention, values have a different width than queries and keys.
    out_BHTE = query_BHTE.new_empty(batch, heads, length, value_BGTE.shape[-1])
    return empty_heads_last(out_BHTE), query_BHTE.new_empty(batch, heads, length, dtype=torch.float32)


torch.library.register_fake(SHAPES_BACKWARD, empty_gradients)


def _save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx, grad_BHTE, _):
    return torch.ops.groundwork.flash_shapes_backward(grad_BHTE, *ctx.saved_tensors)


torch.library.register_autograd(SHAPES, _gradients, setup_context=_save_for_backward)


@register_flop_formula(torch.ops.groundwork.flash_shapes)
def _flops_of_attention(query_BHTE, key_BGTE, value_BGTE, *_, out_shape=None, **kwargs) -> int:
    """Counts both matmuls for all pairs of positions, like torch's own attention formulas."""
    batch, heads, length, width = query_BHTE
    return 2 * batch * heads * length**2 * (width + value_BGTE[-1])


@register_flop_formula(torch.ops.groundwork.flash_shapes_backward)
def _flops_of_attention_backward(grad_BHTE, *shapes, out_shape=None, **kwargs) -> int:
    return 2 * _flops_of_attention(*shapes[:3])


def _planned_attention(module, query_BHTE, key_BGTE, value_BGTE, attention_mask, **kwargs) -> tuple[Tensor, None]:
    """Computes only the shape of attention's output, in the autocast dtype if autocast is enabled."""
    half = autocast_dtype(value_BGTE)
    width, value_width = query_BHTE.shape[-1], value_BGTE.shape[-1]
    if kwargs.get("cu_seq_lens_q") is not None and value_width < width:
        value_BGTE = F.pad(value_BGTE, (0, width - value_width))  # as in `sdpa`
    out_BHTE, _ = torch.ops.groundwork.flash_shapes(*(x.to(half) for x in (query_BHTE, key_BGTE, value_BGTE)))
    return out_BHTE[..., :value_width].transpose(1, 2), None


EXPERTS_IN_ALL_LAYERS = {
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "moe_layer_start_index": 0,
    "num_dense_layers": 0,
    "interleave_moe_layer_step": 1,
}
"""{config key that makes some layers dense: value that gives every layer experts}"""

FLASH = "groundwork_planned"
AttentionInterface.register(FLASH, _planned_attention)


TRACED_LENGTH = 256
"""Maximum sequence length to trace for mixers. Memory for longer sequences is extrapolated linearly."""


class LiveBytes(TorchDispatchMode):
    """Tracks the current and peak bytes of live storages, from dispatched calls and calls to `add`."""

    supports_higher_order_operators = True  # recomputed graphs with dropout save the state of the generator

    def __init__(self):
        super().__init__()
        self.now = 0
        self.peak = 0
        self._seen: dict[int, weakref.ref] = {}
        self._runs_graph = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # otherwise compiled code would run uncompiled

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.prim.device.default:  # two thirds of the calls
            return args[0].device
        result = function(*args, **(kwargs or {}))
        # Private, but the only way to recognize that the compiler is tracing.
        if not self._runs_graph and not TracingContext.try_get():
            self._add_all(result)
        return result

    def run(self, graph: Callable, args: tuple, needed: float) -> Any:
        """Runs a compiled graph that needs this many bytes in addition to its inputs."""
        self.peak = max(self.peak, self.now + needed)
        self._runs_graph = True
        try:
            results = graph(*args)
        finally:
            self._runs_graph = False
        self._add_all(results)
        return results

    def _add_all(self, results: Any) -> None:
        for value in _pytree.tree_leaves(results):
            if isinstance(value, Tensor):
                self.add(value)

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        key = storage._cdata  # data_ptr() is 0 for every fake storage
        if key in self._seen:
            return

        def freed(_: Any) -> None:
            self.now -= size
            self._seen.pop(key, None)

        self._seen[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


class _Embedding(torch.autograd.Function):
    """A placeholder embedding. Like the real one, it doesn't save its output."""

    @staticmethod
    def forward(ctx, anchor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    @staticmethod
    def backward(ctx, _: Tensor) -> tuple[None, None, None]:
        return None, None, None


class _GradientOfHidden(torch.autograd.Function):
    """A placeholder loss. Like the real one, it allocates the hidden states' gradient in the forward pass."""

    @staticmethod
    def forward(ctx, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(hidden))
        return hidden.new_empty(())

    @staticmethod
    def backward(ctx, _: Tensor) -> Tensor:
        return ctx.saved_tensors[0]


@dataclass(frozen=True)
class ForwardPass:
    """Describes how a process calls the model."""

    window: WindowSpec
    weights: torch.dtype
    """Weight dtype in the forward pass."""
    autocast: bool
    """True if autocast to `half` is enabled (with fp32 weights)."""
    attention: str = FLASH
    """FLASH for GPU kernels that save query, key, value, output and logsumexp (sdpa in half precision, varlen, flash
    attention 2 and 3, flex attention); groundwork_sdpa for CPUs; or groundwork_eager."""
    activation_checkpointing: str | float | MemoryBudget = "none"
    compiled: bool = False
    """True if each layer is compiled separately."""
    mixers: tuple[str, ...] = ()
    """Names of the mixer classes that process each document as a separate row, with worst-case padding."""
    half: torch.dtype = torch.bfloat16
    """Autocast dtype. With fp16, hidden states between layers stay in fp32."""
    has_experts: bool = True
    """False to trace layers without experts. `trace_activations` sets this for each layer."""
    expert_ranks: int = 1
    """Number of processes that share a layer's experts and exchange rows with each other, assuming balanced load."""
    token_shares: int = 1
    """Number of tensor-parallel processes that each send their share of the tokens to the experts."""
    keeps_gradients: bool = False
    """True if the layer's gradients stay in memory until the end of its backward pass, as with fully_shard."""
    fp8: bool = False
    """True if the layers multiply in fp8."""
    gathers_fp8: bool = False
    """True if the layers' weights are gathered in fp8."""
    sequences: int | None = None
    """Micro-batch size, set only with a memory budget, because memory is then nonlinear in the micro-batch size."""


def trace_activations(model_config: Any, call: ForwardPass) -> Activations:
    """Traces one process's activations. Results are cached per model config and call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        keyed = KeyedConfig.of(model_config)
        share = call.activation_checkpointing
        traces = []
        for number, has_experts in enumerate(_layers_with_experts(model_config)):
            mode = share
            if isinstance(share, float):
                mode = "full" if is_recomputed(number, share) else "none"
            traces.append(_trace(keyed, replace(call, activation_checkpointing=mode, has_experts=has_experts)))
        per_layer = sum(trace.per_layer for trace in traces) / len(traces)
        return replace(traces[-1], per_layer=per_layer, first=traces[0].first)


def _layers_with_experts(model_config: Any) -> list[bool]:
    """Returns for each layer whether it has experts."""
    model = shared_meta_model(model_config)
    routers = {router.module for router in routers_of(model)}
    return [not routers.isdisjoint(layer.modules()) for layer in layers_of(model)]


@functools.lru_cache(maxsize=64)
def _trace(keyed: KeyedConfig, call: ForwardPass) -> Activations:
    model_config = keyed.config
    has_kinds = call.mixers and not _follow_layers(model_config)
    kinds = list(getattr(model_config, "layer_types", None) or []) if has_kinds else []
    if len(set(kinds)) > 1:
        of_kinds = [_trace(_of_one_kind(model_config, kind), call) for kind in kinds]
        mean = sum(found.per_layer for found in of_kinds) / len(of_kinds)
        return replace(max(of_kinds, key=lambda found: found.in_layer(1)), per_layer=mean)
    if call.mixers:
        call = replace(call, compiled=False)  # mixers with document rows run outside compiled layers
        # Python loops over tokens, as in Mamba, take minutes to trace for long sequences.
        length = call.window.sequence_length
        is_linear = call.attention in (FLASH, "groundwork_sdpa") or not attention_width(model_config)
        if is_linear and length > TRACED_LENGTH:
            short = _trace(keyed, replace(call, window=replace(call.window, sequence_length=TRACED_LENGTH)))
            longer = length / TRACED_LENGTH
            lines = [value for value in vars(short).values() if isinstance(value, Line)]
            return Activations(*(Line([line(0), longer * (line(1) - line(0))]) for line in lines))
    counts = (call.sequences,) if call.sequences else (1, 2)
    measured: dict[tuple[int, int], dict[str, float]] = {}
    for n in counts:
        compiler = Compiler() if call.compiled else None
        with _without_garbage_collection():
            for layers in (1, 2):
                measured[layers, n] = _measure(model_config, layers, n, call, compiler)
        if compiler is not None:
            torch.compiler.reset()  # otherwise these graphs would count toward the limit on recompilations

    def line(key: str, layers: int) -> Line:
        if call.sequences:
            return Line([0.0, measured[layers, call.sequences][key] / call.sequences])
        at_one, at_two = (measured[layers, n][key] for n in counts)
        return Line([2 * at_one - at_two, at_two - at_one])

    kept = line("kept", 1)
    per_layer = line("kept", 2) - kept
    before_layers = line("before layers", 1)
    in_layer = line("peak in layer", 1) - before_layers
    return Activations(
        kept - per_layer,
        before_layers - per_layer,
        per_layer,
        line("peak in forward", 1) - kept,
        line("peak in norm", 1) - kept,
        in_layer,
        per_layer + in_layer,
        line("hidden", 1),
        measured[1, counts[0]]["recomputed"],
    )


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disables garbage collection, whose timing changes which of the compiler's tensors are counted."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _of_one_kind(model_config: Any, kind: str) -> KeyedConfig:
    config = copy.deepcopy(model_config)
    config.layer_types = [kind] * len(model_config.layer_types)
    return KeyedConfig.of(config)


def _measure(
    model_config: Any, layers: int, sequences: int, call: ForwardPass, compiler: "Compiler | None"
) -> dict[str, float]:
    """Measures memory after the forward pass and at its peaks, in bytes, excluding weights and their gradients.

    If `call.keeps_gradients` is True, a layer's gradients count as part of its backward pass. `recomputed` is the
    fraction of the forward FLOPs that compiled graphs recompute.
    """
    model = _meta_model(model_config, layers, with_rows(call.attention, call.mixers), call.has_experts)
    if call.expert_ranks > 1:
        for experts in expert_modules(model).values():
            _divide_experts(experts, call.expert_ranks, call.token_shares)
    contexts = {"context_fn": lambda: (contextlib.nullcontext(), AutocastOfGPUs())}  # forward pass, recomputation
    checkpoint_activations(model, call.activation_checkpointing, **(contexts if _has_autocast_of_gpus(call) else {}))
    budget = getattr(call.activation_checkpointing, "memory_budget", 1.0)
    # Weights gathered in fp8 are tensor subclasses. torch doesn't treat most of them as parameters, and saves their
    # transposed copies.
    settings = {"activation_memory_budget": budget, "treat_parameters_as_free_to_save": not call.gathers_fp8}
    with _fake_tensors(model, call), functorch_config.patch(settings):
        if not call.keeps_gradients:
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter)
        inputs = _inputs(model_config, sequences, call)
        with LiveBytes() as live:
            for tensor in [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]:
                if tensor is not None:
                    live.add(tensor)
            live.now = live.peak = 0
            live.add(inputs["inputs_embeds"])
            if compiler is not None:
                compiler.live = live
                for layer in layers_of(model):
                    compile_layer(layer, backend=compiler.backend)
            ends: list[tuple[int, int]] = []  # peak of the final norm's backward pass, and bytes in use after it

            def end_norm(grad):
                ends.append((live.peak, live.now - grad.untyped_storage().nbytes()))
                live.peak = live.now

            def watch(_layer, _args, output):
                (output if isinstance(output, Tensor) else output[0]).register_hook(end_norm)

            layers_of(model)[-1].register_forward_hook(watch)
            hidden = _last_hidden_state(model, inputs, call)
            in_forward = live.peak
            size = hidden.untyped_storage().nbytes()
            loss = _GradientOfHidden.apply(hidden)
            # A training step doesn't keep these references.
            del hidden
            inputs.clear()
            kept = live.now - size  # without the gradient allocated by the loss
            live.peak = live.now
            loss.backward()
            in_norm, before_layers = ends[0]
            return {
                "kept": kept,
                "before layers": before_layers,
                "peak in forward": in_forward,
                "peak in norm": in_norm,
                "peak in layer": live.peak,
                "hidden": size,
                "recomputed": compiler.recomputed if compiler and budget < 1.0 else 0.0,
            }


class _Exchange(torch.autograd.Function):
    """An all-to-all that sends and receives the same number of rows."""

    @staticmethod
    def forward(ctx, rows: Tensor) -> Tensor:
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return torch.empty_like(grad)


class _Gather(torch.autograd.Function):
    """An all-gather of each process's share of the tokens."""

    @staticmethod
    def forward(ctx, part: Tensor, tokens: int) -> Tensor:
        ctx.tokens = len(part)
        return part.new_empty(tokens, part.shape[1])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad[: ctx.tokens], None


def _divide_experts(experts: nn.Module, ranks: int, shares: int) -> None:
    """Stands in for pretrain.parallel.expert_parallel.divide_experts. Allocates and saves the same tensors."""
    compute = experts.forward
    for name, parameter in experts.named_parameters(recurse=False):
        setattr(experts, name, nn.Parameter(parameter[: math.ceil(len(parameter) / ranks)]))
    experts.num_experts = math.ceil(experts.num_experts / ranks)

    @torch.compiler.disable
    def forward(hidden_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        tokens = len(hidden_ND)
        if shares > 1:
            hidden_ND, chosen_NK, weights_NK = (x[: tokens // shares] for x in (hidden_ND, chosen_NK, weights_NK))
        order = chosen_NK.flatten().argsort()
        rows = _Exchange.apply(hidden_ND[order // chosen_NK.shape[-1]])
        rows = compute(rows, order[:, None], torch.ones_like(order[:, None], dtype=rows.dtype))
        returned = _Exchange.apply(rows)
        rows = torch.empty_like(returned)
        rows[order] = returned
        rows = rows.view(*weights_NK.shape, -1)
        out_ND = (rows * weights_NK[..., None]).sum(1).to(hidden_ND.dtype)
        return _Gather.apply(out_ND, tokens) if shares > 1 else out_ND

    experts.forward = forward


IN_FP32 = {torch.pow, Tensor.pow, Tensor.__pow__, F.layer_norm, F.softmax, torch.rsqrt, torch.exp, Tensor.exp}
"""Functions that autocast runs in fp32 on GPUs, but not on CPUs."""


class AutocastOfGPUs(TorchFunctionMode):
    """Casts inputs to fp32 as autocast does on GPUs. The tensors to trace are on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        is_cast = function in IN_FP32 and args and isinstance(args[0], Tensor)  # torch.pow's base may be a number
        if is_cast and args[0].dtype in (torch.bfloat16, torch.float16):
            args = (args[0].float(), *args[1:])
        return function(*args, **(kwargs or {}))


def _has_autocast_of_gpus(call: ForwardPass) -> bool:
    return call.attention == FLASH and call.autocast and not call.compiled


def _last_hidden_state(model: PreTrainedModel, inputs: dict[str, Any], call: ForwardPass) -> Tensor:
    casts = AutocastOfGPUs() if _has_autocast_of_gpus(call) else contextlib.nullcontext()
    with torch.autocast("cpu", call.half, enabled=call.autocast), casts:
        return model.base_model(use_cache=False, **inputs).last_hidden_state


@contextlib.contextmanager
def _fake_tensors(model: PreTrainedModel, call: ForwardPass) -> Iterator[None]:
    """Converts the model to fake tensors and makes all new tensors fake. Buffers keep their dtype."""
    with FakeTensorMode(allow_non_fake_inputs=True), _grouped_products_of_any_dtype():
        for module in model.modules():
            # Module.to can't convert meta tensors to fake tensors.
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=call.weights)))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
        model.tie_weights()
        model.train()
        if call.fp8:
            use_fp8_shapes(model, gathers=call.gathers_fp8)
        yield


@contextlib.contextmanager
def _grouped_products_of_any_dtype() -> Iterator[None]:
    """Makes transformers use its own grouped matmul unless the weights are bf16.

    torch's grouped_mm supports fake tensors only in bf16. This patches a private transformers function.
    """
    can_use = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda input, weight, offs: weight.dtype == torch.bfloat16
    try:
        yield
    finally:
        moe._can_use_grouped_mm = can_use


def _meta_model(model_config: Any, layers: int, attention: str, has_experts: bool) -> PreTrainedModel:
    """Builds the model with this many layers on the meta device. In an MoE model, all layers have experts, or none."""
    config = copy.deepcopy(model_config)
    config.num_hidden_layers = layers
    for name, value in EXPERTS_IN_ALL_LAYERS.items():
        if getattr(config, name, None) is not None:
            in_none = list(range(layers)) if isinstance(value, list) else layers + 1
            setattr(config, name, value if has_experts else in_none)
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = ["sparse" if has_experts else "dense"] * layers
    if getattr(config, "layer_types", None) and not _follow_layers(config):
        config.layer_types = (config.layer_types * layers)[:layers]
    return build_meta_model(config, attention=attention)


def _follow_layers(config: Any) -> bool:
    """Returns True if `layer_types` is derived from other settings, as in Mamba and Jamba."""
    name = type(config).attribute_map.get("layer_types", "layer_types")
    return isinstance(getattr(type(config), name, None), property)


def _inputs(model_config: Any, sequences: int, call: ForwardPass) -> dict[str, Any]:
    """Creates the base model's arguments, with embeddings instead of token IDs."""
    length = call.window.sequence_length
    shape = (sequences, length, model_config.hidden_size)
    # Embeddings return bf16 under bf16 autocast (see `build_meta_model`).
    in_bf16 = call.autocast and call.half == torch.bfloat16
    dtype = torch.bfloat16 if in_bf16 else call.weights
    inputs = {"inputs_embeds": _Embedding.apply(torch.empty((), requires_grad=True), shape, dtype)}
    if not call.window.document_mask:
        return inputs
    segments = torch.empty(sequences + 1, dtype=torch.int32)
    layout = {"cu_seq_lens_q": segments, "cu_seq_lens_k": segments, "max_length_q": length, "max_length_k": length}
    inputs |= {"position_ids": torch.empty(sequences, length, dtype=torch.long), **layout}
    if call.mixers:
        rows = math.ceil(MAX_CELLS_PER_TOKEN * sequences)
        indices = [torch.empty(n * length, dtype=torch.long) for n in (rows, sequences)]
        inputs["document_rows"] = DocumentRows(((rows, length),), *indices, (sequences, length))
    return inputs


class Compiler:
    """A torch.compile backend that runs graphs without generating code, and counts their memory and FLOPs."""

    live: "LiveBytes"
    """Counts the memory of the model that calls the graphs."""

    def __init__(self):
        # Inductor uses this partitioner and these decompositions. They have no public names.
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table

        torch.compiler.reset()
        self.flops = {"forward": 0, "backward": 0}
        self.backend = aot_autograd(
            fw_compiler=functools.partial(self._prepare, "forward"),
            bw_compiler=functools.partial(self._prepare, "backward"),
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table,
        )

    @property
    def recomputed(self) -> float:
        """Fraction of the forward FLOPs that the backward graphs repeat."""
        return max(0.0, self.flops["backward"] / self.flops["forward"] - 2)

    def _prepare(self, direction: str, graph_module: fx.GraphModule, inputs: list) -> Callable:
        from functorch.compile import make_boxed_func

        self.flops[direction] += _flops_of(graph_module.graph)
        needed = _peak_beyond_inputs(graph_module.graph)
        return make_boxed_func(lambda *args: self.live.run(graph_module.forward, args, needed))


def _flops_of(graph: fx.Graph) -> int:
    """Counts the FLOPs of a graph's matmuls and attention with torch's formulas."""
    flops = 0
    for node in graph.nodes:
        formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if formula is not None:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
            flops += formula(*args, **kwargs, out_val=node.meta["val"])
    return flops


def _storage_of(node: fx.Node) -> dict[int, int]:
    """Returns {storage ID: bytes} for a node's tensor, or {} for other nodes. Views share their storage."""
    value = node.meta.get("val")
    # Only states of random number generators have symbolic sizes. They are small.
    if not isinstance(value, Tensor) or not isinstance(value.numel(), int):
        return {}
    storage = value.untyped_storage()
    # Use the private ID, because fake storages have no address and each call creates a new Python object.
    return {storage._cdata: storage.nbytes()}


FUSED = (
    *("view", "permute", "expand", "slice", "getitem", "convert_element_type", "sum", "mean", "aten.max."),
    *("transpose", "clone", "cat", "unsqueeze", "squeeze", "slice_scatter", "full", "select", "alias", "t.default"),
    *("reshape", "iota", "index.Tensor"),
)
"""Substrings of the names of non-pointwise operators that the compiler fuses."""


def _is_fused(node: fx.Node) -> bool:
    """Returns True for pointwise operations, views and reductions, which the compiler fuses.

    A fused result is written to memory only if a matmul, an attention kernel or the graph's output reads it.
    """
    if node.op != "call_function":
        return False
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or any(word in str(node.target) for word in FUSED)


@dataclass(eq=False)
class _Kernel:
    """A matmul, an attention kernel, or several fused operations."""

    reads: set[int]
    """Storages that it reads."""
    writes: dict[int, int]
    """{storage: bytes}."""
    elements: int | None = None
    """Number of elements of each fused operation; None if nothing can be fused."""


def _kernels_of(graph: fx.Graph) -> list[_Kernel]:
    """Returns the graph's kernels in order. The first one writes the inputs, and the last one reads the outputs.

    As in torch.compile, a fused operation becomes part of a kernel that reads one of the same tensors and has as many
    elements, if its inputs don't depend on that kernel.
    """
    written: set[int] = set()
    for node in graph.nodes:
        if not _is_fused(node):
            written.update(*map(_storage_of, (node, *node.all_input_nodes)))
    kernels = [_Kernel(set(), {})]
    writers: dict[int, _Kernel] = {}
    reads_of: dict[fx.Node, set[int]] = {}
    for node in graph.nodes:
        new = {key: size for key, size in _storage_of(node).items() if key in written and key not in writers}
        operands = node.all_input_nodes
        reads = set().union(*(_storage_of(x).keys() & written or reads_of[x] for x in operands))
        reads_of[node] = reads
        if node.op == "placeholder":
            kernel = kernels[0]
        elif not _is_fused(node):
            kernel = _Kernel(reads, {})
            kernels.append(kernel)
        elif new:
            elements = node.meta["val"].numel()
            needed = _needed_for(reads, writers)
            able = [each for each in kernels if each.elements == elements and each.reads & reads]
            kernel = next((each for each in able if each not in needed), _Kernel(set(), {}, elements))
            if kernel not in kernels or needed & {*kernels[kernels.index(kernel) :]}:
                # The kernel waits for the operation's inputs.
                kernels = [each for each in kernels if each is not kernel] + [kernel]
            kernel.reads |= reads
        else:
            continue
        kernel.writes |= new
        writers |= dict.fromkeys(new, kernel)
    ordered: dict[_Kernel, None] = {}
    while len(ordered) < len(kernels):
        waiting = [each for each in kernels if each not in ordered]
        ready = next(each for each in waiting if all(writers[key] in ordered for key in each.reads))
        ordered[ready] = None
    return list(ordered)


def _needed_for(reads: set[int], writers: dict[int, _Kernel]) -> set[_Kernel]:
    """Returns the kernels that write these storages, and all kernels that those depend on."""
    found: set[_Kernel] = set()
    keys = list(reads)
    while keys:
        kernel = writers[keys.pop()]
        if kernel not in found:
            found.add(kernel)
            keys += kernel.reads
    return found


def _peak_beyond_inputs(graph: fx.Graph) -> float:
    """Returns the graph's peak live bytes minus the size of its inputs, which are freed after their last use."""
    kernels = _kernels_of(graph)
    last_use = {key: place for place, kernel in enumerate(kernels) for key in kernel.reads}
    live = kernels[0].writes
    at_start = peak = sum(live.values())
    for place, kernel in enumerate(kernels):
        live = live | kernel.writes
        peak = max(peak, sum(live.values()))
        live = {key: size for key, size in live.items() if last_use.get(key, len(kernels)) > place}
    return peak - at_start
