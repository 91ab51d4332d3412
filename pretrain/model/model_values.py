"""What values of a model's configuration cannot be: the library takes most of them, and fails later or trains wrong.

Bounds lie far beyond every model there is: what is above one is a typo, and would hang the library or fill the
memory.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pretrain.errors import did_you_mean, shortened

LARGEST = (
    (r"(?:^|_)n?_?layers?$", 1024, "layers"),
    (r"heads?$", 1 << 14, "heads"),
    (r"experts", 1 << 17, "experts"),
    (r"vocab", 10**8, "tokens in a vocabulary"),
    (r"(?:size|dim|rank|width|inner|_embd|d_model|dff?)$", 1 << 20, "numbers in a vector"),
    (r"", 10**9, "of anything"),
)
"""(keys, largest value, of what). The first whose pattern is found counts. The largest models that are known have some
130 layers, 128 heads, 16,384 experts, 300,000 tokens, 110,000 numbers in a vector, 10 million positions."""
MAY_BE_NEGATIVE = re.compile(r"(?:_id|_index|_bound|_min|clamp_len|_ids)$")
CONFIG_DTYPES = ("bfloat16", "float16", "float32", "float64")
ROPE_TYPES = ("default", *ROPE_INIT_FUNCTIONS)
POSITIVE_IN_ROPE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "attention_factor")
POSITIVE_IN_ROPE += ("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor")
MOST_DEPTH = 20
"""Of nested lists and objects."""


def value_problems(keys: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """What is wrong with the values of a model's JSON, whatever their class; [] if nothing is.

    Args:
        defaults: of the class's keys; where one is an activation or negative, the key takes such values.
    """
    if _depth(keys) > MOST_DEPTH:
        return [f"lists or objects are nested more than {MOST_DEPTH} deep; no model's JSON is"]
    problems = []
    for path, value in _numbers(keys):
        problems += _number_problems(path, value, defaults.get(path))
    for key, value in keys.items():
        is_activation = isinstance(defaults.get(key), str) and defaults[key] in ACT2FN
        if is_activation and (not isinstance(value, str) or value not in ACT2FN):
            problems.append(f"{key}: {_shown(value)} is not an activation{did_you_mean(str(value), ACT2FN)}")
    return problems + _kind_problems(keys) + _rope_problems(keys)


def _kind_problems(keys: Mapping[str, Any]) -> list[str]:
    """What is wrong with keys that every class has."""
    problems = []
    for key in ("dtype", "torch_dtype"):
        if (value := keys.get(key)) is not None and value not in CONFIG_DTYPES:
            problems.append(f"{key}: {_shown(value)} is not a dtype{did_you_mean(str(value), CONFIG_DTYPES)}")
    for key in ("id2label", "label2id"):
        if (value := keys.get(key)) is not None and not isinstance(value, dict):
            problems.append(f"{key}: {_shown(value)} is not an object of labels; a language model needs none")
    return problems


def _number_problems(path: str, value: float, default: Any) -> list[str]:
    """path: 'rope_parameters.factor' for a number within an object."""
    name = path.rpartition(".")[2]
    if not math.isfinite(value):
        example = default if isinstance(default, int | float) and not isinstance(default, bool) else 1.0
        return [f"{path}: {value} is not a finite number; allowed: finite numbers, such as {example}"]
    if "drop" in name and isinstance(value, int | float) and not 0 <= value < 1 and not isinstance(default, bool):
        return [f"{path}: {_shown(value)}; allowed: a probability from 0 to below 1"]
    if re.search(r"eps(?:ilon)?(?:_|$)", name) and not 0 < value < 1:
        return [f"{path}: {_shown(value)}; allowed: a small number above 0 and below 1, such as 1e-6"]
    if re.search(r"initializer_range|init_std|_std$", name) and value < 0:
        return [f"{path}: {_shown(value)}; allowed: a number from 0, such as 0.02"]
    if isinstance(value, int):
        _, most, what = next(bound for bound in LARGEST if re.search(bound[0], name))
        if value > most:
            return [f"{path}: {_shown(value)} is more than any model has; allowed: at most {most:,} {what}"]
        is_negative = isinstance(default, int | float) and default < 0
        if value < 0 and not is_negative and not MAY_BE_NEGATIVE.search(name):
            return [f"{path}: {_shown(value)}; allowed: from 0"]
    return []


def _rope_problems(keys: Mapping[str, Any]) -> list[str]:
    """What is wrong with the parameters of rotary positions, also where there is one object per kind of layer."""
    problems = _rope_kind_problems("", {"rope_theta": keys.get("rope_theta")})
    for outer in ("rope_parameters", "rope_scaling"):
        if (given := keys.get(outer)) is None:
            continue
        if not isinstance(given, dict):
            problems.append(
                f"{outer}: {_shown(given)} is not an object; such as {{'rope_type': 'linear', 'factor': 8.0}}"
            )
            continue
        nested = {f"{outer}.{kind}.": value for kind, value in given.items() if isinstance(value, dict)}
        for prefix, values in (nested or {f"{outer}.": given}).items():
            problems += _rope_kind_problems(prefix, values)
    return problems


def _rope_kind_problems(prefix: str, values: Mapping[str, Any]) -> list[str]:
    problems = []
    for key in ("rope_type", "type"):
        if (kind := values.get(key)) is not None and (not isinstance(kind, str) or kind not in ROPE_TYPES):
            problems.append(f"{prefix}{key}: {_shown(kind)} is not a rope_type{did_you_mean(str(kind), ROPE_TYPES)}")
    for key in ("factor", *POSITIVE_IN_ROPE):
        if (value := values.get(key)) is None:
            continue
        least = 1 if key == "factor" else 0
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value < least or value == 0:
            allowed = "a number from 1, such as 8.0" if key == "factor" else "a number above 0"
            problems.append(f"{prefix}{key}: {_shown(value)}; allowed: {allowed}")
    return problems


def _numbers(values: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """(dotted path, number) of every number in nested objects and lists; the list's own path for what is in a list."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _numbers(value, f"{path}.{key}" if path else str(key))
    elif isinstance(values, list):
        for value in values:
            yield from _numbers(value, path)
    elif isinstance(values, int | float) and not isinstance(values, bool):
        yield path, values


def _depth(values: Any) -> int:
    """How deep lists and objects are nested, up to one more than MOST_DEPTH; without recursion."""
    depth, level = 0, [values]
    while level and depth <= MOST_DEPTH:
        depth += 1
        inner = [list(value.values()) if isinstance(value, Mapping) else value for value in level]
        level = [item for value in inner for item in value if isinstance(item, Mapping | list)]
    return depth


def _shown(value: Any) -> str:
    return shortened(f"{value:,}" if type(value) is int and abs(value) < 10**30 else repr(value), 60)
