"""Builds what the site has beside the pages: its first page from the README, and the reference from the code.

A hook of mkdocs (mkdocs.yml). Nothing of the reference is written by hand, so nothing of it can be out of date.
"""

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

from pretrain.config import ModelSource
from pretrain.recipe import SECTIONS_LEFT_OUT, TABLES, as_plain, choices_in, fields_of_config, leaves, parse_yaml

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("train.py", "prepare_data.py", "evaluate.py", "plan.py", "runs.py", "publish.py")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    pages = {
        "index.md": (ROOT / "README.md").read_text(),
        "reference/settings.md": settings_page(),
        "reference/commands.md": commands_page(),
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to files that are not on the site into plain text; links of the README begin at its folder."""
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
    """Lists every setting of a recipe with its type, default, meaning and an example from the recipes."""
    examples = examples_in_recipes()
    parts = [
        "# Settings\n\nEvery setting of a recipe. On the command line each is given by its path: "
        "`--optim.learning_rate 1e-3`. `k`, `M` and `B` are 10^3, 10^6 and 10^9, except that `k` is 1,024 in "
        "`sequence_length` and `tokens_per_step`.\n"
    ]
    section = ""
    for path, field in fields_of_config():
        home = path.partition(".")[0] if "." in path else "run"
        if home != section:
            section = home
            parts.append(f"\n## {section}\n")
        default = "required" if field.is_required() else f"default `{as_text(as_plain(field.default))}`"
        if (parent := path.rpartition(".")[0]) in SECTIONS_LEFT_OUT:
            default += f" once `{parent}` is given"
        parts.append(f"\n### `{path}`\n\n{type_text(path, field.annotation)}, {default}.")
        if field.description:
            text = " ".join(field.description.split())
            parts.append(re.sub(r"docs/(\w+)\.md", r"[\1](../\1.md)", text))
        if example := examples.get(path):
            parts.append(f"For example `{path}: {example[0]}` ({example[1]}).")
    return "\n\n".join(parts) + "\n"


def as_text(value: Any) -> str:
    """Returns a value as a recipe has it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def type_text(path: str, annotation: Any) -> str:
    """Returns the values that a setting takes, in words."""
    if choices := TABLES.get(path) or choices_in(annotation):
        return "One of " + ", ".join(f"`{choice}`" for choice in choices)
    text = kind_of(annotation)
    return text[:1].upper() + text[1:]


def kind_of(annotation: Any) -> str:
    """Returns a Python annotation in words: 'number or `auto`', 'list of texts'."""
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
    words = {int: "whole number", float: "number", bool: "true or false", str: "text", Path: "path"}
    return words.get(annotation, "file, folder, Hub id or mapping" if annotation is ModelSource else "mapping")


def examples_in_recipes() -> dict[str, tuple[str, str]]:
    """Returns {setting: (its first value in recipes/, the recipe)}."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        values = parse_yaml(path.read_bytes())
        for name, value in leaves(values).items():
            setting = re.sub(r"\.\d+(?=\.|$)", "[]", name)
            found.setdefault(setting, (as_text(value), f"recipes/{path.name}"))
    return found


def commands_page() -> str:
    """Shows what each script's --help prints, but for the settings, which have their own page."""
    parts = ["# Commands\n"]
    for script in SCRIPTS:
        text = help_of(script)
        parts.append(f"## {script}\n\n```text\n{text.partition('Settings:')[0].strip()}\n```")
        for name in re.findall(r"^    (\w+)", text, re.MULTILINE) if script == "runs.py" else ():
            parts.append(f"### runs.py {name}\n\n```text\n{help_of(script, name).strip()}\n```")
    return "\n\n".join(parts) + "\n"


def help_of(*command: str) -> str:
    """Returns what a command prints for --help, at a width of 110 characters."""
    environment: Mapping[str, str] = {"COLUMNS": "110", "PATH": "/usr/bin:/bin", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, *command, "--help"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout
