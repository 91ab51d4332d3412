"""Reads recipes and command lines into a RunConfig.

InputError lists all misspelled keys, wrong types and conflicting settings, with the file, dotted path, invalid value
and allowed values.
"""

import functools
import json
import re
import reprlib
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pretrain.config import RunConfig, Section
from pretrain.errors import EXIT_BAD_INPUT, InputError, Problems, did_you_mean, read_small_file, shortened
from pretrain.files import is_url, or_shipped
from pretrain.old_names import current_path, with_current_names
from pretrain.registry import OPTIMIZERS, SCHEDULES
from pretrain.terminal import is_first_process, say
from pretrain.units import leaves, table

brief = reprlib.Repr()
brief.maxlevel = 3
brief.maxstring = 200
brief.maxother = 200
"""repr with limited depth. A plain repr of nested YAML aliases could use up all memory."""


def parse_yaml(text: str) -> Any:
    """Parses YAML. Raises ValueError if the text isn't valid YAML or is nested too deeply."""
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(shortened(" ".join(str(error).split()), 500)) from None
    except RecursionError:
        raise ValueError("is nested too deeply; check for repeated brackets") from None


class Loader(yaml.SafeLoader):
    """SafeLoader that reads 3e-4 as a number and 0123 as text (YAML 1.1: text and 83), and rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key) for key, _ in node.value]
        if repeated := sorted({str(key) for key in keys if keys.count(key) > 1}):
            raise yaml.constructor.ConstructorError(
                None, None, f"duplicate key: {', '.join(repeated)}", node.start_mark
            )
        return super().construct_mapping(node, deep)


# Unlike in YAML 1.1, `off` and `0123` are text, and `3e-4` is a number.
Loader.yaml_implicit_resolvers = {}
for tag, pattern, first in (
    ("bool", r"^(?:true|True|false|False)$", "tTfF"),
    ("null", r"^(?:~|null|Null|)$", ["~", "n", "N", ""]),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", "-+0123456789"),
    ("float", r"^(?!0[0-9])[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
):
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))


# A setting on the command line replaces the recipe's settings in the same group.
ALTERNATIVES = (
    ("budget.tokens_per_parameter", "budget.tokens", "budget.steps"),
    ("optim.learning_rate", "optim.learning_rate_per_sequence"),
    *(
        (f"{section}.every_steps", f"{section}.every_tokens")
        for section in ("validation", "checkpoint", "samples", "diagnostics", "benchmarks")
    ),
    ("data.train", "data.stages"),
)


@dataclass(frozen=True)
class CommandLine:
    config: RunConfig
    overridden: frozenset[str]
    """Dotted paths of settings from the command line."""
    check: bool
    """Run all checks that precede training, then exit."""
    verbose: bool
    """With `check`, print every setting with its value and origin."""
    smoke: bool
    """Train for 100 steps in a separate folder, resume from the middle, and report pass or fail for each stage."""
    profile: int | None
    """Number of steps to profile, or None."""
    recipe: str
    """Path or URL."""


NAMES_ELSEWHERE = {
    "batch.sequences_per_micro_batch": "batch_size device_batch_size per_device_train_batch_size "
    "train.micro_batch_size training.local_batch_size",
    "batch.tokens_per_step": "total_batch_size training.num_tokens_per_train_step",
    "budget.steps": "max_iters num_iterations max_steps train.max_steps training.steps",
    "budget.tokens": "train.max_tokens",
    "checkpoint.every_steps": "save_every save_steps train.save_interval checkpoint.interval",
    "checkpoint.keep_last": "save_total_limit checkpoint.keep_latest_k",
    "data.sequence_length": "block_size max_seq_len train.max_seq_length training.seq_len training.max_context_length",
    "export.dtype": "checkpoint.export_dtype",
    "hub.repository": "hub_model_id",
    "logging.every_steps": "log_interval logging_steps train.log_interval metrics.log_freq",
    "model": "config_name model_name model_config",
    "optim.eps": "adam_epsilon",
    "optim.min_lr_ratio": "final_lr_frac lr_scheduler.min_lr_factor",
    "optim.learning_rate": "lr learning_rate optimizer.lr optimizer.init_args.lr",
    "optim.max_grad_norm": "grad_clip max_grad_norm train.max_norm training.max_norm",
    "optim.warmup_steps": "warmup_iters warmup_steps train.lr_warmup_steps lr_scheduler.warmup_steps",
    "optim.weight_decay": "weight_decay",
    "output": "out_dir output_dir dump_folder",
    "pipeline.schedule": "parallelism.pipeline_parallel_schedule",
    "samples.every_steps": "sample_every",
    "seed": "data_seed debug.seed",
    "tracking.group": "log.group",
    "tracking.name": "run_name wandb_run_name",
    "tracking.project": "wandb_project project",
    "trackers": "report_to logger_name",
    "validation.every_steps": "eval_interval eval_every eval_steps eval.interval validation.freq validator.freq",
}
"""{setting: equivalent flags in nanoGPT, nanochat, run_clm, litgpt and torchtitan} (see docs/coming_from.md)."""
SETTINGS_ELSEWHERE = {theirs: ours for ours, names in NAMES_ELSEWHERE.items() for theirs in names.split()}

TABLES = {"optim.name": OPTIMIZERS, "optim.schedule": SCHEDULES}
"""{setting: table of allowed values}."""
HANGING = {"initial_indent": " " * 6, "subsequent_indent": " " * 6}
FLAGS = ("--check", "--verbose", "--smoke")
SWITCHES = ("trust_remote_code",)
"""Settings that are set to true if they are passed without a value."""
FIRST_COMMANDS = """\
Trains a language model from a recipe. Run the same command again to resume.

  python train.py --text mine                           train on your own text
  python train.py --config recipes/demo.yaml            use a recipe (recipes/)
  python train.py --config recipes/demo.yaml --check    report all errors

Override any setting, e.g. --optim.learning_rate 1e-3; --help lists them all."""


def read_command_line(argv: list[str], usage: str) -> CommandLine:
    """Reads `[--config] RECIPE [--check] [--profile N] [--section.key VALUE ...]`, or prints help."""
    if not argv:
        print(FIRST_COMMANDS)
        sys.exit(EXIT_BAD_INPUT)
    if "--help" in argv or "-h" in argv:
        print(help_text(usage, [word for word in argv if not word.startswith("-")]))
        sys.exit(0)
    flags = {flag.removeprefix("--"): flag in argv for flag in FLAGS}
    if (flags["verbose"] and not flags["check"]) or (flags["check"] and flags["smoke"]):
        raise InputError("use --check, --check --verbose, or --smoke")
    pairs = pair_up(named_recipe([word for word in argv if word not in FLAGS]))
    recipes = [value for key, value in pairs if key == "config"]
    if len(recipes) != 1:
        raise InputError(f"use one recipe, as in --config recipes/NAME.yaml (got {', '.join(recipes) or 'none'})")
    profile = steps_to_profile([value for key, value in pairs if key == "profile"], flags)
    overrides = [(key, value) for key, value in pairs if key not in ("config", "profile")]
    config = read_run_config(recipes[0], overrides)
    overridden = frozenset(key for key, _ in overrides)
    return CommandLine(config, overridden, **flags, profile=profile, recipe=recipes[0])


def named_recipe(arguments: list[str]) -> list[str]:
    """Converts ['recipes/x.yaml', ...] to ['--config', 'recipes/x.yaml', ...]. Leaves other arguments unchanged."""
    is_recipe = bool(arguments) and arguments[0].endswith((".yaml", ".yml")) and not arguments[0].startswith("-")
    return ["--config", *arguments] if is_recipe else arguments


def steps_to_profile(given: list[str], flags: dict[str, bool]) -> int | None:
    """Returns the value of --profile, or None."""
    if not given:
        return None
    if len(given) > 1 or not given[0].isdecimal():
        raise InputError(f"--profile {' '.join(given)}: must be a number of steps, as in --profile 20")
    if flags["check"] or flags["smoke"]:
        raise InputError("--profile: cannot be combined with --check or --smoke")
    return int(given[0])


def help_text(usage: str, asked: list[str]) -> str:
    """Returns the usage and all settings, grouped by section, or only the requested sections.

    Raises InputError for an unknown section.
    """
    by_section: dict[str, list[str]] = {}
    for path, field in fields_of_config():
        section = path.partition(".")[0] if "." in path else "run"
        default = "required" if field.is_required() else json.dumps(field.default, ensure_ascii=False)
        if (parent := path.rpartition(".")[0]) in SECTIONS_LEFT_OUT:
            default = f"null; {default} if {parent} is set"
        found = TABLES.get(path) or choices_in(field.annotation)
        choices = f" {{{','.join(found)}}}" if found else ""
        text = f"  --{path}{choices}  [{default}]"
        by_section.setdefault(section, []).append(text)
        if field.description:
            by_section[section].append(textwrap.fill(" ".join(field.description.split()), 79, **HANGING))
    Problems(
        f"--help {name}: no such section{did_you_mean(name, by_section)}" for name in asked if name not in by_section
    ).stop_if_any()
    headings = {section: f"{section}:\n" + "\n".join(lines) for section, lines in by_section.items()}
    if asked:
        return "\n\n".join(headings[section] for section in asked)
    return "\n\n".join([usage.strip(), "Settings:", *headings.values()])


def choices_in(annotation: Any) -> list[str]:
    """Returns the allowed words for a setting or its list entries, or [] if other values are allowed."""
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    found = [choices_in(inner) for inner in get_args(annotation) if inner is not type(None)]
    return found[0] if len(found) == 1 else []


def explain(command_line: CommandLine) -> str:
    """Lists all settings, one per line, each with its value and origin (command line, recipe or default)."""
    in_recipe = frozenset(leaves(with_current_names(parse_yaml(recipe_text(command_line.recipe)))[0]))
    rows = []
    for path, value in leaves(command_line.config.model_dump(mode="json")).items():
        origin = str(command_line.recipe) if is_named(path, in_recipe) else "default"
        if is_named(path, command_line.overridden):
            origin = "command line"
        rows.append([path, json.dumps(value, ensure_ascii=False), origin])
    return table(rows)


def is_named(path: str, names: frozenset[str]) -> bool:
    """Returns True if the names, such as those on the command line, contain this setting, its section or its keys."""
    return any(name == path or name.startswith(f"{path}.") or path.startswith(f"{name}.") for name in names)


def pair_up(arguments: list[str]) -> list[tuple[str, str]]:
    """Converts ['--a.b=1', '--c', '2'] to [('a.b', '1'), ('c', '2')]. Translates other projects' flags."""
    pairs = []
    problems = Problems()
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        key, equals, value = flag.removeprefix("--").partition("=")
        if not flag.startswith("--"):
            problems.append(f"{flag!r}: expected --section.key VALUE; write a list as '[first, second]'")
        elif not equals and (not rest or rest[0].startswith("--")):
            if key in SWITCHES:
                pairs.append((key, "true"))
            elif problems.attempt(own_name, key):
                problems.append(f"--{key}: requires a value")
        else:
            pairs.append((problems.attempt(own_name, key) or key, value if equals else rest.pop(0)))
    problems.stop_if_any()
    return pairs


