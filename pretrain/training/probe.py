"""Tests a small copy of the model before the run, to check that the architecture trains correctly.

This detects silent errors, such as an attention that ignores the document mask, a model that isn't causal, or a loss
that differs from the library's. The copy (see model/small_copy.py) is compared with the library's eager forward pass
on each document separately, in fp32 on the CPU if the attention supports that.

Shapes: B windows, T positions, V vocabulary.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from pretrain.config import WindowSpec
from pretrain.errors import InputError
from pretrain.model.attention import candidates_of, implementation_of, model_inputs, with_rows
from pretrain.model.build import NO_SUCH_ATTENTION, build_model, copy_model
from pretrain.model.loss import LanguageModelLoss
from pretrain.model.model_config import described
from pretrain.model.routers import RouterLosses, routers_of
from pretrain.model.small_copy import (
    DOCUMENT_LENGTHS,
    END_OF_DOCUMENT,
    TOLERANCE,
    KeyedConfig,
    ReferenceWindow,
    is_projection,
    logits_of,
    one_thread,
    reference_logits,
    reference_of,
    relative_difference,
)

ON_GPU_ALONE = {
    "flex_attention": torch.float32,
    "groundwork_fa2": torch.bfloat16,
    "groundwork_fa3": torch.bfloat16,
}
"""{attention tested on a GPU: dtype}. All others are tested in fp32 on the CPU."""
TESTED_LENGTH = sum(DOCUMENT_LENGTHS[0])
"""Window length in the test. One test covers all sequence lengths."""
LEAK = 1e-5
"""Maximum change in a document's fp32 logits when an earlier document changes, relative to the largest logit."""
BF16_TOLERANCE = 3e-2
"""TOLERANCE for attentions tested in bf16."""


@dataclass(frozen=True)
class Probe:
    """Test result."""

    attention: str
    """Attention whose results match the library's eager forward pass."""
    from_hidden_states: bool
    """True if the logits are head(last hidden state), so that the loss doesn't need to materialize them."""
    passed_over: tuple[str, ...]
    """Faster attentions that failed the test, with the reasons."""


def probe(config: PreTrainedConfig, *, attention: str, window: WindowSpec, balances: bool = False) -> Probe:
    """Finds the first candidate for `attention` that passes the test. Raises InputError if none does.

    Takes a second or two. The result is cached per configuration.

    Args:
        attention: the recipe's setting.
        window: the recipe's window. The test uses shorter windows with the same properties.
        balances: also test that the balancing loss reaches the routers.
    """
    found = _probe(KeyedConfig.of(config), attention, replace(window, sequence_length=TESTED_LENGTH))
    if balances and (problem := _balance_problem(KeyedConfig.of(config))):
        raise InputError(f"model: {config.model_type} {problem}")
    return found


@functools.lru_cache(maxsize=64)
@one_thread()
def _probe(keyed: KeyedConfig, attention: str, window: WindowSpec) -> Probe:
    reference = reference_of(keyed)
    if problem := _causality_problem(reference):
        raise InputError(f"model: {keyed.config.model_type} {problem}")
    problems: dict[str, str] = {}
    # Some attention names include the window, which is shorter in the copy.
    names = [*zip(candidates_of(attention, keyed.config), candidates_of(attention, reference.config), strict=True)]
    for name, small_name in names:
        problem = _problem(reference, small_name, window)
        if problem is None:
            return Probe(name, is_projection(reference), _said(problems))
        problems[name] = problem
    for name, small_name in names if window.document_mask else ():
        if classes := _mixers(reference, small_name, window):
            apart = with_rows(name, classes)
            problem = _problem(reference, with_rows(small_name, classes), window)
            if problem is None:
                # The other layers mix documents with every attention, so no faster attention was rejected.
                return Probe(apart, is_projection(reference), ())
            problems[apart] = problem

    def works(attention: str, window: WindowSpec) -> bool:
        return any(_problem(reference, name, window) is None for name in candidates_of(attention, reference.config))

    without_mask = replace(window, document_mask=False)
    remedies = ["train it with --data.document_mask false"] if works(attention, without_mask) else []
    remedies += ["use --attention auto"] if works("auto", window) else []
    remedies.append("use another architecture (see docs/architectures.md)")
    raise InputError(
        f"model: {keyed.config.model_type} would not train correctly with attention {attention} "
        f"({'; '.join(_said(problems))}); {', or '.join(remedies)}"
    )


def _said(problems: Mapping[str, str]) -> tuple[str, ...]:
    """Lists each problem once, with the attentions that it applies to."""
    attentions_of: dict[str, list[str]] = {}
    for name, problem in problems.items():
        attentions_of.setdefault(problem, []).append(name)
    if len(attentions_of) > 1:
        attentions_of.pop(NO_SUCH_ATTENTION, None)
    return tuple(f"{', '.join(names)}: {problem}" for problem, names in attentions_of.items())


def _causality_problem(reference: PreTrainedModel) -> str | None:
    seen = _leak(reference)
    if seen <= TOLERANCE:
        return None
    is_encoder = getattr(reference.config, "is_decoder", True) is False
    remedy = "set is_decoder: true in its JSON" if is_encoder else "use another architecture"
    return (
        f"is not causal: later tokens or other sequences change its logits by {seen:.1%} of the largest logit, even "
        f"in the library's own forward pass; {remedy}"
    )


def _leak(model: PreTrainedModel) -> float:
    """Returns by how much later tokens and the second window change the first window's logits.

    Returns 0 if the logits are random in training mode, as with dropout.
    """
    window = ReferenceWindow.of(model.config)
    half = window.inputs_BT.shape[1] // 2
    changed_BT = window.with_other_tokens(slice(half, None))
    changed_BT[1:] = window.with_other_tokens(slice(None))[1:]
    found = []
    with torch.random.fork_rng(devices=[]):
        for seed, ids_BT in ((0, window.ids_BT), (1, window.ids_BT), (0, changed_BT)):
            torch.manual_seed(seed)
            found.append(logits_of(model, ids_BT[:, :-1])[0, :half])
    once, again, changed = found
    return 0.0 if model.training and not once.equal(again) else relative_difference(changed, once)


def _problem(reference: PreTrainedModel, attention: str, window: WindowSpec) -> str | None:
    """Tests one attention. Returns the first problem found, or None."""
    try:
        model = _with_attention(reference, attention)
        tolerance = TOLERANCE if model.dtype == torch.float32 else BF16_TOLERANCE
        ids_BT = ReferenceWindow.of(model.config).inputs_BT
        difference = relative_difference(logits_of(model, ids_BT), reference_logits(reference))
        if difference > tolerance:
            return f"logits differ from the library's own by {difference:.1%} of the largest logit"
        problem = None
        if window.document_mask:
            problem = _documents_problem(model, reference, _inputs(model, attention, window), tolerance)
        return problem or _gradients_problem(model, attention, window)
    except InputError as error:
        return "; ".join(error.problems)
    except Exception as error:  # custom model code may raise anything
        return f"fails with {described(error)}"


def _with_attention(reference: PreTrainedModel, attention: str) -> PreTrainedModel:
    """Copies the reference with a different attention, on the device and in the dtype used to test it."""
    implementation = implementation_of(attention)
    model = copy_model(reference, attention=attention)
    device = "cuda" if implementation in ON_GPU_ALONE else "cpu"
    return model.to(device, ON_GPU_ALONE.get(implementation, torch.float32))


def _mixers(reference: PreTrainedModel, attention: str, window: WindowSpec) -> set[str]:
    """Returns the class names of other modules that mix documents; an empty set if the test can't run."""
    from pretrain.model.document_rows import leaking_classes

    try:
        model = _with_attention(reference, attention)
        inputs = _inputs(model, with_rows(attention, ["any"]), window)
        return leaking_classes(model, inputs["input_ids_BT"], DOCUMENT_LENGTHS[0][0], _layout(inputs))
    except Exception:  # custom model code may raise anything; the test without rows reports it
        return set()


def _documents_problem(
    model: PreTrainedModel, reference: PreTrainedModel, inputs: dict[str, Tensor], tolerance: float
) -> str | None:
    """Compares the logits and loss of a packed window with those of the separate documents."""
    arguments = _layout(inputs)
    packed_BTV = logits_of(model, inputs["input_ids_BT"], **arguments)
    window = ReferenceWindow.of(model.config)
    alone_BTV = _logits_alone(reference).view_as(packed_BTV)
    difference = relative_difference(packed_BTV, alone_BTV)
    first = window.documents[0][1].stop
    changed_BT = inputs["input_ids_BT"].clone()
    changed_BT[0, 1:first] = window.with_other_tokens(slice(1, first))[0, 1:first]
    others = [x.flatten(0, 1)[first:] for x in (logits_of(model, changed_BT, **arguments), packed_BTV)]
    leak = relative_difference(*others)
    if difference > tolerance or leak > (LEAK if tolerance == TOLERANCE else tolerance):
        return (
            "document_mask is not respected: tokens before a document change its logits by "
            f"{max(difference, leak):.1%} of the largest logit"
        )
    with torch.no_grad():
        _, loss = LanguageModelLoss(model, from_hidden_states=is_projection(reference))(**inputs)
    expected = F.cross_entropy(alone_BTV.flatten(0, 1), window.ids_BT[:, 1:].flatten())
    if not abs(loss.cpu() - expected) <= tolerance * expected:
        return f"its loss is {loss:.5f}, but the loss computed from the library's logits is {expected:.5f}"
    return None


