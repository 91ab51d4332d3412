"""Builds the site's home page from the README, and the reference pages from the code.

This is an MkDocs hook (see mkdocs.yml). Events and run files are described here. The build fails if the code contains
an event that isn't described, or doesn't contain a described event or file.
"""

import ast
import inspect
import itertools
import json
import posixpath
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from pretrain import registry
from pretrain.config import ModelSource
from pretrain.data.sampling import Stream
from pretrain.data.transformations import Transformation
from pretrain.model.loss_terms import LossTerm, Seen, TermOptions
from pretrain.optim.learning_rate import Schedule
from pretrain.optim.optimizers import ModelShapes, OptimizerSpec
from pretrain.recipe import SECTIONS_LEFT_OUT, TABLES, choices_in, fields_of_config, parse_yaml
from pretrain.training.metrics import SHOWN
from pretrain.units import leaves
from pretrain_tools.preparation.documents import formats, records

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("train.py", "prepare_data.py", "evaluate.py", "plan.py", "runs.py", "publish.py")
PACKAGES = ("pretrain", "pretrain_tools")
EVENTS = {
    "start": "The run starts or resumes. Contains its settings, sizes and machine.",
    "train": "A logged step, every `logging.every_steps`. Speeds are averages since the previous event.",
    "validation": "The validation loss on one source.",
    "checkpoint": "A checkpoint is complete.",
    "evaluation": "Benchmark scores, or the loss from `evaluate.py` on shards.",
    "sample": "Text that the model generated during training.",
    "diagnostics": "Magnitudes per layer (`diagnostics.every_steps`).",
    "stage": "A curriculum stage begins.",
    "skip": "A gradient wasn't finite, so the step wasn't applied.",
    "spike": "The loss is far above its recent mean.",
    "divergence": "The loss has been rising for many steps.",
    "explosion": "The gradient norm is above `guard.alert_grad_norm`.",
    "rollback": "Training goes back to an earlier checkpoint.",
    "control": "A `runs.py` command was carried out.",
    "profile": "`--profile` recorded steps.",
    "mirror": "A checkpoint is complete on the mirror.",
    "fetch": "A checkpoint was fetched from the mirror.",
    "resume": "The run resumes from a checkpoint.",
    "branch": "The run starts from another run's checkpoint.",
    "export": "`final/` was compared with the trained model.",
    "publish": "A model was uploaded to the Hub, or the upload failed.",
    "warning": "A possible problem. Training continues.",
    "end": "The process ends. Contains the reason and the exit status.",
}
"""{event in metrics.jsonl: meaning}. The fields are read from the code."""
ONLY_SHOWN = {"duration", "total_steps"}
"""Names in console lines that aren't in the log."""
RUN_FILES = {
    "config.yaml": "all settings, with automatic values resolved",
    "model.json": "model config",
    "metrics.jsonl": "the [event log](events.md)",
    "train.log": "console output, without the progress line",
    "data.json": "data manifests: tokens, tokenizer, filters",
    "strategy.json": "the strategy and its sizes",
    "environment.json": "machine, packages, commit",
    "checkpoints": "[checkpoints](../checkpoints.md), and `LATEST` with the name of the newest",
    "final": "the finished model, a Hugging Face folder with its model card",
    "rollbacks.json": "the guard's rollbacks and the skipped samples",
    "evaluations": "logs and results of benchmarks run during training",
    "heartbeats": "one file per rank, rewritten every few seconds",
    "stacks-rank-": "stack traces from a rank that hung: `stacks-rank-*.txt`",
    "control": "requests from `runs.py`, and the responses",
    "publish": "log of uploads to the Hub",
    "profile": "recorded steps and the verdict",
    "mirror": "state of the thread that copies the run to the mirror",
    "extensions": "the run's extensions, named by their hashes",
    ".lock": "lock held by the training process",
    ".trackers.json": "the run's ID in each tracker",
    "plot.png": "curves, plotted by `runs.py plot`",
}
"""{file or folder in a run folder: contents}."""
TABLES_OF_NAMES = (
    "OPTIMIZERS", "SCHEDULES", "LOSS_TERMS", "TRANSFORMATIONS", "SAMPLERS", "FORMATS", "TASKS", "ARCHITECTURES",
    "TRACKERS",
)  # fmt: skip
NAMES = (
    OptimizerSpec, ModelShapes, Schedule, LossTerm, TermOptions, Seen, Transformation, Stream, records.Record,
    records.Reading, records.checked, formats.file_format, formats.read_whole,
)  # fmt: skip
"""Classes and functions that extensions use."""
SEARCH_BOOSTS = {
    **dict.fromkeys(
        ("own_text.md", "strategies.md", "own_loss.md", "input_formats.md", "survival.md", "failures.md"), 3
    ),
    "reference/commands.md": 0.5,
    "comparison.md": 0.5,
}
"""Pages that the search should rank higher or lower than their text alone would."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    pages = {
        "index.md": (ROOT / "README.md").read_text(),
        "reference/settings.md": settings_page(),
        "reference/commands.md": commands_page(),
        "reference/events.md": events_page(),
        "reference/run_files.md": run_files_page(),
        "reference/python.md": python_page(),
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to files that aren't on the site into plain text. Links in the README are relative to the root.

    Also makes the search rank the measurement pages last.
    """
    name = page.file.src_uri
    page.meta["search"] = {"boost": 0.2 if name.startswith("measurements_") else SEARCH_BOOSTS.get(name, 1)}
    if page.file.src_uri.startswith("reference/"):
        return markdown
    prefix = "" if page.file.src_uri == "index.md" else "docs/"

    def link(found: re.Match) -> str:
        mark, text, target = found.groups()
        path, hash_sign, anchor = target.partition("#")
        if target.startswith("http") or not path:
            return found[0]
        in_project = posixpath.normpath(prefix + path)
        if in_project == "README.md":
            return f"{mark}[{text}](index.md{hash_sign}{anchor})"
        if in_project.startswith("docs/"):
            return f"{mark}[{text}]({in_project.removeprefix('docs/')}{hash_sign}{anchor})"
        return text if text.startswith("`") else f"`{in_project}`" if text == path else text

    return LINK.sub(link, markdown)


def settings_page() -> str:
    """Lists every recipe setting with its type, default, description and an example from the recipes."""
    examples = examples_in_recipes()
    parts = [
        "# Settings\n\nAll recipe settings. On the command line, use a setting's path: "
        "`--optim.learning_rate 1e-3`. `k`, `M` and `B` are 10^3, 10^6 and 10^9, except that `k` is 1,024 in "
        "`sequence_length` and `tokens_per_step`.\n"
    ]
    section = ""
    for path, field in fields_of_config():
        home = path.partition(".")[0] if "." in path else "run"
        if home != section:
            section = home
            parts.append(f"\n## {section}\n")
        default = "required" if field.is_required() else f"default `{as_text(field.default)}`"
        if (parent := path.rpartition(".")[0]) in SECTIONS_LEFT_OUT:
            default += f" once `{parent}` is given"
        parts.append(f"\n### `{path}`\n\n{type_text(path, field.annotation)}, {default}.")
        if field.description:
            text = " ".join(field.description.split())
            parts.append(re.sub(r"docs/(\w+)\.md", link_with_title, text))
        if example := examples.get(path):
            parts.append(f"For example `{path}: {example[0]}` ({example[1]}).")
    return "\n\n".join(parts) + "\n"


def link_with_title(found: re.Match) -> str:
    """Replaces a page's file name with a link that shows the page's title."""
    title = (ROOT / found[0]).read_text().partition("\n")[0].removeprefix("# ")
    return f"[{title}](../{found[1]}.md)"


