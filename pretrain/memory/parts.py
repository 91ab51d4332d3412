"""How much memory a process needs at its peak, part by part, for every strategy: arithmetic on shapes.

Weights, gradients and optimizer state follow from the number of parameters and how they are divided (ZeRO, Rajbhandari
et al., arXiv 1910.02054); activations from a trace of the model's code (pretrain/memory/activations.py); what the
loss and the strategies add from this project's, torch's and DeepSpeed's code. docs/planning.md compares all
of it with measurements (bench/memory.py).

All sizes are bytes of tensors in one process. N parameters, n processes that share them, V vocabulary, D width.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from pretrain.config import RunConfig
from pretrain.memory.activations import FLASH, Activations, trace_activations
from pretrain.model.build import build_meta_model, library_attention
from pretrain.model.compile import layers_of
from pretrain.model.loss import CHUNK_BYTES, CPU_PIECE_BYTES, MIN_CHUNK_TOKENS, choose_loss
from pretrain.model.reference import projects_hidden_states
from pretrain.optim.optimizers import OPTIMIZERS, ModelShapes, is_output_head, parameter_dtype

FP32 = 4


@dataclass(frozen=True)
class Sizes:
    """Elements of a model's parameters; a tied pair counts once, as the embedding."""

    total: int
    embedding: int
    """The token embedding, and learned positions."""
    head: int
    """The output head; 0 where it is the embedding."""
    layer: int
    """One layer."""
    layers: int
    largest: int
    """The largest parameter."""
    shapes: ModelShapes
    """By which optimizers tell what they keep."""
    vocabulary: int
    width: int

    @property
    def is_tied(self) -> bool:
        return self.head == 0

    @property
    def root(self) -> int:
        """What belongs to no layer."""
        return self.total - self.layers * self.layer


@dataclass(frozen=True)
class Work:
    """What a process computes in a micro-step, however the processes share it."""

    sizes: Sizes
    activations: Activations
    activations_in_bf16: Activations
    """The same where the weights themselves are in the recipe's precision, as FSDP2 and ZeRO hold them."""
    sequences: int
    """In one forward pass."""
    tokens: int
    """The same in tokens."""
    compute: int
    """Bytes of an element in the matrix products."""
    accumulates: bool
    """Whether a step has more than one micro-step."""
    loss: str
    """A key of LOSS_BACKENDS."""
    optimizer: str
    rounds_stochastically: bool
    device_type: str

    @property
    def parameter_bytes(self) -> int:
        """Of an element of the weights that are trained."""
        return 2 if self.rounds_stochastically else FP32


