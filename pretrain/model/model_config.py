"""Loads and validates model configurations, because transformers ignores unknown keys.

In transformers, `{"model_type": "llama", "hiden_size": 512}` silently creates a model with a hidden size of 4,096.
Here, an unknown key is an error, and all errors in a file are reported together.
"""

import dataclasses
import functools
import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub.dataclasses
import huggingface_hub.errors
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from pretrain.config import ModelSource
from pretrain.errors import InputError, did_you_mean, one_line, place_of, read_small_file, shortened
from pretrain.files import ROOT, or_shipped
from pretrain.model.architectures import MODEL_TYPES
from pretrain.registry import ARCHITECTURES

# Keys that transformers accepts although they aren't dataclass fields.
READ_BY_EVERY_CLASS = {"model_type", "auto_map", "torch_dtype", "num_labels", "name_or_path", "_name_or_path"}
# Flat keys that transformers moves into rope_parameters.
READ_INTO_ROPE_PARAMETERS = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
FLAT_IN_ROPE = ("rope_theta", "partial_rotary_factor")
# Examples for messages.
COMMON_MODEL_TYPES = ("llama", "qwen3", "gpt2", *MODEL_TYPES)
SHIPPED_CONFIGS = ROOT / "model_configs"
VOCABULARY_KEY = "vocab_size"
LARGE_VOCABULARY = 16_384
COUNT_FIELDS = (VOCABULARY_KEY, "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
COUNT_FIELDS += ("num_key_value_heads", "head_dim", "max_position_embeddings")

LARGEST = (
    (r"(?:^|_)n?_?layers?$", 1024, "layers"),
    (r"heads?$", 1 << 14, "heads"),
    (r"experts", 1 << 17, "experts"),
    (r"vocab", 10**8, "vocabulary tokens"),
    (r"(?:size|dim|rank|width|inner|_embd|d_model|dff?)$", 1 << 20, "vector dimensions"),
    (r"", 10**9, "for any key"),
)
"""(pattern for a key's name, maximum value, unit). The first matching pattern applies.

The limits are far above the largest known models, which have about 130 layers, 128 heads, 16,384 experts, 300,000
tokens, vectors with 110,000 dimensions and 10 million positions.
"""
ROTARY_NUMBER = r"^(?:factor$|rope_theta|partial_rotary|original_max|attention_factor|beta_|low_freq|high_freq)"
"""Regex for the keys of rotary parameters that must be numbers."""
NUMBER_RULES = (
    (r"drop", lambda value: 0 <= value < 1, "a probability (at least 0 and below 1)"),
    (r"eps(?:ilon)?(?:_|$)", lambda value: 0 < value < 1, "a small number between 0 and 1 (such as 1e-6)"),
    (r"initializer_range|init_std|_std$", lambda value: value >= 0, "a non-negative number (such as 0.02)"),
    (r"^factor$", lambda value: value >= 1, "a number of at least 1 (such as 8.0)"),
    (ROTARY_NUMBER, lambda value: value > 0, "a number above 0"),
)
"""(regex for key names, function that checks a value, description of the allowed values)"""
MAY_BE_NEGATIVE = re.compile(r"(?:_id|_index|_bound|_min|clamp_len|_ids)$")
CONFIG_DTYPES = ("bfloat16", "float16", "float32", "float64")
ROPE_TYPES = ("default", *ROPE_INIT_FUNCTIONS)


def load_model_config(
    name_or_path: str,
    *,
    changes: Mapping[str, Any] | None = None,
    vocabulary_size: int | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedConfig:
    """Loads a model's configuration from a .json file, a folder with config.json, or a Hub ID.

    Every key in a .json file is validated. Missing special-token IDs are set to None, because the class's defaults are
    for a different tokenizer. Folders and Hub IDs aren't validated, because they may have been written by older
    libraries with different keys. Raises an InputError that lists all problems.

    Args:
        changes: {key: new value}, validated like the keys in a .json file. Objects are merged.
        vocabulary_size: number of token IDs in the data's vocabulary, or None if there are no shards. If the data
            determines vocab_size (see `follows_the_data`), vocab_size is this number, padded by `padded_vocabulary`.
            Without shards, it's the file's value or the class's default.
    """
    if ARCHITECTURES:
        from pretrain.model.own_code import register_extensions

        register_extensions()
    changes = changes or {}
    where = str(ModelSource(config=name_or_path, **changes))
    if name_or_path.endswith(".json"):
        in_file = _read_json(or_shipped(name_or_path))
        config_class = _config_class(where, in_file | changes)
        keys = stated = _changed(config_class, in_file, changes)
    else:
        config = _config_of_library(name_or_path, trust_remote_code)
        if not changes:
            return config
        config_class = type(config)
        in_file = config.to_dict()
        keys = _changed(config_class, in_file, changes)
        stated = {key: keys[key] for key in keys if key in changes or key == "rope_parameters"}
    if follows_the_data(config_class, keys):
        for given in (keys, stated):
            given.pop(VOCABULARY_KEY, None)
        if vocabulary_size is not None:
            keys[VOCABULARY_KEY] = padded_vocabulary(vocabulary_size)
        elif isinstance(in_file.get(VOCABULARY_KEY), int):
            keys[VOCABULARY_KEY] = in_file[VOCABULARY_KEY]
    return _checked_config(where, config_class, keys, stated)


def load_recipe_model_config(source: ModelSource, vocabulary_size: int | None) -> PreTrainedConfig:
    """Calls `load_model_config` for a recipe's model. Raises InputError for multimodal models."""
    if source.trusts_code:
        register_code_of(source.config)
    config = load_model_config(source.config, changes=source.changes, vocabulary_size=vocabulary_size)
    refuse_composites(str(source), config)
    return config


def register_code_of(name_or_path: str) -> None:
    """Registers the custom code in a model's folder with transformers."""
    from pretrain.model.own_code import own_keys_of, register_folder

    path = Path(name_or_path)
    folder = str(path.parent) if name_or_path.endswith(".json") else name_or_path
    keys = _read_json(path) if name_or_path.endswith(".json") and path.exists() else own_keys_of(folder)
    if keys is not None and "auto_map" in keys:
        register_folder(folder, keys)


def changed_config(where: str, config: PreTrainedConfig, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """Changes some keys of a configuration, with the same validation as in `load_model_config`.

    A new rope_parameters object replaces the old one.
    """
    keys = {key: value for key, value in config.to_dict().items() if key != "rope_parameters" or key not in changes}
    return _checked_config(where, type(config), _changed(type(config), keys, changes), dict(changes))


def rope_in_words(rope_parameters: Mapping[str, Any] | None) -> str:
    """Formats rotary parameters, as in 'rope_theta 500,000, rope_type default'. Returns '' if there are none."""
    given = (rope_parameters or {}).items()
    return ", ".join(f"{key} {value:,g}" if isinstance(value, float) else f"{key} {value}" for key, value in given)


def follows_the_data(config_class: type[PreTrainedConfig], keys: Mapping[str, Any]) -> bool:
    """Returns True if vocab_size is missing or auto, so that the data determines the vocabulary size."""
    own_name = config_class.attribute_map.get(VOCABULARY_KEY, VOCABULARY_KEY)
    has_one = own_name in fields_of(config_class)
    stated = keys.get(own_name, "auto")
    return has_one and keys.get(VOCABULARY_KEY, stated) == "auto"


def padded_vocabulary(vocabulary_size: int) -> int:
    """Rounds a vocabulary size up to a multiple of 64 (128 if it's at least 16,384), for faster matmuls."""
    multiple = 64 if vocabulary_size < LARGE_VOCABULARY else 128
    return -(-vocabulary_size // multiple) * multiple


def _config_of_library(name_or_path: str, trust_remote_code: bool) -> PreTrainedConfig:
    from pretrain.model.own_code import register_all

    path = Path(name_or_path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"{name_or_path}: this folder has no config.json, so it is not a model folder")
    elif name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1:
        raise InputError(f"{name_or_path}: no such folder; use a .json file, a model folder or a Hub ID")
    elif (SHIPPED_CONFIGS / f"{name_or_path}.json").is_file():
        raise InputError(f"{name_or_path}: no such folder; did you mean {SHIPPED_CONFIGS.name}/{name_or_path}.json?")
    register_all()
    try:
        return AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, huggingface_hub.errors.StrictDataclassError) as error:
        raise InputError(_unreadable(name_or_path, path.is_dir(), error)) from error


def _changed(config_class: type[PreTrainedConfig], keys: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Applies the changes to the keys, and removes other names for the changed keys."""
    names = config_class.attribute_map
    changed = dict(keys)
    for key, value in changes.items():
        for other in [name for name in changed if names.get(name, name) == names.get(key, key) and name != key]:
            del changed[other]
        rope = changed.get("rope_parameters")
        if key in FLAT_IN_ROPE and isinstance(rope, dict):  # transformers would ignore the flat key
            changed["rope_parameters"] = {**rope, key: value}
        else:
            changed[key] = _merged(changed.get(key), value)
    return changed


def _merged(value: Any, change: Any) -> Any:
    if isinstance(value, dict) and isinstance(change, dict):
        return value | {key: _merged(value.get(key), inner) for key, inner in change.items()}
    return change


def refuse_composites(name: str, config: PreTrainedConfig) -> None:
    """Raises InputError for multimodal models, and suggests alternatives."""
    try:
        text = config.get_text_config()
    except ValueError:  # several text models
        text = None
    if text is not config:
        advice = f"use a language model, for example {', '.join(COMMON_MODEL_TYPES)}"
        if text:
            advice = f"use a JSON with the model_type of its text model, {text.model_type}"
        raise InputError(f"{name}: model_type {config.model_type} is multimodal; {advice}")


def _unreadable(name_or_path: str, is_folder: bool, error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return (
            f"{name_or_path}: this model has custom code, which runs with your permissions; allow it with "
            "--trust_remote_code (in a recipe: trust_remote_code: true) if you trust its author"
        )
    if is_folder:
        return f"{name_or_path}/config.json cannot be used: {one_line(error)}"
    return (
        f"{name_or_path}: no such file or folder, and it cannot be loaded from the Hugging Face Hub "
        f"({one_line(error)}); use a .json file, a model folder or a Hub ID"
    )


def _checked_config(
    where: str, config_class: type[PreTrainedConfig], keys: dict[str, Any], stated: dict[str, Any]
) -> PreTrainedConfig:
    """Builds the configuration from `keys`. Validates the keys in `stated`, which were written by hand."""
    fields = fields_of(config_class)
    # A class's attribute_map maps standard names to its own, such as hidden_size to GPT-2's n_embd.
    names = {key: config_class.attribute_map.get(key, key) for key in keys}
    defaults = {key: getattr(config_class, names[key], None) for key in stated}
    try:
        problems = _value_problems(stated, defaults)
    except RecursionError:
        raise InputError(f"{where}: lists or objects are nested too deeply") from None
    problems += _unknown_keys(config_class, fields, stated)
    problems += [f"{key}: {problem}" for key in stated if (problem := _type_problem(names[key], stated[key], fields))]
    problems += _rope_problems(stated, has_keys="rope_parameters" in fields)
    values = {name: field.default for name, field in fields.items()}
    wrong = {problem.partition(":")[0] for problem in problems}
    values |= {names[key]: keys[key] for key in keys if key not in wrong}
    problems += _shape_problems(config_class, values)
    if problems:
        raise InputError(*[f"{where}: {problem}" for problem in dict.fromkeys(problems)])
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        keys.setdefault(token, None)
    try:
        config = config_class.from_dict(keys)
    except Exception as error:  # a class's own code may raise any error for unexpected values
        reason = error.__cause__ or error
        raise InputError(f"{where}: not a valid {config_class.__name__}: {described(reason)}") from error
    # Some models read head_dim without a default.
    if "head_dim" in fields and config.head_dim is None and reads_plainly(config_class, "head_dim"):
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        neighbors = [str(path.parent / name.name) for name in path.parent.glob("*.json")]
        raise InputError(f"{path}: no such file{did_you_mean(str(path), neighbors)}")
    try:
        keys = json.loads(read_small_file(path), object_pairs_hook=_without_repeats)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except RecursionError:
        raise InputError(f"{path}: is nested too deeply for a model's JSON; check for repeated brackets") from None
    except ValueError as error:
        raise InputError(f"{path}: not a valid JSON file: {error}") from error
    if not isinstance(keys, dict):
        raise InputError(f"{path}: must be a JSON object, got {type(keys).__name__}")
    return keys


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a JSON object. Raises ValueError if it contains a key twice. The last value would silently win."""
    counts = Counter(key for key, _ in pairs)
    if repeated := sorted(key for key, count in counts.items() if count > 1):
        raise ValueError(f"{', '.join(repeated)} occurs more than once; keep one")
    return dict(pairs)


def _config_class(where: str, keys: Mapping[str, Any]) -> type[PreTrainedConfig]:
    model_type = keys.get("model_type")
    if model_type is None:
        raise InputError(f"{where}: model_type is missing; set it, for example to {', '.join(COMMON_MODEL_TYPES)}")
    if model_type in MODEL_TYPES:
        from pretrain.model.own_code import register_own

        register_own(model_type)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        hint = did_you_mean(str(model_type), CONFIG_MAPPING)
        if hint.startswith("; allowed"):
            hint = f"; for example {', '.join(COMMON_MODEL_TYPES)}"
        problem = f"{where}: unknown model_type {shortened(repr(model_type))}{hint}"
        if "auto_map" in keys:
            problem += "; its auto_map refers to custom code; allow it with --trust_remote_code"
        raise InputError(problem)
    config_class = CONFIG_MAPPING[model_type]
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(
            f"{where}: model_type {model_type!r} has no causal language model; use another one, "
            f"such as {', '.join(COMMON_MODEL_TYPES)}"
        )
    return config_class


def _unknown_keys(config_class: type[PreTrainedConfig], fields: dict, keys: dict[str, Any]) -> list[str]:
    own_keys = {*_own_fields(config_class), *config_class.attribute_map}
    allowed = {*fields, *config_class.attribute_map, *READ_BY_EVERY_CLASS}
    if "rope_parameters" in fields:
        allowed |= READ_INTO_ROPE_PARAMETERS
    if keys.keys() - allowed:
        allowed |= keys_read_by_model(config_class)
    return [
        f"{key} is not a key of {config_class.__name__}{did_you_mean(key, own_keys)}"
        for key in keys
        if key not in allowed
    ]


@functools.cache
def model_source(config_class: type[PreTrainedConfig]) -> str:
    """Returns the source code of the module that defines the config class's causal LM, or '' if it's unavailable."""
    try:
        return inspect.getsource(inspect.getmodule(MODEL_FOR_CAUSAL_LM_MAPPING[config_class]))
    except (ImportError, OSError, TypeError, ValueError, KeyError):
        return ""


def keys_read_by_model(config_class: type[PreTrainedConfig]) -> set[str]:
    """Returns all keys that the model reads, including undeclared ones, such as Qwen3-MoE's head_dim."""
    source = model_source(config_class)
    by_name = re.findall(r"""getattr\(\s*(?:self\.)?config\s*,\s*["'](\w+)["']""", source)
    return {*by_name, *re.findall(r"\bconfig\.([a-z]\w*)\b(?!\()", source)}


def reads_plainly(config_class: type[PreTrainedConfig], key: str) -> bool:
    """Returns True if the model reads the key without replacing null with a default."""
    plain = rf"""= (?:config\.{key}|getattr\(config, "{key}", (?!None)[^\n]*\))$"""
    return re.search(plain, model_source(config_class), re.MULTILINE) is not None


def described(error: BaseException) -> str:
    """Formats an error on one line, with the file and line number if it was raised in custom code."""
    said = shortened(f"{type(error).__name__}: {' '.join(str(error).split())}", 300)
    return f"{place}: {said}" if (place := place_of(error)) else said


def config_differences(earlier: PreTrainedConfig, now: PreTrainedConfig) -> str:
    """Describes the differences between two configurations, as in 'num_hidden_layers 2, now 4'."""
    if type(earlier) is not type(now):
        return f"model_type {earlier.model_type}, now {now.model_type}"
    names = sorted(_own_fields(type(now)) - {"bos_token_id", "eos_token_id", "pad_token_id"})
    pairs = {name: (getattr(earlier, name, None), getattr(now, name, None)) for name in names}
    different = [f"{name} {before!r}, now {after!r}" for name, (before, after) in pairs.items() if before != after]
    return ", ".join(different) or "other general keys"


@dataclasses.dataclass(frozen=True)
class ConfigField:
    """Type and default of a configuration key."""

    type: Any
    default: Any


def fields_of(config_class: type[PreTrainedConfig]) -> dict[str, ConfigField]:
    """Returns {key: type and default} for a configuration class.

    Keys are dataclass fields, or `__init__` arguments in older classes.
    """
    fields = {field.name: ConfigField(field.type, field.default) for field in dataclasses.fields(config_class)}
    for kind in reversed(config_class.__mro__):
        own = kind.__dict__.get("__init__")
        if own is None or not issubclass(kind, PreTrainedConfig) or hasattr(own, "__wrapped__"):
            continue
        for name, given in inspect.signature(own).parameters.items():
            if name != "self" and given.kind in (given.POSITIONAL_OR_KEYWORD, given.KEYWORD_ONLY):
                is_typed = given.annotation is not given.empty and not isinstance(given.annotation, str)
                default = None if given.default is given.empty else given.default
                fields.setdefault(name, ConfigField(given.annotation if is_typed else Any, default))
    return fields


def _own_fields(config_class: type[PreTrainedConfig]) -> set[str]:
    """Returns the keys that a class adds to those of PreTrainedConfig."""
    return fields_of(config_class).keys() - fields_of(PreTrainedConfig).keys()


def _type_problem(name: str, value: Any, fields: dict) -> str | None:
    """Returns an error message if a value's type doesn't match the class's annotation, otherwise None."""
    if name not in fields:
        is_count = type(value) is int  # not a bool
        return None if name not in COUNT_FIELDS or is_count else f"must be an integer, got {shortened(repr(value))}"
    expected = fields[name].type
    try:
        huggingface_hub.dataclasses.type_validator(name, value, expected)
    except (TypeError, ValueError):
        shown = expected.__name__ if isinstance(expected, type) else str(expected)
        return f"must be {shown}, got {shortened(repr(value))} ({type(value).__name__})"
    if isinstance(value, bool) and "bool" not in str(expected):
        return f"must be a number ({expected}), got {str(value).lower()}"
    return None


def _shape_problems(config_class: type[PreTrainedConfig], values: dict[str, Any]) -> list[str]:
    """Returns error messages for incompatible sizes, such as hidden_size and num_attention_heads."""
    own_name = {name: config_class.attribute_map.get(name, name) for name in COUNT_FIELDS}
    count = {name: values.get(own_name[name]) for name in COUNT_FIELDS}
    count = {name: value for name, value in count.items() if isinstance(value, int)}
    problems = [f"{own_name[name]} must be at least 1, got {value}" for name, value in count.items() if value < 1]
    if problems:
        return problems
    width = count.get("hidden_size")
    heads = count.get("num_attention_heads")
    key_heads = count.get("num_key_value_heads")
    head_width = count.get("head_dim")
    if width and heads and head_width is None:
        if rest := width % heads:
            problems.append(
                f"{own_name['hidden_size']} {width} is not a multiple of {own_name['num_attention_heads']} {heads}; "
                f"nearest: {width - rest or heads} or {width - rest + heads}"
            )
        head_width = width // heads
    if heads and key_heads and heads % key_heads:
        divisors = [str(number) for number in range(1, heads + 1) if heads % number == 0]
        problems.append(
            f"num_key_value_heads {key_heads} does not divide num_attention_heads {heads}; allowed: "
            f"{', '.join(divisors)}"
        )
    has_rope = "rope_parameters" in values or "rope_theta" in values
    if has_rope and head_width and head_width % 2 and not problems:
        problems.append(f"head_dim must be even for rotary positions, got {head_width}")
    return problems


def _value_problems(keys: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Returns error messages for values in a model's JSON, except for rotary parameters.

    Raises RecursionError if a value is nested too deeply. defaults: the class's default values, which show which keys
    are activations or may be negative.
    """
    problems = []
    for path, value in _numbers(keys):
        problems += _number_problems(path, value, defaults.get(path))
    for key, value in keys.items():
        is_activation = isinstance(defaults.get(key), str) and defaults[key] in ACT2FN
        if is_activation and (not isinstance(value, str) or value not in ACT2FN):
            problems.append(f"{key}: {_shown(value)} is not an activation{did_you_mean(str(value), ACT2FN)}")
        if key in ("dtype", "torch_dtype") and value is not None and value not in CONFIG_DTYPES:
            problems.append(f"{key}: {_shown(value)} is not a dtype{did_you_mean(str(value), CONFIG_DTYPES)}")
        if key in ("id2label", "label2id") and value is not None and not isinstance(value, dict):
            problems.append(f"{key}: {_shown(value)} is not a label mapping; omit it for a language model")
    return problems


def _number_problems(path: str, value: float, default: Any) -> list[str]:
    """Returns error messages for one number.

    path: key, dotted in nested objects, as in 'rope_parameters.factor'.
    """
    name = path.rpartition(".")[2]
    if not math.isfinite(value):
        example = default if _is_number(default) else 1.0
        return [f"{path}: must be a finite number (such as {example}), got {value}"]
    for pattern, is_allowed, allowed in NUMBER_RULES:
        if re.search(pattern, name) and not is_allowed(value):
            return [f"{path}: must be {allowed}, got {_shown(value)}"]
    if isinstance(value, int):
        _, most, what = next(bound for bound in LARGEST if re.search(bound[0], name))
        if value > most:
            return [f"{path}: {_shown(value)} is too large; allowed: at most {most:,} {what}"]
        is_negative = _is_number(default) and default < 0
        if value < 0 and not is_negative and not MAY_BE_NEGATIVE.search(name):
            return [f"{path}: must be at least 0, got {_shown(value)}"]
    return []


def _rope_problems(keys: Mapping[str, Any], *, has_keys: bool) -> list[str]:
    """Returns error messages for rotary parameters, which can be one object or one object per layer type.

    `_number_problems` checks the numbers. has_keys: True if the class declares rope_parameters. Unknown keys are then
    errors.
    """
    known = {*RopeParameters.__annotations__, "type"}
    problems = []
    objects = {"": {"rope_theta": keys.get("rope_theta")}}
    for outer in ("rope_parameters", "rope_scaling"):
        if (given := keys.get(outer)) is None:
            continue
        if not isinstance(given, dict):
            problems.append(
                f"{outer}: {_shown(given)} is not an object; use one such as {{'rope_type': 'linear', 'factor': 8.0}}"
            )
            continue
        nested = {f"{outer}.{kind}.": value for kind, value in given.items() if isinstance(value, dict)}
        objects |= nested or {f"{outer}.": given}
        for key in given if has_keys and not nested else ():
            if key not in known:
                problems.append(f"{outer}.{key} is not a rotary parameter{did_you_mean(key, known)}")
    for prefix, values in objects.items():
        for key, value in values.items():
            is_type = key in ("rope_type", "type")
            if is_type and value is not None and value not in ROPE_TYPES:
                hint = did_you_mean(str(value), ROPE_TYPES)
                problems.append(f"{prefix}{key}: {_shown(value)} is not a rope_type{hint}")
            if re.search(ROTARY_NUMBER, key) and value is not None and not _is_number(value):
                problems.append(f"{prefix}{key}: must be a number, got {_shown(value)}")
    return problems


def _numbers(values: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yields (dotted path, number) for every number in nested objects and lists. Paths omit list indices."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _numbers(value, f"{path}.{key}" if path else str(key))
    elif isinstance(values, list):
        for value in values:
            yield from _numbers(value, path)
    elif _is_number(values):
        yield path, values


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)  # not a bool


def _shown(value: Any) -> str:
    return shortened(f"{value:,}" if type(value) is int and abs(value) < 10**30 else repr(value), 60)