def as_text(value: Any) -> str:
    """Formats a value as in a recipe."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def type_text(path: str, annotation: Any) -> str:
    """Describes the values that a setting can have."""
    if choices := TABLES.get(path) or choices_in(annotation):
        return "One of " + ", ".join(f"`{choice}`" for choice in choices)
    text = kind_of(annotation)
    return text[:1].upper() + text[1:]


def kind_of(annotation: Any) -> str:
    """Describes a Python annotation: 'number or `auto`', 'list of strings'."""
    if get_origin(annotation) is Annotated:
        return kind_of(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(annotation))
    arguments = get_args(annotation)
    if get_origin(annotation) is list:
        return f"list of {kind_of(arguments[0])}s"
    if get_origin(annotation) is dict:
        return "mapping"
    if arguments:
        kinds = dict.fromkeys("`null`" if kind is type(None) else kind_of(kind) for kind in arguments)
        return " or ".join(kinds)
    words = {int: "whole number", float: "number", bool: "true or false", str: "string", Path: "path"}
    return words.get(annotation, "file, folder, Hub ID or mapping" if annotation is ModelSource else "mapping")


def examples_in_recipes() -> dict[str, tuple[str, str]]:
    """Returns {setting: (first value in recipes/, recipe)}."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        values = parse_yaml(path.read_bytes())
        for name, value in leaves(values).items():
            setting = re.sub(r"\.\d+(?=\.|$)", "[]", name)
            found.setdefault(setting, (as_text(value), f"recipes/{path.name}"))
    return found


def commands_page() -> str:
    """Shows each script's --help, except for the settings, which have their own page."""
    parts = ["# Commands\n"]
    for script in SCRIPTS:
        text = help_of(script)
        parts.append(f"## {script}\n\n```text\n{text.partition('Settings:')[0].strip()}\n```")
        for name in re.findall(r"^python runs\.py (\w+)", text, re.MULTILINE) if script == "runs.py" else ():
            parts.append(f"### runs.py {name}\n\n```text\n{help_of(script, name).strip()}\n```")
    return "\n\n".join(parts) + "\n"


def events_page() -> str:
    """Lists the events in metrics.jsonl with their fields. Raises ValueError if EVENTS and the code differ."""
    written = events_in_code()
    if written.keys() != EVENTS.keys():
        raise ValueError(f"docs/site.py: EVENTS and the code differ in {sorted(written.keys() ^ EVENTS.keys())}")
    parts = [
        "# The event log\n\n`metrics.jsonl` in the run folder contains one JSON object per line. `event` comes first "
        "and `time`, in Unix seconds, last. Non-finite numbers are `null`. Events may have more fields than "
        "listed here, for example from your loss terms. `python runs.py status` and `plot` read this file.\n",
        "| event | meaning | fields |\n|---|---|---|",
    ]
    for event, meaning in EVENTS.items():
        fields = ", ".join(f"`{name}`" for name in sorted(written[event]))
        parts[-1] += f"\n| `{event}` | {meaning} | {fields} |"
    return "\n".join(parts) + "\n"


def events_in_code() -> dict[str, set[str]]:
    """Returns {event: field names} from calls that write an event and from what the console shows."""
    functions: list[ast.FunctionDef] = []
    figures: dict[str, dict[str, set[str]]] = {}  # {function: {its class or module: keys that it returns}}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for owner in ast.walk(ast.parse(path.read_text())):
            for node in ast.iter_child_nodes(owner):
                if isinstance(node, ast.FunctionDef):
                    functions.append(node)
                    if node.returns is not None and ast.unparse(node.returns).startswith("dict[str"):
                        name = getattr(owner, "name", path.stem).lower()
                        figures.setdefault(node.name, {}).update(
                            {name: keys_in(node, {}), path.stem: keys_in(node, {})}
                        )
    found: dict[str, set[str]] = {}
    for event, shown in SHOWN.items():
        fields = {name for name in re.findall(r"\{(\w+)", shown) if not name.endswith("_text")}
        found[event] = fields - ONLY_SHOWN
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and (event := event_of(node)):
                named = {keyword.arg for keyword in node.keywords if keyword.arg}
                has_more = any(keyword.arg is None for keyword in node.keywords)
                found.setdefault(event, set()).update(named | (keys_in(function, figures) if has_more else set()))
            if isinstance(node, ast.Dict) and is_name(event := dict(pairs_in(node)).get("event")):
                found.setdefault(event.value, set()).update(key for key, _ in pairs_in(node))
    return {event: fields - {"time", "event"} for event, fields in found.items()}


def pairs_in(node: ast.Dict) -> list[tuple[str, ast.expr]]:
    return [(key.value, value) for key, value in zip(node.keys, node.values, strict=True) if is_name(key)]


