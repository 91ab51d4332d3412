"""Computes the components of a process's memory: model, activations, loss and optimizer.

Sizes are in bytes. Activations are traced (activations.py), and the loss's buffers follow pretrain/model/loss.py.
"""

import copy
import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pretrain.config import Loss, MemoryBudget, RunConfig, WindowSpec
from pretrain.errors import InputError
from pretrain.model.attention import classes_in_rows
from pretrain.model.build import KeyedConfig, build_meta_model, library_attention, once_per_config
from pretrain.model.compile import is_recomputed, layers_of
from pretrain.model.fp8 import fp8_layers
from pretrain.model.loss import CPU_PIECE_BYTES, choose_loss, tokens_of_chunk
from pretrain.model.routers import experts_per_token, routers_of
from pretrain.model.small_copy import logit_cap, projects_hidden_states
from pretrain.optim.optimizers import OPTIMIZERS, ModelShapes, parameter_dtype
from pretrain.parallel.expert_parallel import pads_much
from pretrain.parallel.pipeline import STAGE_LAYOUTS
from pretrain.parallel.strategy import LOSS_TERMS
from pretrain.registry import LOSS_TERMS as TERM_CLASSES
from pretrain.training.probe import probe
from pretrain_tools.planning.activations import FLASH, Activations, ForwardPass, trace_activations
from pretrain_tools.planning.layouts import Layout
from pretrain_tools.planning.optimizer_bytes import state_elements, update_bytes, with_experts_in_parts

FP32 = 4
"""Bytes per fp32 element."""


@dataclass(frozen=True)
class Sizes:
    """A model's parameter counts. Tied parameters count once, as part of the embedding."""

    total: int
    embedding: int
    """Token embedding and learned positions."""
    head: int
    """Output head; 0 if tied."""
    layer: int
    """The largest layer. In MoE models, the first layers may be dense."""
    in_layers: int
    """All layers together."""
    layers: int
    """Number of layers."""
    largest: int
    """The largest parameter."""
    shapes: ModelShapes
    """Parameter shapes, for computing the optimizer state."""
    vocabulary: int
    width: int
    exchanged_width: int
    """Total number of elements per token in a layer's query, key, value and attention output."""
    routers: int
    """Number of MoE layers."""
    choices: int
    """Experts per token."""
    in_fp8: int
    """Number of elements in layer matrices that are multiplied and gathered in 8 bits in fp8 training."""
    terms: int = 0
    """Parameters of loss terms. In a pipeline, they are in the last stage."""

    @property
    def experts(self) -> int:
        """Number of expert parameters in all layers."""
        return sum(math.prod(self.shapes.shapes[name]) for name in self.shapes.experts)

    @property
    def stacked_experts(self) -> int:
        """Number of experts per layer; 0 in a dense model."""
        return max((self.shapes.shapes[name][0] for name in self.shapes.experts), default=0)

    def in_parts(self, shares: int) -> "Sizes":
        """Returns the sizes with 1/shares of every layer's experts."""
        elsewhere = self.experts - self.experts // shares
        shapes = with_experts_in_parts(self.shapes, shares)
        return replace(
            self,
            total=self.total - elsewhere,
            layer=self.layer - elsewhere // self.layers,
            in_layers=self.in_layers - elsewhere,
            largest=max(map(math.prod, shapes.shapes.values())),
            shapes=shapes,
        )

    @property
    def is_tied(self) -> bool:
        """True if head and embedding are tied."""
        return self.head == 0

    @property
    def root(self) -> int:
        """Parameters outside the layers."""
        return self.total - self.in_layers


@dataclass(frozen=True)
class Work:
    """One process's share of a micro-step."""

    run: "PlannedRun"
    """The run with this process's slice of the model and sequences."""
    layout: Layout
    sizes: Sizes
    """Sizes of the slice with only this process's experts."""
    held: Sizes
    """Sizes of the slice with the experts of all sharding processes."""
    whole: Sizes
    """Sizes of the whole model."""
    sequences: int
    """Sequences per forward pass."""
    accumulates: bool
    """True if a step has more than one micro-step."""

    @property
    def forward_pass(self) -> ForwardPass:
        layout = self.layout
        has_budget = isinstance(self.run.config.activation_checkpointing, MemoryBudget)
        return replace(
            self.run.forward_pass,
            expert_ranks=layout.ep,
            token_shares=layout.tp if layout.ep > 1 else 1,
            keeps_gradients=layout.is_mesh and layout.pp == 1,
            sequences=self.sequences if has_budget else None,
        )

    @property
    def activations(self) -> Activations:
        return trace_activations(self.run.model_config, self.forward_pass)

    @property
    def activations_in_bf16(self) -> Activations:
        """Activations with weights in the recipe's precision, as with FSDP2 and ZeRO."""
        call = self.forward_pass
        if self.run.is_half:
            call = replace(call, weights=torch.bfloat16, autocast=False, gathers_fp8=self.gathers_fp8)
        return trace_activations(self.run.model_config, call)

    @property
    def gathers_fp8(self) -> bool:
        """True if fully_shard gathers the layers' matrices in fp8."""
        layout = self.layout
        is_sharded = layout.is_mesh and layout.sharing_states > 1 and not layout.offloads
        return self.run.precision == "fp8" and is_sharded

    @property
    def padding(self) -> float:
        """Factor by which fully_shard pads a layer's experts if it can't split them evenly."""
        here = self.sizes.stacked_experts
        holders = self.layout.sharing_states * (self.layout.tp if self.layout.ep > 1 else 1) // self.layout.ep
        if not here or (pads_much(here, holders) and self.sizes.width % holders == 0):
            return 1.0
        return math.ceil(here / holders) * holders / here

    @property
    def tokens(self) -> int:
        """Tokens per forward pass."""
        return self.sequences * self.run.config.data.sequence_length

    @property
    def compute(self) -> int:
        """Bytes per element of the matmuls' dtype."""
        return 2 if self.run.is_half else FP32

    @property
    def loss(self) -> str:
        """Loss backend, a key of LOSS_BACKENDS."""
        config = self.run.config
        if not projects_hidden_states(self.run.model_config):
            return "logits"
        return choose_loss(config.loss.backend, device_type=self.run.device_type, compile_mode=config.compile)

    @property
    def parameter_bytes(self) -> int:
        """Bytes per trained weight."""
        return 2 if self.run.config.optim.stochastic_rounding else FP32

    @property
    def head_gradient(self) -> float:
        """Bytes of the head's fp32 gradient if the loss computes it in its forward pass."""
        return 0.0 if self.loss == "logits" else FP32 * self.sizes.vocabulary * self.sizes.width

    def update_bytes(self, form: str, processes: int, sizes: Sizes | None = None) -> float:
        """Returns the temporary memory of an update in bytes (see `optimizer_bytes.update_bytes`)."""
        optim = self.run.config.optim
        spec = OPTIMIZERS[optim.name]((sizes or self.sizes).shapes)
        return update_bytes(spec, self.run.device_type, optim.stochastic_rounding, form, processes)

    def optimizer_bytes(self, share: float = 1.0) -> float:
        """Returns the size of the optimizer state and averaged weights in bytes, for a fraction of the parameters."""
        name = self.run.config.optim.name
        average = share * FP32 * self.held.total if self.run.config.averaging.kind != "none" else 0.0
        share = 1.0 if OPTIMIZERS[name].state_is_whole else share
        return average + share * FP32 * optimizer_elements(name, self.held)

    def activation_bytes(self, activations: Activations, weight_bytes: int, waiting: float) -> dict[str, float]:
        """Returns the activation and loss memory at each moment, in bytes.

        Args:
            weight_bytes: bytes per element of the head's weight.
            waiting: bytes of the head's gradient while it waits to be added to the embedding's.
        """
        n = self.sequences
        layers = self.sizes.layers
        hidden = activations.hidden(n)
        exchanged = self.kept_by_exchanges
        kept = activations.kept(layers, n) + layers * (1 - self.recomputed) * exchanged
        is_last_recomputed = is_recomputed(layers - 1, self.recomputed)
        before = activations.before(n)
        of_norm = activations.outside(n) - before
        in_layer = activations.in_layer(n) + self.traveling + is_last_recomputed * exchanged
        in_first = activations.first(n) + self.traveling + exchanged
        return {
            "loss": kept + max(hidden + loss_bytes(self, weight_bytes, hidden), activations.forward(n)),
            "norm": kept + waiting + hidden + activations.norm(n),
            "backward": kept - of_norm + waiting + hidden + in_layer,
            "first layer": before + waiting + hidden + in_first,
            "embedding": waiting + hidden,
        }

    @property
    def recomputed(self) -> float:
        return self.run.recomputed

    @property
    def repeated_flops(self) -> float:
        """Fraction of the forward FLOPs recomputed in the backward pass."""
        has_budget = isinstance(self.run.config.activation_checkpointing, MemoryBudget)
        return self.activations.recomputed if has_budget else self.recomputed

    @property
    def kept_by_exchanges(self) -> float:
        """Additional bytes that a layer saves for its backward pass with cp: attention's output after the exchange."""
        return self.compute * self.tokens * self.sizes.width if self.layout.cp > 1 else 0.0

    @property
    def traveling(self) -> float:
        """Bytes in flight in a layer's backward pass with cp: query, key, value and output."""
        channels = self.sizes.exchanged_width if self.layout.cp > 1 else 0
        return self.compute * self.tokens * channels


@dataclass(frozen=True)
class Memory:
    """Peak memory of a process in bytes."""

    parameters: float
    gradients: float
    optimizer: float
    """Optimizer state and averaged weights."""
    activations: float
    buffers: float
    """Other memory, such as gathered layers and gradient buckets."""
    moment: str
    """Moment of the peak: 'loss', 'norm' (the final norm's backward pass), 'backward' (of the last layer), 'first
    layer', 'embedding' or 'update'."""
    host: float = 0.0
    """Bytes offloaded to CPU memory, per process."""
    disk: float = 0.0
    """Bytes offloaded to disk, per process."""

    @property
    def total(self) -> float:
        """Total bytes on the device."""
        # A Python float, because comparisons of numpy's floats can't be written as JSON.
        return float(self.parameters + self.gradients + self.optimizer + self.activations + self.buffers)


@once_per_config
def sizes_of(model_config: Any) -> Sizes:
    """Counts a model's parameters by building it on the meta device. Results are cached."""
    model = build_meta_model(model_config)
    parameters = ModelShapes.of(model)
    elements = {name: math.prod(shape) for name, shape in parameters.shapes.items()}
    heads = parameters.heads - parameters.embeddings
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers_of(model)]
    routers = routers_of(model)
    return Sizes(
        total=sum(elements.values()),
        embedding=sum(elements[name] for name in elements if name in parameters.embeddings),
        head=sum(elements[name] for name in heads),
        layer=max(layers),
        in_layers=sum(layers),
        layers=len(layers),
        largest=max(elements.values()),
        shapes=parameters,
        vocabulary=model_config.vocab_size,
        width=model_config.hidden_size,
        exchanged_width=exchanged_width(model_config),
        routers=len(routers),
        choices=max((experts_per_token(router, model.config) or 0 for router in routers), default=0),
        in_fp8=sum(linear.weight.numel() for linear in fp8_layers(model)),
    )


def with_terms(sizes: Sizes, config: RunConfig, model_config: Any) -> Sizes:
    """Adds the loss terms' parameters to the sizes.

    Raises InputError if a term's module can't be built on the meta device.
    """
    if not config.loss.terms:
        return sizes
    shapes = _shapes_of_terms(config.loss.model_dump_json(), KeyedConfig.of(model_config))
    elements = list(map(math.prod, shapes.values()))
    terms = sum(elements)
    return replace(
        sizes,
        terms=terms,
        total=sizes.total + terms,
        largest=max([sizes.largest, *elements]),
        shapes=replace(sizes.shapes, shapes={**sizes.shapes.shapes, **shapes}),
    )


@functools.lru_cache(maxsize=16)
def _shapes_of_terms(loss: str, keyed: KeyedConfig) -> dict[str, tuple[int, ...]]:
    modules = nn.ModuleDict()
    for name, given in Loss.model_validate_json(loss).terms.items():
        made = TERM_CLASSES[name]
        if not made.has_parameters():
            continue
        try:
            with torch.device("meta"):
                modules[name] = made(made.Options.model_validate(given or {}), keyed.config).module()
        except Exception as error:  # extensions may raise anything
            raise InputError(f"loss.terms.{name}: the module can't be built on the meta device: {error}") from error
    return {name: tuple(parameter.shape) for name, parameter in modules.named_parameters(prefix=LOSS_TERMS)}


def exchanged_width(config: Any) -> int:
    """Returns the total number of elements per token in query, key, value and attention output."""
    heads = getattr(config, "num_attention_heads", None) or 1
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return 2 * (heads + key_heads) * (getattr(config, "head_dim", None) or config.hidden_size // heads)


@once_per_config
def mixers_in_rows(model_config: Any) -> tuple[str, ...]:
    """Returns the names of the mixer classes that would mix documents. Results are cached."""
    found = probe(model_config, attention="auto", window=WindowSpec(1, document_mask=True))
    return tuple(classes_in_rows(found.attention))


@dataclass(frozen=True)
class PlannedRun:
    """A recipe and its model, for planning memory."""

    config: RunConfig
    model_config: Any
    precision: str
    """The recipe's precision, with `auto` resolved."""
    device_type: str = "cuda"
    """'cuda' or 'cpu'."""
    device_bytes: float = 79 * 2**30
    """Device memory in bytes. The loss's chunk size depends on it."""

    def changed(self, **settings: Any) -> "PlannedRun":
        """Returns a copy with changed recipe settings."""
        return replace(self, config=self.config.model_copy(update=settings))

    @property
    def is_half(self) -> bool:
        """True if matmuls run in 16 bits."""
        return self.precision != "fp32"

    @property
    def recomputed(self) -> float:
        """Fraction of layers that save only their input."""
        setting = self.config.activation_checkpointing
        if isinstance(setting, MemoryBudget):
            return 0.0
        return {"none": 0.0, "full": 1.0}.get(setting, setting)

    @property
    def forward_pass(self) -> ForwardPass:
        """The forward pass of this recipe. Raises InputError (see `probe`)."""
        config = self.config
        attention = FLASH if self.device_type == "cuda" else "groundwork_sdpa"
        if config.attention == "eager":
            attention = "groundwork_eager"
        if library_attention(self.model_config) == "eager":
            attention = "eager"
        return ForwardPass(
            config.data.window,
            parameter_dtype(config.optim),
            autocast=self.is_half,
            attention=attention,
            activation_checkpointing=config.activation_checkpointing,
            compiled=config.compile != "none",
            mixers=mixers_in_rows(self.model_config) if config.data.document_mask else (),
            half=torch.float16 if self.precision == "fp16" else torch.bfloat16,
            fp8=self.precision == "fp8",
        )

    def stages(self, sequences: int) -> list[tuple["PlannedRun", int]]:
        """Returns (run, micro-batch size) for each sequence length in the run's stages.

        sequences: number of sequences per micro-batch, for data.sequence_length.
        """
        data = self.config.data
        batch = self.config.with_batch(sequences_per_micro_batch=sequences)
        if data.longest_window == data.window:
            return [(self, sequences)]
        found = {window: batch.as_stage(number) for number, window in enumerate(data.windows)}
        return [(replace(self, config=stage), stage.batch.sequences_per_micro_batch) for stage in found.values()]

    def work(self, layout: Layout, sequences: int) -> Work:
        """Returns one process's share of a micro-step.

        sequences: batch.sequences_per_micro_batch.
        """
        config = self.config
        whole = with_terms(sizes_of(self.model_config), config, self.model_config)
        accumulates = (
            config.batch.tokens_per_step >= 2 * sequences * config.data.sequence_length * layout.micro_batches
        )
        part = self
        if layout.tp > 1:
            part = replace(part, model_config=sliced(self.model_config, layout.tp, splits_experts=layout.ep == 1))
        if layout.cp > 1:
            length = config.data.sequence_length // layout.cp
            part = part.changed(data=config.data.model_copy(update={"sequence_length": length}))
        held = with_terms(sizes_of(part.model_config), config, self.model_config) if layout.tp > 1 else whole
        sizes = held.in_parts(layout.ep) if layout.ep > 1 else held
        if layout.ep > 1 and layout.tp > 1:  # tp ranks have different experts
            held = held.in_parts(layout.tp)
        if layout.pp > 1:  # a forward pass handles one pipeline microbatch
            pipeline = config.pipeline
            parts = STAGE_LAYOUTS[pipeline.schedule].stages_per_rank * pipeline.microbatches_per_stage
            sequences = max(1, sequences // parts)
        return Work(part, layout, sizes, held, whole, sequences, accumulates)


def sliced(model_config: Any, shares: int, *, splits_experts: bool) -> Any:
    """Returns the model config of a tensor-parallel rank, with its share of the heads and intermediate width."""
    part = copy.deepcopy(model_config)
    part.head_dim = getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
    names = ["num_attention_heads", "num_key_value_heads"]
    own_width = getattr(part, "moe_intermediate_size", None)
    if splits_experts or own_width or not routers_of(build_meta_model(model_config)):
        names.append("intermediate_size")
    if splits_experts:
        names.append("moe_intermediate_size")
    for name in names:
        if getattr(part, name, None):
            setattr(part, name, max(1, getattr(part, name) // shares))
    return part


def optimizer_elements(name: str, sizes: Sizes) -> float:
    """Returns the size of an optimizer's state in fp32 elements."""
    return state_elements(OPTIMIZERS[name](sizes.shapes))


def loss_bytes(work: Work, weight_bytes: int, hidden: float) -> float:
    """Returns the peak memory of the loss, including gradients saved for its backward pass.

    Args:
        weight_bytes: bytes per element of the head's weight.
        hidden: bytes of the last hidden states.
    """
    vocabulary = work.sizes.vocabulary
    compute = work.compute
    head = vocabulary * work.sizes.width
    loss = work.loss
    tokens = work.tokens // work.layout.tp  # each tensor-parallel rank computes the loss for its share
    hidden /= work.layout.tp
    device_type = work.run.device_type
    if loss == "logits":
        # Logits in the matmuls' dtype and in fp32, then log-probabilities and their gradient in fp32.
        logits = work.tokens * vocabulary
        return logits * (2 * FP32 + compute)
    chunk = min(tokens, tokens_of_chunk(vocabulary, device_type, work.run.device_bytes))
    is_cpu = device_type == "cpu"
    working = chunk * vocabulary * compute  # the chunk's logits, overwritten by their gradient
    softmax = 0 if loss == "chunked_compiled" else chunk * vocabulary * FP32
    if is_cpu:
        softmax = min(CPU_PIECE_BYTES, softmax)
    elif logit_cap(work.run.model_config):
        softmax *= 3  # the tanh, the capped logits and their softmax
    elif compute != FP32:
        softmax *= 2  # torch copies half precision to fp32 first
    if is_cpu and compute != FP32:
        softmax += chunk * vocabulary * compute  # a half-precision matmul on the CPU copies a transposed operand
    # The gradient of the chunk's hidden states, in fp32 because of the token weights, and the hidden states in the
    # matmuls' dtype.
    elements = chunk * work.sizes.width
    products = elements * (compute + FP32 + (compute if hidden != tokens * work.sizes.width * compute else 0))
    working += max(softmax, products)
    if compute != weight_bytes:
        working += head * compute  # a copy of the head
    if weight_bytes != FP32:
        working = max(working, head * weight_bytes)
    return work.head_gradient + hidden + working


def at_peak(
    moments: dict[str, tuple[float, ...]],
    parameters: float,
    optimizer: float,
    buffers: float = 0.0,
    **elsewhere: float,
) -> Memory:
    """Returns the memory at the moment with the largest sum of gradients, activations and buffers."""
    name = max(moments, key=lambda moment: sum(moments[moment]))
    gradients, activations, *own = moments[name]
    return Memory(parameters, gradients, optimizer, activations, buffers + sum(own), name, **elsewhere)
