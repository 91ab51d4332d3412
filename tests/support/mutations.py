"""Random mistakes in recipes, model JSONs and command lines, reproducible from a seed and a case number."""

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from pretrain.recipe import fields_of_config
from pretrain_tools.preparation.arguments import OPTIONS
from support.fuzzing import Case

SEED = int(os.environ.get("FUZZ_SEED", "13"))
VALUES = [
    "true", "false", "null", ".nan", "nan", ".inf", "inf", "-.inf", "-inf", "-1", "0", "-0.0", "0.5", "1", "3",
    "1e308", "1e400", "1e-400", "9" * 30, "9" * 5000, "-" + "9" * 30, "1099511627776", "1e15", "1_0", "0x10",
    "0123", "''", "' '", "é漢字🙂", "'\u202e'", "[]", "{}", "[1, [2]]", "{a: 1}", "[" * 3000, "x" * 500,
    "x" * 70_000, "/dev/zero", "/dev/null", "/", "/proc/self/mem", "/nonexistent/x", "../..", "~", "none",
    "auto", "1.5", "2k", "10B", "1e9T", "50%", "200%", "-5%", "nan%", "!!python/object:os.system x", "&a [*a]",
    "*b", '"\\u0000"', "2026-01-01", "1:30", "yes", "off", "fp64", "{", "- a", "@", "a: b: c", "%", "[true]",
    "[null, 1]", "http://127.0.0.1:1/x", "a/b@c", "{a: {b: {c: [1, 2, {d: .nan}]}}}", "NaN", "Infinity", "--",
    "-", "1e3.5", "１２", "+5", "5 ", "'5'", "0.1.2",
]  # fmt: skip
"""Values for YAML and command lines."""
PLAIN = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**40, 2**63, 10**9, 10**15, 10**30, 0.0, 0.5, -0.5, 1.5, 1e308,
    float("nan"), float("inf"), -float("inf"), "", " ", "nonsense", "é🙂", "x" * 500, "5", [], {}, [1], [[]], ["a"],
    {"a": 1}, {"rope_type": "linear"}, {"rope_type": "linear", "factor": -1},
    {"rope_type": "yarn", "factor": float("nan")},
    {"type": 5}, {"rope_theta": "x"}, [None], [True], {"": {}}, "gelu", "silu", "default", "float32", 64, 7, 0.1,
]  # fmt: skip
"""Values for JSON."""
ARCHITECTURES = {
    "llama": {}, "qwen3": {"head_dim": 16}, "mistral": {}, "olmo2": {}, "gemma": {}, "phi3": {"pad_token_id": 0},
    "gpt_neox": {}, "cohere": {}, "granite": {}, "smollm3": {"pad_token_id": 0}, "starcoder2": {}, "ministral": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "mixtral": {"num_local_experts": 4}, "olmoe": {"num_experts": 4, "num_experts_per_tok": 2}, "hunyuan_v1_dense": {},
}  # fmt: skip
"""{model_type: keys to add to the tiny model}"""


@dataclass(frozen=True)
class Material:
    """Valid inputs that the cases modify."""

    folder: Path
    recipe: dict
    model: dict
    run: Path
    shards: Path
    tokenizer: Path
    text: Path

    def place(self, name: str) -> Path:
        """Creates a folder for a case to run in."""
        path = self.folder / name
        path.mkdir(parents=True, exist_ok=True)
        return path


def generator_of(kind: str, number: int) -> random.Random:
    return random.Random(f"{SEED} {kind} {number}")


def recipe_case(material: Material, number: int) -> Case:
    """Returns a train.py --check command with one to three mistakes in the recipe or its flags."""
    rng = generator_of("recipe", number)
    folder = material.place(f"recipe-{number}")
    values = json.loads(json.dumps(material.recipe))
    raw = {}
    names = []
    words = []
    values["output"] = str(folder / "run")
    settings = [path for path, _ in fields_of_config()]
    for _ in range(rng.choice((1, 1, 2, 3))):
        path = rng.choice(settings)
        value = rng.choice(VALUES)
        names += names_of(path)
        if rng.random() < 0.4:
            flag = path.replace("[]", ".0")
            words += [f"--{flag}={value}"] if rng.random() < 0.5 or value.startswith("--") else [f"--{flag}", value]
        else:
            mark = f"RAW{len(raw)}RAW"
            raw[mark] = value
            put(values, path, mark)
    text = yaml.safe_dump(values, allow_unicode=True)
    for mark, value in raw.items():
        text = text.replace(mark, value)
    config = folder / "recipe.yaml"
    if rng.random() < 0.3:
        text, named = spoil(rng, text)
        names += [*named, 'in "<unicode string>"', "decode", "unacceptable character", "is missing"]
    config.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape"))
    given = str(config)
    if raw:  # messages about invalid YAML
        names += ['in "<unicode string>"', "unacceptable character", "nested too deeply", "integer string"]
    if rng.random() < 0.05:
        given = rng.choice(["/dev/zero", "/dev/null", "/", "", "nowhere.yaml", str(folder), "x" * 300, "é.yaml"])
        names = ["--config", given or "recipe"]
    return Case("train.py", ["--config", given, "--check", *words], names, str(folder))


def names_of(path: str) -> list[str]:
    """Returns names that a message can use for a setting: its own name and its sections' names."""
    parts = path.replace("[]", "").split(".")
    return [parts[-1], *(f"{part}:" for part in parts[:-1]), *(f"{part}." for part in parts[:-1])]


def put(values: dict, path: str, value: object) -> None:
    """Sets the value at a dotted path, using the first item of each list. Creates missing sections."""
    here = values
    parts = path.split(".")
    for part in parts[:-1]:
        name = part.removesuffix("[]")
        inner = here.get(name)
        if part.endswith("[]"):
            if not (isinstance(inner, list) and inner and isinstance(inner[0], dict)):
                here[name] = [{}]
            here = here[name][0]
        else:
            if not isinstance(inner, dict):
                here[name] = {}
            here = here[name]
    here[parts[-1].removesuffix("[]")] = value


def spoil(rng: random.Random, text: str) -> tuple[str | bytes, list[str]]:
    """Returns the text with a mistake, and names that the error message may contain."""
    lines = text.splitlines()
    number = rng.randrange(len(lines))
    key = lines[number].strip(" -").partition(":")[0]
    kinds: list[Callable[[], tuple[str | bytes, list[str]]]] = [
        lambda: (text[: rng.randrange(len(text))], ["recipe"]),
        lambda: ("\n".join(lines[:number] + lines[number + 1 :]), [key, "missing"]),
        lambda: ("\n".join([*lines[: number + 1], *lines[number:]]), [key, "repeated"]),
        lambda: (text.replace(key, f"{key}x", 1), [f"{key}x", key]),
        lambda: (text.replace(key, key[:-1] or "q", 1), [key]),
        lambda: (text.encode()[: len(text) // 2] + bytes([0xFF, 0xFE, 0]) + text.encode()[len(text) // 2 :], []),
        lambda: (text + "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b, *b, *b]\nd: [*c, *c, *c]\n", ["unknown"]),
        lambda: (text + "z: " + "{a: " * 3000, ["nested"]),
        lambda: (text.replace("  ", "\t"), []),
        lambda: ("", ["mapping"]),
        lambda: ("- " + text, []),
        lambda: (text + "#" * (2 << 20), ["bytes"]),
    ]
    return rng.choice(kinds)()


def model_case(material: Material, number: int) -> Case:
    """Returns a train.py --check command with mistakes in the model's JSON."""
    rng = generator_of("model", number)
    folder = material.place(f"model-{number}")
    model_type = rng.choice(sorted(ARCHITECTURES))
    keys = model_of(material, model_type)
    known = sorted({*keys, *keys_of(model_type), "torch_dtype", "rope_scaling", "rope_theta", "id2label"})
    names = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        key = rng.choice([*sorted(keys), *known])
        if rng.random() < 0.1:
            key = key[:-1] if rng.random() < 0.5 else f"{key}_"
        keys[key] = rng.choice(PLAIN)
        names.append(key)
    if rng.random() < 0.1:
        key = rng.choice(sorted(keys))
        del keys[key]
        names.append(key)
    text = json.dumps(keys, indent=1)
    path = folder / "model.json"
    if rng.random() < 0.1:
        lines = text.splitlines()
        text = rng.choice(
            [text[: rng.randrange(len(text))], text + "}", "[" * 100_000, "\n".join([*lines[:3], *lines[2:]]), "[]",
             "5", '{"model_type": "llama", "x": ' + "9" * 5000 + "}", "", "\ufeff" + text, text.replace('"', "'")]
        )  # fmt: skip
        names = [str(path)]
    path.write_text(text, encoding="utf-8")
    config = folder / "recipe.yaml"
    config.write_text(yaml.safe_dump({**material.recipe, "output": str(folder / "run"), "model": str(path)}))
    return Case("train.py", ["--config", str(config), "--check"], names, str(folder))


def model_of(material: Material, model_type: str) -> dict:
    """Returns a valid tiny model of this type."""
    known = {*keys_of(model_type), "vocab_size", "tie_word_embeddings", "bos_token_id"}
    keys = {key: value for key, value in material.model.items() if key in known}
    return {**keys, **ARCHITECTURES[model_type], "model_type": model_type}


def keys_of(model_type: str) -> list[str]:
    """Returns the configuration keys for this model type."""
    from transformers import CONFIG_MAPPING

    from pretrain.model.model_config import _own_fields

    config_class = CONFIG_MAPPING[model_type]
    return sorted(_own_fields(config_class) | set(config_class.attribute_map))


SCRIPT_OPTIONS = {
    "plan.py": ["gpus", "gpu", "machines", "gpu_memory", "peak_tflops", "price_per_gpu_hour", "network_gbits", "mfu",
                "config", "batch.tokens_per_step", "budget.steps", "data.sequence_length", "optim.name"],
    "evaluate.py": ["model", "output", "precision", "tasks", "include_path", "num_fewshot", "limit",
                    "batch_size", "data", "tokenizer", "split", "sequences", "sequence_length", "document_mask",
                    "prompt", "max_new_tokens", "temperature", "top_k", "seed"],
    "publish.py": ["run", "repo", "checkpoint", "license", "language", "message", "output", "attempts", "first_wait"],
    "prepare_data.py": [name for group in OPTIONS.values() for name in group],
    "runs.py": ["output", "step", "limit", "characters", "timeout"],
}  # fmt: skip
"""{script: options that take a value}"""


WRITTEN = ("output", "staging")
OUTSIDE = ("/", "../..", "/nonexistent/x", "~")
"""Paths that tests must not write to."""


def script_case(material: Material, number: int) -> Case:
    """Returns a command line for another script with one to three mistakes."""
    rng = generator_of("script", number)
    folder = material.place(f"script-{number}")
    script = list(SCRIPT_OPTIONS)[number % len(SCRIPT_OPTIONS)]
    words = base_of(rng, script, material, folder)
    # A command of runs.py may name a folder that isn't a run. Then the error is about the folder.
    names = [word for word in words[1:] if script == "runs.py" and word != str(material.run)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        option = rng.choice(SCRIPT_OPTIONS[script])
        value = rng.choice([*VALUES, str(folder), str(material.text)])
        if option in WRITTEN and value in OUTSIDE:
            value = "/dev/null/x"
        names += [option, option.rpartition(".")[2], *([value[:40]] if len(value) > 2 else [f"{value}:"])]
        flag = f"--{option}"
        kind = rng.random()
        if kind < 0.1:
            words = [*words, f"{flag}x", value]
            names = [*names, f"{flag}x", "unrecognized"]
        elif kind < 0.2 and flag in words:
            words.remove(flag)
            names += ["--", *names_of_words(words)]
        elif kind < 0.3:
            words.append(flag)
        elif kind < 0.4:
            words.append(value)
            names += ["unrecognized", "unexpected argument", "expected", *names_of_words(words)]
        elif flag in words and words.index(flag) + 1 < len(words) and rng.random() < 0.8:
            words[words.index(flag) + 1] = value
        else:
            words += [f"{flag}={value}"]
    return Case(script, words, [name for name in names if name], str(folder))


def names_of_words(words: list[str]) -> list[str]:
    return [word.removeprefix("--") for word in words if word.startswith("--")] + [w for w in words if len(w) > 3]


def base_of(rng: random.Random, script: str, material: Material, folder: Path) -> list[str]:
    """Returns a valid command line."""
    run = str(material.run)
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**material.recipe, "output": str(folder / "run")}))
    if script == "plan.py":
        return ["--config", str(recipe), "--gpus", "8", "--gpu", "h100", *rng.choice([[], ["--json"], ["--comment"]])]
    if script == "evaluate.py":
        what = rng.choice(
            [["--data", str(material.shards), "--sequences", "2"], ["--prompt", "x", "--max_new_tokens", "2"]]
        )
        return ["--model", rng.choice([run, f"{run}/final", f"{run}@4"]), *what]
    if script == "publish.py":
        offer = ["--license", "apache-2.0", "--language", "en"]
        return ["--run", run, "--repo", "me/x", *offer, "--dry_run", "--output", str(folder / "staged")]
    if script == "prepare_data.py":
        makes = rng.choice([["--tokenizer", str(material.tokenizer)], ["--train_tokenizer", "300"]])
        words = ["--input", str(material.text), "--max_documents", "5", "--output", str(folder / "out"), *makes]
        return rng.choice(
            [words, words, words, ["--inspect", str(material.shards)], ["--verify", str(material.shards)]]
        )
    command = rng.choice(("list", "status", "plot", "compare", "summary", "documents", "save", "parity"))
    place = rng.choice([run, run, str(material.run.parent), "/typo", "é" * 300, str(material.text), "/dev/zero", ""])
    rest = {
        "plot": ["--output", str(folder / "curves")],
        "compare": [run],
        "documents": ["--step", "1"],
        "save": ["--timeout", "1"],
    }
    if command == "parity":  # would train with an existing recipe
        return [command, "--config", rng.choice([place or "x", "/nonexistent.yaml"])]
    return [command, place, *rest.get(command, [])]