@dataclass(frozen=True)
class Memory:
    """Bytes of one process at the moment when it holds most."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    """What else the strategy holds: gathered layers, buckets of gradients."""
    moment: str
    """When: 'loss', 'backward' of the last layer, 'first layer', 'embedding' or 'update'."""
    host: float = 0.0
    """In the machine's memory, for one process, where something is offloaded."""
    disk: float = 0.0

    @property
    def total(self) -> float:
        """On the device."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


def sizes_of(model_config: Any) -> Sizes:
    """Counts the parameters of a model, which is built without storage."""
    model = build_meta_model(model_config)
    parameters = ModelShapes.of(model)
    elements = {name: math.prod(shape) for name, shape in parameters.shapes.items()}
    heads = [name for name in elements if is_output_head(name) and name not in parameters.embeddings]
    layers = layers_of(model)
    return Sizes(
        total=sum(elements.values()),
        embedding=sum(elements[name] for name in elements if name in parameters.embeddings),
        head=sum(elements[name] for name in heads),
        layer=sum(parameter.numel() for parameter in layers[0].parameters()),
        layers=len(layers),
        largest=max(elements.values()),
        shapes=parameters,
        vocabulary=model_config.vocab_size,
        width=model_config.hidden_size,
    )


def work_of(
    config: RunConfig,
    model_config: Any,
    *,
    precision: str,
    sequences: int,
    micro_steps: int,
    device_type: str = "cuda",
) -> Work:
    """What a process computes.

    Args:
        precision: the recipe's, with auto resolved.
        sequences: in one forward pass of one process.
        micro_steps: per optimizer step.
        device_type: cuda or cpu: the loss works in pieces of another size on a CPU.
    """
    is_half = precision != "fp32"
    kernel = FLASH if device_type == "cuda" else "groundwork_sdpa"
    stands_for = "groundwork_eager" if config.attention == "eager" else kernel
    if library_attention(model_config) == "eager":
        stands_for = "eager"
    settings = {
        "window": config.data.window,
        "attention": stands_for,
        "activation_checkpointing": config.activation_checkpointing,
        "compiled": config.compile != "none",
    }
    weights = parameter_dtype(config.optim)
    activations = trace_activations(model_config, weights=weights, autocast=is_half, **settings)
    whole = activations
    if is_half:
        whole = trace_activations(model_config, weights=torch.bfloat16, autocast=False, **settings)
    return Work(
        sizes=sizes_of(model_config),
        activations=activations,
        activations_in_bf16=whole,
        sequences=sequences,
        tokens=sequences * config.data.sequence_length,
        compute=2 if is_half else FP32,
        accumulates=micro_steps > 1,
        loss=loss_backend(config, model_config, device_type),
        optimizer=config.optim.name,
        rounds_stochastically=config.optim.stochastic_rounding,
        device_type=device_type,
    )


def loss_backend(config: RunConfig, model_config: Any, device_type: str) -> str:
    if not projects_hidden_states(model_config):
        return "logits"
    return choose_loss(config.loss.backend, device_type=device_type, compile_mode=config.compile)


def optimizer_elements(name: str, sizes: Sizes) -> float:
    """State that an optimizer keeps, in fp32 elements."""
    return OPTIMIZERS[name](sizes.shapes).state_elements()


def optimizer_bytes(work: Work, share: float = 1.0) -> float:
    """State of the optimizer for this share of the parameters."""
    return share * FP32 * optimizer_elements(work.optimizer, work.sizes)


def update_bytes(work: Work) -> float:
    """What an update allocates and frees again."""
    return OPTIMIZERS[work.optimizer](work.sizes.shapes).update_bytes(work.device_type, work.rounds_stochastically)


@dataclass(frozen=True)
class LossMemory:
    """Bytes of the loss."""

    kept: float
    """From its forward pass to its backward pass: the gradients of the hidden states and of the head."""
    working: float
    """While it computes, beyond that."""
    head_gradient: float
    """The part of `kept` that is the head's gradient."""


def loss_bytes(work: Work, weight_bytes: int, hidden: float) -> LossMemory:
    """Memory of pretrain/model/loss.py.

    Args:
        weight_bytes: of an element of the head's weight.
        hidden: bytes of the last hidden states.
    """
    vocabulary, width, compute = work.sizes.vocabulary, work.sizes.width, work.compute
    head = vocabulary * width
    if work.loss == "logits":
        # Logits in the products' dtype and in fp32, then log-probabilities and their gradient in fp32.
        logits = work.tokens * vocabulary
        return LossMemory(0.0, logits * (2 * FP32 + compute), 0.0)
    chunk_bytes = CHUNK_BYTES.get(work.device_type, CHUNK_BYTES["cuda"])
    chunk = min(work.tokens, max(MIN_CHUNK_TOKENS, chunk_bytes // (FP32 * vocabulary) // 64 * 64))
    is_cpu = work.device_type == "cpu"
    working = chunk * vocabulary * compute  # the chunk's logits, which become its gradient
    softmax = 0 if work.loss == "chunked_compiled" else chunk * vocabulary * FP32
    if is_cpu:
        softmax = min(CPU_PIECE_BYTES, softmax)
    elif compute != FP32:
        softmax *= 2  # torch copies half precision to fp32 first
    working += softmax
    if is_cpu and compute != FP32:
        working += chunk * vocabulary * compute  # a CPU's half-precision product copies a transposed operand
    if compute != weight_bytes:
        working += head * compute  # a copy of the head
    if compute != FP32 and not is_cpu:
        working += max(0, head * compute - softmax)  # a product, after the softmax is gone
    if weight_bytes != FP32:
        working = max(working, head * weight_bytes)
    head_gradient = head * FP32
    return LossMemory(head_gradient + hidden, working, head_gradient)


def at_peak(
    moments: dict[str, tuple[float, ...]],
    parameters: float,
    optimizer: float,
    buffers: float = 0.0,
    **elsewhere: float,
) -> Memory:
    """The moment at which gradients, activations and (where given) the moment's own buffers are largest together."""
    name = max(moments, key=lambda moment: sum(moments[moment]))
    gradients, activations, *own = moments[name]
    return Memory(parameters, gradients, optimizer, activations, buffers + sum(own), name, **elsewhere)
