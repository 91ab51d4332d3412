"""Pipeline stages, which run the model's forward pass on some of the layers.

Shapes: B sequences, T positions, D hidden size.
"""

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from pretrain.model.attention import of_any_size
from pretrain.model.build import KeyedConfig, once_per_config
from pretrain.model.compile import layers_of
from pretrain.model.loss import LanguageModelLoss
from pretrain.model.model_config import described
from pretrain.model.small_copy import TOLERANCE, ReferenceWindow, one_thread, reference_of


def split_layers(parameters_per_layer: list[int], stages: int, first: int, last: int) -> list[range]:
    """Splits layers into one consecutive, non-empty range per stage, balanced by parameter count.

    `first` and `last` are the parameter counts outside the layers in the first stage (embedding) and in the last stage
    (final norm and head). Dynamic programming minimizes the sum of squared parameter counts.
    """
    before = [0, *accumulate(parameters_per_layer)]
    layers = len(parameters_per_layer)

    @functools.cache
    def best(stage: int, start: int) -> tuple[int, list[int]]:
        """Returns (sum of squares, end of each stage) if stages from this one on contain the layers from `start`."""
        if stage == stages:
            return 0, []
        later = stages - 1 - stage
        extra = (0 if stage else first) + (0 if later else last)
        found = []
        for end in range(start + 1, layers - later + 1) if later else [layers]:
            squares, ends = best(stage + 1, end)
            found.append((squares + (before[end] - before[start] + extra) ** 2, [end, *ends]))
        return min(found)

    _, ends = best(0, 0)
    return [range(start, end) for start, end in pairwise([0, *ends])]


@dataclass(frozen=True)
class PipelineMicroBatch:
    """A stage's inputs for one pipeline microbatch, except the hidden states from the previous stage."""

    input_ids_BT: Tensor
    targets_BT: Tensor
    weight: Tensor
    """This microbatch's share of the micro-batch's targets. The weighted losses add up to the micro-batch's loss."""
    attention_arguments: dict[str, Any]


def split_micro_batch(
    input_ids_BT: Tensor, targets_BT: Tensor, arguments: Mapping[str, Any], parts: int, sequence_parts: int = 1
) -> list[PipelineMicroBatch]:
    """Splits a micro-batch into microbatches with an equal number of rows, and splits the attention arguments.

    sequence_parts: number of ranks that split each sequence. `cu_seq_lens` is for full sequences.
    """
    batch = targets_BT.shape[0]
    length = targets_BT.shape[1] * sequence_parts
    rows = batch // parts
    counted_B = (targets_BT >= 0).sum(dim=1)
    all_counted = counted_B.sum().clamp(min=1)
    microbatches = []
    for first in range(0, batch, rows):
        here = slice(first, first + rows)
        part = {}
        for name, value in arguments.items():
            if name.startswith("cu_seq_lens"):
                # Dropping segments of other rows would synchronize with the device. Kernels accept empty segments.
                part[name] = of_any_size((value - first * length).clamp(0, rows * length))
            elif isinstance(value, dict):  # one mask per layer type
                part[name] = {kind: rows_of(mask, here) for kind, mask in value.items()}
            else:
                part[name] = rows_of(value, here)
        weight = counted_B[here].sum() / all_counted
        microbatches.append(PipelineMicroBatch(input_ids_BT[here], targets_BT[here], weight, part))
    return microbatches


def rows_of(value: Any, rows: slice) -> Any:
    """Selects rows of a tensor. Position IDs shared by all rows and other values are returned unchanged."""
    return value[rows] if isinstance(value, Tensor) and len(value) > 1 else value


class Stage(nn.Module):
    """Consecutive layers of a model. The first stage also has the embedding, and the last one the norm, head and loss.

    The input is token IDs (B, T) in the first stage, and hidden states (B, T, D) in all others. The output is the
    microbatch's loss x weight / micro-steps in the last stage, and hidden states in all others. The modules are shared
    with the model and stay on the meta device until they are initialized.

    Args:
        model: the complete model.
        layers: indices of this stage's layers.
        precision: "fp32" runs without autocast. Any other value runs with bf16 autocast.
        weight_dtype: dtype of the weights, and without autocast also of the hidden states.
    """

    def __init__(
        self, model: LanguageModelLoss, layers: range, precision: str, weight_dtype: torch.dtype = torch.float32
    ):
        super().__init__()
        all_layers = layers_of(model.causal_lm)
        self.is_first = layers.start == 0
        self.is_last = layers.stop == len(all_layers)
        self.base = cut(model.causal_lm, layers, self.is_first, self.is_last)
        self.head = model.causal_lm.get_output_embeddings() if self.is_last else None
        self.autocasts = precision != "fp32"
        self.dtype = torch.bfloat16 if self.autocasts else weight_dtype
        """Dtype of the hidden states between stages."""
        self.loss_of_hidden = model.loss_of_hidden if self.is_last else None
        self.terms = model.terms if self.is_last else None
        self.loss_terms = model.loss_terms if self.is_last else nn.ModuleDict()
        embeds = self.terms is not None and self.terms.embeds
        self.embedding = model.causal_lm.get_input_embeddings() if embeds else None
        self.recorder = model.recorder

    def begin(self, microbatches: list[PipelineMicroBatch], micro_steps: int) -> None:
        """Sets the microbatches for the next pipeline call, and the number of micro-steps per step."""
        self.microbatches = microbatches
        self.micro_steps = micro_steps
        self.microbatches_run = 0
        self.cross_entropy: Tensor | None = None
        """Weighted sum over the microbatches so far (last stage only)."""

    def forward(self, x: Tensor) -> Tensor:
        """Runs the stage on the next microbatch. x: token IDs or hidden states."""
        # Every schedule runs a stage's microbatches in order, so we can count them. Passing an index would require a
        # tensor, which fully_shard would copy to the device, so reading it would wait for the device.
        microbatch = self.microbatches[self.microbatches_run]
        self.microbatches_run += 1
        inputs = {"input_ids" if self.is_first else "inputs_embeds": x}
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocasts):
            hidden_BTD = self.base(**inputs, use_cache=False, **microbatch.attention_arguments).last_hidden_state
            if not self.is_last:
                hidden_BTD = hidden_BTD.to(self.dtype)
                # Zero-bubble schedules detach a stage's output in place, which torch forbids for views. `_is_view` has
                # no public equivalent.
                return hidden_BTD.clone() if hidden_BTD._is_view() else hidden_BTD
            loss, cross_entropy = self.loss_of_hidden(hidden_BTD, microbatch.targets_BT)
            of_terms = self.of_terms(hidden_BTD, microbatch)
        weighted = cross_entropy * microbatch.weight
        self.cross_entropy = weighted if self.cross_entropy is None else self.cross_entropy + weighted
        return (loss * microbatch.weight + of_terms) / self.micro_steps

    def of_terms(self, hidden_BTD: Tensor, microbatch: PipelineMicroBatch) -> Tensor | float:
        """Returns this microbatch's share of the loss terms."""
        if self.terms is None or not torch.is_grad_enabled():
            return 0.0
        ids_BT = microbatch.input_ids_BT
        arguments = microbatch.attention_arguments
        terms = self.terms.add(ids_BT, microbatch.targets_BT, hidden_BTD, self.head, self.embedding, arguments)
        return terms / len(self.microbatches)


def cut(causal_lm: PreTrainedModel, layers: range, is_first: bool, is_last: bool) -> nn.Module:
    """Returns the base model with only these layers.

    Only the first stage has embeddings, and only the last one has a final norm. The base model's forward pass still
    computes masks, rotary tables and layer arguments. All stages except the first are called with `inputs_embeds`. The
    modules are shared with the complete model.
    """
    whole = causal_lm.base_model
    all_layers = layers_of(causal_lm)
    part = copy.copy(whole)
    # A shallow copy shares this private dict. nn.Module has no public way to replace it.
    part._modules = dict(whole._modules)
    # Models index per-layer lists by position in their own list of layers.
    part.config = copy.copy(whole.config)
    part.config.num_hidden_layers = len(layers)
    if getattr(whole.config, "layer_types", None):
        part.config.layer_types = [whole.config.layer_types[number] for number in layers]
    for name, child in whole.named_children():
        if all_layers[0] in child.children():
            setattr(part, name, nn.ModuleList(all_layers[number] for number in layers))
        elif isinstance(child, nn.Embedding):
            if not is_first:
                setattr(part, name, Nothing())
        elif isinstance(child, nn.Dropout):
            if not is_first:
                setattr(part, name, nn.Identity())
        elif not is_last and ("Norm" in type(child).__name__ or next(child.parameters(), None) is not None):
            setattr(part, name, nn.Identity())
    if not is_first and hasattr(part, "embedding_dropout"):
        part.embedding_dropout = 0.0
    return part


class Nothing(nn.Module):
    """Replaces an embedding that is already added in an earlier stage. Returns zero."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros((), device=ids.device)


@once_per_config
@one_thread()
def cut_problem(model_config: PreTrainedConfig) -> str | None:
    """Returns an error message if splitting this architecture changes its outputs, otherwise None.

    Splits a small copy into two stages. Models that scale their embeddings in the forward pass, or compute anything
    between layers, can't be split.
    """
    reference = reference_of(KeyedConfig.of(model_config))
    window = ReferenceWindow.of(reference.config)
    ids_BT = window.inputs_BT
    targets_BT = window.ids_BT[:, 1:].contiguous()
    model = LanguageModelLoss(reference)
    works = "use an architecture such as llama, qwen3, gpt2, gpt_neox, mistral, olmo2 or phi3"
    said = f"model: {model_config.model_type} cannot be split into pipeline stages"
    if not model.from_hidden_states:
        return f"{said}: its logits are not just the output head applied to the last hidden states; {works}"
    try:
        with torch.no_grad():
            wanted = model(ids_BT, targets_BT)[0]
            x = ids_BT
            layers = len(layers_of(reference))
            for part in (range(layers // 2), range(layers // 2, layers)):
                stage = Stage(model, part, "fp32")
                stage.begin(split_micro_batch(ids_BT, targets_BT, {}, 1), micro_steps=1)
                x = stage(x)
    except Exception as error:  # the base model doesn't consist of embeddings, layers and a norm
        return f"{said} ({described(error)}); {works}"
    if not abs(x - wanted) <= TOLERANCE * wanted:
        return f"{said}: with two stages, its loss is {x:.4f} instead of {wanted:.4f}; {works}"
    return None


def layer_problem(model_config: Any, stages: int, ranks: int, schedule: str) -> str | None:
    """Returns an error message if this model has fewer layers than stages, otherwise None."""
    layers = model_config.num_hidden_layers
    if layers >= stages:
        return None
    return (
        f"model: {layers} layers are too few for pipeline.schedule {schedule} on {ranks} processes, which needs "
        f"{stages} stages ({stages // ranks} per process); use fewer processes per pipeline, or GPipe or 1F1B, which "
        "need only one layer per process"
    )


def stage_parameters(causal_lm: PreTrainedModel, stages: int, in_last: int = 0) -> tuple[list[range], list[int]]:
    """Returns the layers and the parameter counts of balanced stages.

    A tied embedding counts in both the first and the last stage. in_last: number of loss-term parameters.
    """
    layers = layers_of(causal_lm)
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    in_layers = {parameter for layer in layers for parameter in layer.parameters()}
    embeddings = {module.weight for module in causal_lm.base_model.children() if isinstance(module, nn.Embedding)}
    first = sum(parameter.numel() for parameter in embeddings)
    last = in_last + sum(parameter.numel() for parameter in {*causal_lm.parameters()} - in_layers - embeddings)
    head = causal_lm.get_output_embeddings()
    last += head.weight.numel() if head.weight in embeddings else 0
    ranges = split_layers(sizes, stages, first, last)
    counts = [sum(sizes[number] for number in part) for part in ranges]
    counts[0] += first
    counts[-1] += last
    return ranges, counts