def own_name(key: str) -> str:
    """Returns the setting for a flag. Prints a notice for an old name or another project's flag.

    Raises InputError if the section is missing or unknown.
    """
    settings = [path for path, _ in fields_of_config()]
    sections = {path.partition(".")[0].removesuffix("[]") for path in settings}
    theirs = key.replace("-", "_")
    now = current_path(key)
    what = f"is now --{now}"
    if theirs in SETTINGS_ELSEWHERE:
        now = SETTINGS_ELSEWHERE[theirs]
        what = f"interpreted as --{now} (docs/coming_from.md)"
    if now != key:
        if is_first_process():
            say(f"--{key}: {what}", sys.stderr)
        return now
    if key.partition(".")[0] in {*sections, "config", "profile", "group"}:
        return key
    if homes := [f"--{path}" for path in settings if path.rpartition(".")[2] == theirs]:
        raise InputError(f"--{key}: must include its section; use {' or '.join(homes)}")
    near = did_you_mean(key.partition(".")[0], sections)
    raise InputError(f"--{key}: unknown key{near} (for other projects' flags, see docs/coming_from.md)")


def drop_alternatives(values: dict, overridden: set[str]) -> None:
    """Removes recipe settings that are replaced by an alternative on the command line."""
    for names in ALTERNATIVES:
        if any(name in overridden for name in names):
            for section, key in (name.split(".") for name in names if name not in overridden):
                if isinstance(values.get(section), dict):
                    values[section].pop(key, None)


def read_run_config(
    path: str | Path, overrides: list[tuple[str, str]] = (), *, loads_extensions: bool = True
) -> RunConfig:
    """Reads a recipe and applies the overrides. Raises InputError listing all problems.

    Args:
        loads_extensions: False to evaluate a recorded run without running its extensions' code. Settings that may
            refer to that code (optim, loss.terms, trackers, data order and transformations) are then ignored.
    """
    path = path if is_url(path) else or_shipped(path)
    if not is_url(path) and not Path(path).exists():
        raise InputError(f"--config {path}: no such recipe; see recipes/ for available ones")
    try:
        values = parse_yaml(recipe_text(path))
    except (InputError, ValueError) as error:
        where = "" if is_url(path) and str(error).startswith(str(path)) else f"{path}: "
        raise InputError(f"{where}{error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: must be a mapping of settings (got {type(values).__name__})")
    values, notices = with_current_names(values)
    if notices and is_first_process():
        say(f"{path}: {', '.join(notices)} (converted)", sys.stderr)
    if not loads_extensions and values.pop("extensions", None):
        values |= {"optim": {"learning_rate": "auto"}, "loss": {**values.get("loss", {}), "terms": {}}, "trackers": []}
        values["data"] = {**values.get("data", {}), "sampling": "epochs", "transformations": {}}
    overridden = {key for key, _ in overrides}
    drop_alternatives(values, overridden)
    # --model FILE must be applied before --model.KEY VALUE.
    overrides = sorted(overrides, key=lambda override: override[0].count("."))
    problems = Problems(problem for key, text in overrides if (problem := set_dotted(values, key, text)))
    values, _ = with_current_names(values)  # values on the command line
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        problems += [describe(problem, path, overridden) for problem in error.errors()]
    problems.stop_if_any()
    return config


def recipe_text(path: str | Path) -> str:
    """Reads a recipe from a path or URL. Raises InputError or UnreachableError."""
    if is_url(path):
        from pretrain.urls import read_text

        return read_text(str(path))
    return read_small_file(or_shipped(path))


def set_dotted(values: dict, key: str, text: str) -> str | None:
    """Parses `text` as YAML and sets values['a']['b'] for the key 'a.b'. Returns an error message or None."""
    *parents, last = key.split(".")
    try:
        value = parse_yaml(text)
    except ValueError as error:
        return f"--{key}: {shortened(text)!r} is not valid YAML: {error}"
    try:
        for name in parents:
            if isinstance(values, dict) and values.get(name) is None:
                values[name] = {}
            if key.startswith("model.") and isinstance(values.get(name), str):
                values[name] = {"config": values[name]}
            if name == "activation_checkpointing":
                values[name] = {}  # instead of none, full or a share
            values = values[int(name) if isinstance(values, list) else name]
        values[int(last) if isinstance(values, list) else last] = value
    except (KeyError, ValueError, IndexError, TypeError):
        return f"--{key}: no such setting"
    return None


def describe(problem: dict, path: str | Path, overridden: set[str]) -> str:
    """Formats a pydantic error with the file or flag, the dotted path, the problem and the invalid value."""
    loc = tuple(part for part in problem["loc"] if not str(part).startswith("function-"))
    where = ".".join(map(str, loc))
    known = allowed_keys(loc)
    message = problem["msg"].removeprefix("Value error, ")
    if known is None:  # pydantic appends the branch of a union to the path
        where = ".".join(str(part) for part in loc[:-1])
        message += ", or auto" if loc[-1:] == ("number",) else ""
    source = f"--{where}" if where in overridden else f"{path}: {where or 'recipe'}"
    if problem["type"] == "extra_forbidden" and where in MOVED:
        return f"{source}: is now {MOVED[where]}"
    if problem["type"] == "extra_forbidden":
        return f"{source}: unknown key{did_you_mean(str(loc[-1]), known or [])}"
    if problem["type"] == "missing":
        return f"{source}: is missing"
    if problem["type"] == "model_type":
        message = f"is a section; set its settings individually, as in --{where}.NAME VALUE (train.py --help {where})"
    if problem["type"] == "literal_error":
        message += did_you_mean(str(problem["input"]), re.findall(r"'([^']+)'", message)).replace("; allowed", "; one")
    if where == "activation_checkpointing":
        message += "; or use a share of the layers, such as 50%, or {memory_budget: 0.5}"
    given = "" if problem["type"] == "value_error" else f" (got {brief.repr(problem['input'])})"
    return f"{source}: {message}{given}"


def allowed_keys(loc: tuple) -> list[str] | None:
    """Returns the allowed keys at the last level of a path, or None if the path isn't in the schema."""
    parents = [part for part in loc if not isinstance(part, int)][:-1]
    paths = [path.replace("[]", "").split(".") for path, _ in fields_of_config()]
    keys = {path[len(parents)] for path in paths if path[: len(parents)] == parents and path != parents}
    return sorted(keys) or None


def sections_in(annotation: Any) -> list[type[Section]]:
    """Returns the config sections in a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for inner in getattr(annotation, "__args__", ()) for section in sections_in(inner)]


@functools.cache
def fields_of_config(schema: type[Section] = RunConfig, prefix: str = "") -> tuple[tuple[str, FieldInfo], ...]:
    """Returns (dotted path, field) for all settings. In paths, list names end with `[]`."""
    rows: list[tuple[str, FieldInfo]] = []
    for name, field in schema.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        inner = sections_in(field.annotation)
        if not inner or isinstance(field.default, str):  # a word can replace the section
            rows.append((path, field))
        if inner:
            rows += fields_of_config(inner[0], f"{path}{'[]' if 'list' in str(field.annotation) else ''}.")
    return tuple(rows)


MOVED = {
    "group": "tracking.group, but both are set; remove group",
    "optim.muon.adamw_learning_rate": "optim.group_learning_rates: {embedding: RATE, head: RATE, scalars: RATE} "
    "(omit head if it is tied)",
}
"""{removed setting: replacement}"""
SECTIONS_LEFT_OUT = {"batch.ramp", "data.cache"}
"""Sections that are null by default. Their settings' defaults apply only if the section is set."""


def as_yaml(config: RunConfig) -> str:
    """Returns the resolved config as a recipe."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
