"""Renders recipes and plan.py's output from templates/. Importing this module must stay fast."""

import math
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pretrain.files import write_durably
from pretrain.gpus import GIB
from pretrain.units import bytes_text, count_text, duration_text

if TYPE_CHECKING:
    import jinja2


MADE_BY = "# Made by: "
"""Prefix of the command in a recipe's first line."""


@dataclass(frozen=True)
class RecipePlace:
    """Paths of a recipe and its files: recipes/mine.yaml, model_configs/mine.json, data/mine, runs/mine."""

    recipe: Path
    shards: Path
    """Existing shards, or the folder in which to prepare them."""
    output: Path
    """The run folder."""
    tokenizer: str | None = None
    """The tokenizer to use in the preparation command, if given."""
    is_prepared: bool = False

    @property
    def model(self) -> Path:
        return Path("model_configs", f"{self.recipe.stem}.json")

    def write(self, model: str, recipe: str) -> None:
        """Writes the model's JSON, then the recipe."""
        for path, text in ((self.model, model), (self.recipe, recipe)):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, text)


def render(template: str, **values: Any) -> str:
    """Renders a template. Raises UndefinedError for undefined names."""
    return _templates().get_template(template).render(values)


def lines_of(template: str, macro: str, *arguments: Any, **names: Any) -> list[str]:
    """Returns the lines of a rendered macro. names: global variables of its template."""
    module = _templates().get_template(template).make_module(names)
    return str(getattr(module, macro)(*arguments)).splitlines()


def as_comment(lines: list[str]) -> str:
    """Formats lines as a recipe's comment. Continuation lines are indented."""
    return "\n".join(textwrap.fill(line, 117, initial_indent="# ", subsequent_indent="#   ") for line in lines)


@cache
def _templates() -> "jinja2.Environment":
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates", encoding="utf-8"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    # `count` overrides Jinja's alias for `length`.
    templates.filters.update(
        bytes=bytes_text,
        count=count_text,
        duration=duration_text,
        gib=lambda value, form: format(value / GIB, form),
        number=lambda value, form=",": format(value, form),
        quoted=lambda value: yaml.safe_dump(str(value), default_style='"', width=math.inf).rstrip("\n"),
    )
    return templates