def _layout(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the arguments of a forward pass that describe the documents."""
    return {name: value for name, value in inputs.items() if name not in ("input_ids_BT", "targets_BT")}


@functools.lru_cache(maxsize=4)
def _logits_alone(reference: PreTrainedModel) -> Tensor:
    """Returns the reference's logits for each document separately (1, all positions, V), computed once."""
    window = ReferenceWindow.of(reference.config)
    alone = [logits_of(reference, window.inputs_BT[row : row + 1, where]) for row, where in window.documents]
    return torch.cat(alone, dim=1)


def _gradients_problem(model: PreTrainedModel, attention: str, window: WindowSpec) -> str | None:
    whole = LanguageModelLoss(model.train(), from_hidden_states=False)
    # Dropout would advance the run's global RNG.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole(**_inputs(model, attention, window))[0].backward()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    infinite = [name for name, p in parameters.items() if p.grad is not None and not p.grad.isfinite().all()]
    missing = [name for name, p in parameters.items() if p.grad is None]
    if infinite:
        return f"{len(infinite)} parameters have a non-finite gradient: {_listed(infinite)}"
    if missing:
        return no_gradient(missing)
    leak = _leak(model)  # in training mode, in which BatchNorm mixes all tokens
    if leak > (TOLERANCE if model.dtype == torch.float32 else BF16_TOLERANCE):
        return (
            f"in training mode, later tokens or other sequences change its logits by {leak:.1%} of the largest logit"
        )
    return None


def no_gradient(names: Sequence[str]) -> str:
    """Returns the error for parameters without a gradient.

    They wouldn't be trained, would fail the first step with several processes, and would have no optimizer state to
    resume from.
    """
    return (
        f"{len(names)} parameters get no gradient: {_listed(names)}. In your own class, use them in forward() or "
        "remove them. Experts must run even if no tokens are routed to them."
    )


def _listed(names: Sequence[str]) -> str:
    """Lists up to four names. Names that differ only in the layer number are listed once."""
    shown = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    return ", ".join([*shown[:4], *([f"{len(shown) - 4} more"] if len(shown) > 4 else [])])


@functools.lru_cache(maxsize=64)
@one_thread()
def _balance_problem(keyed: KeyedConfig) -> str | None:
    """Returns an error message if the balancing loss doesn't affect the routers' gradients, otherwise None."""
    from pretrain.training.experts import Experts

    gradients = []
    for balance in (0.0, 1.0):
        model = build_model(reference_of(keyed).config, seed=0, attention="eager").train()
        alone = {"device": model.device, "data_ranks": 1, "sequence_parts": 1, "microbatches": 1, "state": dict}
        strategy = SimpleNamespace(**alone, sum=lambda tensor, by_layer: tensor)
        experts = Experts(model, strategy, RouterLosses(len(routers_of(model)), balance))
        whole = LanguageModelLoss(model, from_hidden_states=False)
        for _ in range(2):  # the first step has no loads yet
            model.zero_grad()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                experts.begin_step(1)
                whole(**_inputs(model, "eager", WindowSpec(TESTED_LENGTH, document_mask=False)))[0].backward()
            experts.count()
            experts.end_step()
        gradients.append({router.name: _gradients_of(router.module) for router in routers_of(model)})
    unmoved = [name for name, without in gradients[0].items() if torch.equal(without, gradients[1][name])]
    if not unmoved:
        return None
    return (
        f"is an MoE model, but the balancing loss does not reach {len(unmoved)} of its {len(gradients[0])} routers, "
        f"starting with {unmoved[0]}; to train without it, set loss.router_balance: 0"
    )


def _gradients_of(module: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None] or [torch.zeros(0)])


def _inputs(model: PreTrainedModel, attention: str, window: WindowSpec) -> dict[str, Tensor]:
    return model_inputs(
        ReferenceWindow.of(model.config).ids_BT.numpy(),
        window,
        end_of_document_id=END_OF_DOCUMENT,
        device=model.device,
        attention=attention,
    )
