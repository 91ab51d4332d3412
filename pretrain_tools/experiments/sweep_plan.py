"""Plans a sweep: parses the varied settings, derives the runs, and reports all problems before any run starts."""

import collections
import io
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pretrain.config import Hub, RunConfig
from pretrain.errors import InputError, Problems, shortened
from pretrain.old_names import current_path, current_value
from pretrain.recipe import fields_of_config, parse_yaml, read_run_config
from pretrain.runs.run_folder import read_json
from pretrain.terminal import say_stage
from pretrain.units import count_text, counted
from pretrain_tools.experiments.small_runs import SmallRun
from pretrain_tools.runs.comparison import setting_differences
from pretrain_tools.runs.history import is_number, require_output

OPTUNA = "optuna==5.0.0"
LONGEST_VALUE_IN_NAME = 40
MOST_DIFFERENCES = 8
TRIALS_FILE = "trials.json"


@dataclass(frozen=True)
class Axis:
    """A setting to vary."""

    path: str
    values: tuple[str, ...]
    """Values as given on the command line, or the two ends of a range."""
    is_range: bool = False

    @property
    def ends(self) -> tuple[float, float]:
        """Lower and upper ends of a range, as numbers."""
        return tuple(map(parse_yaml, self.values))

    @property
    def is_whole(self) -> bool:
        """True for a range of integers."""
        return all(isinstance(end, int) for end in self.ends)


@dataclass(frozen=True)
class SweepRequest:
    """A sweep as requested on the command line."""

    recipe: Path
    axes: tuple[Axis, ...]
    changes: tuple[tuple[str, str], ...]
    """Recipe overrides for all runs, as (dotted path, value)."""
    seeds: int
    search: int | None
    """Number of combinations to try in a search; None for a grid."""
    output: Path
    labels: Mapping[str, str] = field(default_factory=dict)
    """{long value: short name for folders}"""

    @property
    def grid(self) -> list[dict[str, str]]:
        """All combinations of values (for a range, its two ends), each as {path: value}."""
        paths = [axis.path for axis in self.axes]
        combinations = itertools.product(*(axis.values for axis in self.axes))
        return [dict(zip(paths, values, strict=True)) for values in combinations]

    @property
    def described(self) -> dict[str, Any]:
        """The request as recorded in results.json."""
        return {
            "vary": {axis.path: "..".join(axis.values) if axis.is_range else list(axis.values) for axis in self.axes},
            "seeds": self.seeds,
            "search": self.search,
        }


@dataclass(frozen=True)
class SweepPoint:
    """A combination of settings, trained with every seed."""

    settings: dict[str, str]
    """{dotted path: value as given on the command line}"""
    runs: list[SmallRun]
    """One run per seed."""
    tokens: int
    """Token budget of each run."""
    tokenizers: set[str]
    """Checksums of the tokenizers of the validation data."""
    validation: dict[str, str]
    """{validation source: checksum of its manifest}"""


def read_axes(texts: Iterable[str]) -> list[Axis]:
    """Parses arguments such as 'a.b=1,2' and 'c=1e-4..1e-2'. Raises InputError listing all problems."""
    problems = Problems()
    axes = []
    for text in texts:
        path, equals, given = text.removeprefix("--").partition("=")
        values = tuple(dict.fromkeys(split_values(given)))
        ends = given.split("..")
        if not path or not equals or not all(values):
            problems.append(f"--vary {text}: must be a setting and its values, such as optim.learning_rate=1e-3,2e-3")
        elif path in [axis.path for axis in axes]:
            problems.append(f"--vary {path}: was passed twice; list all values in a single --vary")
        elif len(ends) == 2 and all(map(is_number_text, ends)):
            if parse_yaml(ends[0]) == parse_yaml(ends[1]):
                problems.append(f"--vary {text}: the ends of a range must differ")
            axes.append(Axis(path, tuple(sorted(ends, key=parse_yaml)), is_range=True))
        else:
            axes.append(Axis(path, values))
    problems.stop_if_any()
    return axes


def split_values(text: str) -> list[str]:
    """Splits at commas outside brackets: '1,[2,3],{a: 4, b: 5}' becomes ['1', '[2,3]', '{a: 4, b: 5}']."""
    values = [""]
    depth = 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]


def is_number_text(text: str) -> bool:
    try:
        return is_number(parse_yaml(text))
    except ValueError:
        return False


def request_problems(request: SweepRequest) -> Problems:
    """Lists problems with the command line itself."""
    problems = Problems()
    changed = {path for path, _ in request.changes}
    for axis in request.axes:
        path = axis.path
        if path == "output":
            problems.append("--vary output: output can't be varied, because each run gets its own folder in --output")
        if path == "seed" and request.seeds > 1:
            problems.append(f"--vary seed can't be combined with --seeds {request.seeds}; use only one of them")
        if path in changed:
            problems.append(f"--{path} can't be combined with --vary {path}; use only one of them")
        if axis.is_range and request.search is None:
            problems.append(
                f"--vary {path}={'..'.join(axis.values)}: a range requires --search N (the number of combinations to "
                "try); add it, or list the values"
            )
    if request.search is not None:
        if not any(axis.is_range for axis in request.axes):
            problems.append(
                f"--search {request.search}: requires a range, such as --vary optim.learning_rate=1e-4..1e-2"
            )
        elif find_spec("optuna") is None:
            problems.append(f"--search requires optuna, which isn't installed; run pip install {OPTUNA}")
    names = collections.Counter(run_name(request, settings) for settings in request.grid)
    problems += [
        f"--vary: several combinations would use the folder {name}; use shorter values"
        for name, count in names.items()
        if count > 1
    ]
    if problems.attempt(require_output, "--output", request.output) and holds_other_files(request.output):
        problems.append(f"--output {request.output}: contains other files; use another folder")
    return problems


def holds_other_files(folder: Path) -> bool:
    """Returns True if a folder contains files, but no sweep."""
    has_sweep = any((folder / "recipes").glob("*.json")) or read_json(folder / TRIALS_FILE)
    return folder.is_dir() and not has_sweep and any(not path.name.startswith(".") for path in folder.iterdir())


def run_name(request: SweepRequest, settings: Mapping[str, str]) -> str:
    """Returns a run's folder name without the seed, such as 'learning_rate=1e-3,tokens_per_step=16k'."""
    last = [path.rpartition(".")[2] for path in settings]
    parts = []
    for path, value in settings.items():
        short = path.rpartition(".")[2]
        value = request.labels.get(value, value)
        value = Path(value).stem if re.fullmatch(r"[\w./-]+\.(json|yaml)", value) else value
        value = re.sub(r"[^\w.+-]+", "_", value)[:LONGEST_VALUE_IN_NAME]
        parts.append(f"{short if last.count(short) == 1 else path}={value}")
    return ",".join(parts)


def config_of_run(config: RunConfig, request: SweepRequest, seed: int, name: str) -> RunConfig:
    """Returns one run's recipe, without uploads. Keeps one checkpoint unless checkpoint settings are overridden."""
    # With None, trackers name each run after its folder.
    tracking = {"group": config.tracking.group or request.output.name, "name": None}
    # A sweep recognizes finished runs by their exported model.
    kept = {"save_final": True}
    # With the recipe's own checkpoint settings, many runs could fill the disk.
    if not any(path.startswith("checkpoint") for path, _ in request.changes):
        kept |= {"keep_last": 1, "keep_best": 0, "keep_every": None, "mirror": None}
    update = {
        "output": request.output / "runs" / name,
        "seed": seed,
        "hub": Hub(),
        "tracking": config.tracking.model_copy(update=tracking),
        "checkpoint": config.checkpoint.model_copy(update=kept),
    }
    return config.model_copy(update=update)


def check_points(request: SweepRequest, points: Sequence[dict[str, str]]) -> list[SweepPoint]:
    """Derives the runs for each combination of settings. Raises InputError listing all distinct problems."""
    problems = Problems()
    say_stage(f"Checking {counted(len(points), 'setting')}")
    checked = [problems.attempt(check_point, request, settings) for settings in points]
    if len(set().union(*(point.tokenizers for point in checked if point))) > 1:
        problems.append("data: losses per token aren't comparable across tokenizers; sweep each tokenizer separately")
    problems.stop_if_any()
    refuse_changes(checked)
    return checked


def refuse_duplicates(points: Sequence[SweepPoint]) -> None:
    """Raises InputError if two combinations are the same recipe."""
    problems = {}
    first: dict[str, SweepPoint] = {}
    for point in points:
        same = first.setdefault(json.dumps(point.runs[0].settings, sort_keys=True), point)
        for path, value in point.settings.items():
            if value != same.settings[path]:
                problems[f"--vary {path}: {same.settings[path]} and {value} are the same value; list it once"] = None
    if problems:
        raise InputError(*problems)


def check_point(request: SweepRequest, settings: dict[str, str]) -> SweepPoint:
    """Derives the runs for a combination of settings, with consecutive seeds starting from the recipe's seed."""
    from pretrain.training.run_plan import derive
    from pretrain.training.validation import open_validation

    problems = Problems()
    config = read_run_config(request.recipe, [*request.changes, *settings.items()])
    name = run_name(request, settings)
    names = {seed: f"{name},seed={seed}" for seed in range(config.seed, config.seed + request.seeds)}
    # Without the seed if there is only one, or if it was trained before more seeds were added.
    if request.seeds == 1 or (request.output / "runs" / name).exists():
        names[config.seed] = name
    configs = [config_of_run(config, request, seed, name) for seed, name in names.items()]
    with redirect_stderr(io.StringIO()):  # otherwise, each point would print that its architecture is being tested
        plan = problems.attempt(derive, configs[0], ranks=1)
        validation = problems.attempt(open_validation, config.data)
    if validation == {}:
        problems.append("data.validation: no source has a validation split; a sweep needs one to compare losses")
    problems.stop_if_any()
    # Shards and models may be replaced at the same path.
    on_disk = {f"{key} on disk": value for key, value in plan.identity.items() if key.startswith(("model", "data."))}
    runs = [SmallRun(of_run.output.name, request.output, of_run, on_disk) for of_run in configs]
    tokenizers = {reader.manifest.tokenizer_sha256 for reader in validation.values()}
    sources = {name: reader.manifest.sha256 for name, reader in validation.items()}
    return SweepPoint(settings, runs, plan.total_tokens, tokenizers, sources)


def refuse_changes(points: Sequence[SweepPoint]) -> None:
    """Raises InputError if a run was started with other settings, another model or other shards."""
    defaults = {name: field.default for name, field in fields_of_config()}
    for run in itertools.chain.from_iterable(point.runs for point in points):
        recorded = {current_path(name): value for name, value in read_json(run.record).items()}
        before = {path: current_value(path, value) for path, value in recorded.items()}
        # Settings added in a newer version are ignored if they have their default value.
        now = {
            name: value
            for name, value in run.settings.items()
            if name in before or (name, value) not in defaults.items()
        }
        lines = [
            f"{run.output}: {name} was {shortened(json.dumps(was))}, but is now {shortened(json.dumps(given))}"
            for name, (was, given) in setting_differences([before, now]).items()
        ]
        if run.recipe.is_file() and lines:
            raise InputError(*lines[:MOST_DIFFERENCES], "run the original command, or use a different --output")


def cautions_of_sweep(request: SweepRequest, points: Sequence[SweepPoint]) -> list[str]:
    """Returns warnings about possible mistakes in a request. `points` is its grid."""
    said = []
    tokens = sorted({point.tokens for point in points})
    varied = [axis.path for axis in request.axes]
    sized = any(path.startswith(("model", "budget")) for path in varied)
    if not request.search and not sized and tokens[-1] > 1.02 * tokens[0]:
        said.append(
            f"the runs train on different numbers of tokens ({count_text(tokens[0])} to {count_text(tokens[-1])}), "
            "which also affects the losses; set --budget.tokens to train all runs on the same number"
        )
    if not sized and any(point.runs[0].config.budget.minutes for point in points):
        said.append(
            "budget.minutes may end the runs after different numbers of tokens, which also affects the losses; set "
            "--budget.minutes null to train all runs on the same number"
        )
    validated = {json.dumps(point.validation, sort_keys=True): point.validation for point in points}
    if len(validated) > 1:
        named = "; ".join(shortened(", ".join(sources)) for sources in validated.values())
        said.append(
            f"the runs use different validation data ({named}), so losses aren't comparable; set data.validation to "
            "use the same for all runs"
        )
    elif any(path.startswith(("data.sequence_length", "data.document_mask", "data.validation")) for path in varied):
        said.append("the varied settings also change the validation loss itself, so losses aren't comparable")
    return said
