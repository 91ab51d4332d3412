"""Changes a model's number of positions or rotary frequencies during a run (see docs/long_context.md).

This doesn't change any weights. Learned position embeddings, as in GPT-2, can't be extended.
"""

import copy
import functools
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from pretrain.config import Data
from pretrain.errors import InputError, Problems
from pretrain.model.build import KeyedConfig, build_meta_model, copy_model, shape_changes
from pretrain.model.model_config import changed_config, described
from pretrain.model.small_copy import ReferenceWindow, logits_of, one_thread, reference_of

KEPT_BY_TYPE = ("rope_theta", "partial_rotary_factor")
"""Keys that a stage inherits from the previous stage even if it changes rope_type."""
OF_EACH_INPUT = ("dynamic", "longrope")
"""Values of rope_type with frequencies that depend on the input length."""
KEYS = ("rope_parameters", "rope_theta", "max_position_embeddings")
"""Configuration keys that a stage can change."""


def configs_of_stages(config: PreTrainedConfig, data: Data) -> list[PreTrainedConfig]:
    """Returns the model's configuration in each stage, with enough positions and the stage's rotary parameters.

    Stages without changes share the previous stage's configuration object. Raises InputError if the model doesn't
    support a change.
    """
    problems = Problems()
    configs = [config]
    for number, window in enumerate(data.windows):
        place = f"data.stages[{number}]"
        rope_parameters = data.mixtures[number].rope_parameters
        longest = getattr(configs[-1], "max_position_embeddings", None)
        grows = longest is not None and window.sequence_length > longest
        # Without stages, `length_problems` checks the sequence length.
        if not data.stages or not (grows or rope_parameters):
            configs.append(configs[-1])
            continue
        length = window.sequence_length if grows else None
        changed = problems.attempt(_changed, configs[-1], place, length, rope_parameters)
        configs.append(changed or configs[-1])
    problems.stop_if_any()
    return configs[1:]


def _changed(
    config: PreTrainedConfig, place: str, length: int | None, rope_parameters: dict[str, Any] | None
) -> PreTrainedConfig:
    """Returns the configuration with a new number of positions and new rotary parameters (None: unchanged).

    Raises InputError if the model doesn't support the change.
    """
    changes: dict[str, Any] = {} if length is None else {"max_position_embeddings": length}
    if rope_parameters:
        changes |= _rope_changes(config, place, rope_parameters)
    changed = changed_config(place, config, changes)
    if learned := _tables_that_differ(config, changed):
        raise InputError(
            f"{place}.sequence_length: {length:,} is more than the {config.max_position_embeddings:,} positions of "
            f"{config.model_type}, which {learned}; set --model.max_position_embeddings {length} from the start, "
            "or use a model with rotary positions, such as llama"
        )
    if rope_parameters and (problem := _rope_problem(KeyedConfig.of(config), KeyedConfig.of(changed))):
        raise InputError(f"{place}.rope_parameters: {config.model_type} {problem}")
    return changed


def _rope_changes(config: PreTrainedConfig, place: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration changes for a stage's rope_parameters. Raises InputError if they are invalid."""
    before = getattr(config, "rope_parameters", None)
    if not isinstance(before, dict) or any(isinstance(value, dict) for value in before.values()):
        if set(given) == {"rope_theta"} and isinstance(getattr(config, "rope_theta", None), int | float):
            return dict(given)
        how = "has different rotary parameters for each layer type" if before else "has no rotary positions"
        raise InputError(
            f"{place}.rope_parameters: {config.model_type} {how}, so a stage can't change them; omit "
            "rope_parameters, or use a model with the same rotary positions in all layers, such as llama or qwen3"
        )
    rope_type = given.get("rope_type", before["rope_type"])
    if rope_type in OF_EACH_INPUT:
        raise InputError(
            f"{place}.rope_parameters: rope_type {rope_type} has different frequencies for each input; allowed: "
            "default, linear, yarn, llama3"
        )
    kept = before if rope_type == before["rope_type"] else {k: v for k, v in before.items() if k in KEPT_BY_TYPE}
    rope = kept | given
    needed = {"linear": ("factor",), "yarn": ("factor", "original_max_position_embeddings")}
    needed["llama3"] = (*needed["yarn"], "low_freq_factor", "high_freq_factor")
    if missing := [key for key in needed.get(rope_type, ()) if rope.get(key) is None]:
        raise InputError(
            f"{place}.rope_parameters: rope_type {rope_type} needs {' and '.join(missing)} "
            "(original_max_position_embeddings: the previous sequence length; factor: the new length divided by it)"
        )
    return {"rope_parameters": rope}


def _tables_that_differ(config: PreTrainedConfig, changed: PreTrainedConfig) -> str | None:
    """Describes tables with a row per position, which can't be extended. Returns None if there are none."""
    if shape_changes(config, changed):
        return "learns an embedding for each position"
    before, after = (
        {name: buffer.shape for name, buffer in build_meta_model(each).named_buffers()} for each in (config, changed)
    )
    return None if before == after else "has a table of all positions"


@functools.lru_cache(maxsize=64)
@one_thread()
def _rope_problem(keyed: KeyedConfig, keyed_changed: KeyedConfig) -> str | None:
    """Tests with a small copy whether changing frequencies in place is equivalent to rebuilding the model.

    Returns an error message, or None.
    """
    model = copy.deepcopy(reference_of(keyed))
    small = copy.deepcopy(model.config)
    _take_positions(small, keyed_changed.config)
    ids_BT = ReferenceWindow.of(small).inputs_BT
    try:
        before = logits_of(model, ids_BT)
        built = copy_model(model, attention="eager", config=small)
        use_positions(model, keyed_changed.config)
        wanted = logits_of(built, ids_BT)
        found = logits_of(model, ids_BT)
    except Exception as error:  # model code may raise any error
        return f"does not support changed positions ({described(error)}); omit rope_parameters"
    if torch.equal(wanted, before):
        return "does not use them; omit rope_parameters"
    if not torch.equal(found, wanted):
        return "has rotary frequencies that a stage can't change; omit rope_parameters"
    return None


def use_positions(model: nn.Module, config: PreTrainedConfig, *others: PreTrainedModel) -> None:
    """Updates a model's configuration and rotary tables in place, to use the positions in `config`.

    Args:
        model: a model, one of its submodules, or a module that contains it.
        others: more modules to update.
    """
    modules = [
        module
        for root in (model, *others)
        for module in root.modules()
        if isinstance(getattr(module, "config", None), PreTrainedConfig)
    ]
    for module in modules:
        _take_positions(module.config, config)
    for module in modules:
        if isinstance(getattr(module, "inv_freq", None), torch.Tensor):
            _rebuild_tables(module)


def _take_positions(own: PreTrainedConfig, config: PreTrainedConfig) -> None:
    for key in KEYS:
        if hasattr(own, key) and hasattr(config, key):
            setattr(own, key, copy.deepcopy(getattr(config, key)))


@torch.no_grad()
def _rebuild_tables(module: nn.Module) -> None:
    """Recomputes a rotary module's tables with its constructor, on the CPU, as when the model was built."""
    with torch.device("cpu"):
        fresh = type(module)(config=module.config)
    for name, table in fresh.named_buffers(recurse=False):
        if not module.get_buffer(name).is_meta:
            module.get_buffer(name).copy_(table)
    for name, value in vars(fresh).items():
        if not name.startswith("_") and name not in ("config", "training"):
            setattr(module, name, value)