def keys_in(function: ast.FunctionDef, figures: Mapping[str, Mapping[str, set[str]]]) -> set[str]:
    """Returns the dictionary keys in a function, including those unpacked from calls to functions in `figures`.

    Functions with the same name are distinguished by their class or module: throughput.read().
    """
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Dict):
            found |= {key for key, _ in pairs_in(node)}
            unpacked = [value for key, value in zip(node.keys, node.values, strict=True) if key is None]
            for call in [each for value in unpacked for each in ast.walk(value) if isinstance(each, ast.Call)]:
                owners = figures.get(getattr(call.func, "attr", ""), {})
                receiver = getattr(call.func, "value", None)
                found |= owners.get(getattr(receiver, "attr", getattr(receiver, "id", "")), set())
    return found


def event_of(call: ast.Call) -> str | None:
    """Returns the event that a call like log.write("train", ...) writes, or None for other calls."""
    first = call.args[0] if call.args else None
    return first.value if getattr(call.func, "attr", "") == "write" and call.keywords and is_name(first) else None


def is_name(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier()


def run_files_page() -> str:
    """Lists the files in a run folder. Raises ValueError for a file that the code doesn't mention."""
    code = "".join(path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    if gone := [name for name in RUN_FILES if not re.search(rf"[\"/]{re.escape(name)}", code)]:
        raise ValueError(f"docs/site.py: the code doesn't contain these RUN_FILES: {gone}")
    rows = "".join(f"\n| `{name}` | {contents} |" for name, contents in RUN_FILES.items())
    return f"# Files of a run\n\nThe run folder (`output`) contains:\n\n| | |\n|---|---|{rows}\n"


def python_page() -> str:
    """Lists the tables that extensions register in, and the classes and functions that they use."""
    parts = [
        "# Python names for extensions\n\nA file listed in `extensions` registers classes and functions in these "
        "tables in `pretrain.registry`. To get started, see [Extensions](../own_ideas.md).\n",
        "| table | entries | built in |\n|---|---|---|",
    ]
    meanings = documented(inspect.getsource(registry))
    for name in TABLES_OF_NAMES:
        built_in = ", ".join(f"`{entry}`" for entry in getattr(registry, name))
        parts[-1] += f"\n| `{name}` | {meanings.get(name, '')} | {built_in} |"
    for entry in NAMES:
        parts.append(f"\n## {entry.__name__}\n\n`{entry.__module__}.{entry.__name__}`\n\n{plain_doc(entry)}")
        if inspect.isclass(entry):
            parts.append(members(entry))
    return "\n".join(parts) + "\n"


def members(entry: type) -> str:
    """Lists a class's fields and public methods with their docstrings."""
    meanings = documented(inspect.getsource(entry))
    fields = [f"- `{name}`: {meanings.get(name, '')}".rstrip(": ") for name in entry.__annotations__ if name[0] != "_"]
    methods = []
    for name, method in vars(entry).items():
        function = inspect.unwrap(getattr(method, "__func__", method))
        if inspect.isfunction(function) and function.__doc__ and (name[0] != "_" or name == "__call__"):
            given = inspect.signature(function).parameters
            given = ", ".join(each for each in given if each not in ("self", "cls"))
            methods.append(f"- `{name}({given})`: {' '.join(plain_doc(function).split())}")
    lines = [*fields, *methods]
    return "\n" + "\n".join(lines) if lines else ""


def documented(source: str) -> dict[str, str]:
    """Returns {name: docstring below its assignment} from the source of a module or class."""
    tree = ast.parse(source)
    body = tree.body[0].body if len(tree.body) == 1 and isinstance(tree.body[0], ast.ClassDef) else tree.body
    found = {}
    for node, following in itertools.pairwise(body):
        target = getattr(node, "target", None) or next(iter(getattr(node, "targets", [])), None)
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(target, ast.Name) and is_text:
            found[target.id] = " ".join(str(following.value.value).split())
    return found


def plain_doc(entry: Any) -> str:
    """Returns a docstring up to its Args section, with each paragraph on one line."""
    text = (inspect.getdoc(entry) or "").partition("\nArgs:")[0]
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n")).strip()


def help_of(*command: str) -> str:
    """Returns a command's --help output, 110 characters wide."""
    environment: Mapping[str, str] = {"COLUMNS": "110", "PATH": "/usr/bin:/bin", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, *command, "--help"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout
