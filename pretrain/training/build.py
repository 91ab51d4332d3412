"""Builds the model and optimizer for training."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedModel

from pretrain.config import MemoryBudget, RunConfig
from pretrain.hardware import DTYPES
from pretrain.model.attention import classes_in_rows, without_rows
from pretrain.model.build import InitialWeights, build_meta_model
from pretrain.model.compile import checkpoint_activations, choose_compile, compile_model
from pretrain.model.loss import LanguageModelLoss, choose_loss
from pretrain.optim.optimizers import optimizer_builder, parameter_dtype
from pretrain.parallel.strategy import Strategy
from pretrain.terminal import say_stage
from pretrain.training.run_plan import ModelPlan

if TYPE_CHECKING:
    from pretrain.model.loss_terms import LossTerms
    from pretrain.training.experts import Experts


@dataclass(frozen=True)
class Built:
    """Result of `build_training`."""

    model: nn.Module
    """Prepared model. Its forward pass takes a micro-batch and returns (loss, cross-entropy)."""
    experts: "Experts | None"
    """Expert load balancing; None for a dense model."""
    terms: "LossTerms | None"
    """Loss terms from extensions, if any."""


def build_training(
    config: RunConfig,
    plan: ModelPlan,
    strategy: Strategy,
    *,
    learning_rate: float,
    from_checkpoint: bool = False,
) -> Built:
    """Builds the model and the optimizer. The strategy initializes the weights. A collective call.

    Args:
        learning_rate: peak learning rate.
        from_checkpoint: skip the initialization, because the caller loads a checkpoint next.
    """
    say_stage("Building the model")
    kind = strategy.device.type
    optim = config.optim
    qk_clip = optim.muon.qk_clip
    dtype = parameter_dtype(optim)
    causal_lm = build_meta_model(plan.model_config, attention=plan.attention)
    if kind == "cuda":
        from pretrain.model.kernels import prefer_flash_3

        prefer_flash_3(
            config.attention,
            without_rows(plan.attention),
            dtype=DTYPES[strategy.precision],
            window=config.data.window,
            model_config=plan.model_config,
        )
    if qk_clip:
        from pretrain.model.largest_logits import record_largest_logits

        record_largest_logits(causal_lm)  # before cp wraps the attention, to record full sequences
    checkpoint_activations(causal_lm, config.activation_checkpointing)
    compile_mode, loss_backend = modes_of(config, plan, strategy, causal_lm)
    terms = None
    if config.loss.terms:
        from pretrain.model.loss_terms import LossTerms

        terms = LossTerms(config.loss, causal_lm.config, seed=config.seed, dtype=dtype)
    model = LanguageModelLoss(
        causal_lm,
        z_loss=config.loss.z_loss,
        backend=loss_backend,
        from_hidden_states=plan.from_hidden_states,
        terms=terms,
    )
    weights = InitialWeights(seed=config.seed, dtype=dtype, are_loaded=from_checkpoint)
    if config.init == "pretrained" and not from_checkpoint:
        from pretrain.data.new_tokens import new_tokens
        from pretrain.model.pretrained import open_pretrained

        added = new_tokens(config, plan.model_config)
        if added:
            say_stage(f"Initializing {len(added.parts):,} new tokens, each as the mean of the old tokens it replaces")
        weights = replace(weights, pretrained=open_pretrained(config.model.config, added))
    if optim.mup_base_width:
        from pretrain.model.width_roles import initial_scales

        weights = replace(weights, scales=initial_scales(plan.model_config, optim.mup_base_width))
    build_optimizer = optimizer_builder(
        optim, causal_lm, learning_rate, seed=config.seed, device_type=kind, loss_terms=model.loss_terms
    )
    prepared = strategy.prepare(model, weights, build_optimizer)
    experts = None
    strategy.before_step = ()
    strategy.before_update = ()
    strategy.after_update = ()
    strategy.untrained = None
    if plan.router_losses.routers:
        from pretrain.training.experts import Experts, followed_routers

        if followed_routers(causal_lm):
            experts = Experts(causal_lm, strategy, plan.router_losses)  # must be hooked before compilation
            experts.attach()
    if qk_clip:
        from pretrain.training.qk_clip import QkClip

        QkClip(causal_lm, strategy, qk_clip).attach()
    lengths = {config.data.window, *config.data.windows}
    mode = config.activation_checkpointing
    budget = mode.memory_budget if isinstance(mode, MemoryBudget) else 1.0
    compile_model(prepared, causal_lm, compile_mode, len(lengths), budget)
    return Built(prepared, experts, terms)


def modes_of(config: RunConfig, plan: ModelPlan, strategy: Strategy, causal_lm: PreTrainedModel) -> tuple[str, str]:
    """Resolves `auto` for compile and loss.backend. Returns (mode for `compile_model`, key in LOSS_BACKENDS)."""
    kind = strategy.device.type
    is_plain = config.activation_checkpointing == "none" and plan.active_parameters == plan.parameters
    is_plain = is_plain and not classes_in_rows(plan.attention)
    is_alone = strategy.name == "single" and not config.loss.terms  # loss terms aren't compiled
    mode = choose_compile(config.compile, causal_lm, device_type=kind, is_alone=is_alone, is_plain=is_plain)
    logits = None
    if strategy.precision == "fp32":
        length = config.data.longest_window.sequence_length
        logits = config.batch.sequences_per_micro_batch * length * plan.model_config.get_text_config().vocab_size
    return mode, choose_loss(config.loss.backend, device_type=kind, compile_mode=mode, logits=logits)
