"""Recipes that plan.py and train.py --text write, and plan.py's sentences, from templates/. Imports nothing heavy."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.files import write_durably
from pretrain.gpus import GIB
from pretrain.units import bytes_text, count_text, duration_text

if TYPE_CHECKING:
    import jinja2


MADE_BY = "# Made by: "
"""The beginning of the first line of a recipe; the command follows."""


@dataclass(frozen=True)
class RecipePlace:
    """Paths of a recipe and its parts: recipes/mine.yaml, model_configs/mine.json, data/mine, runs/mine."""

    recipe: Path
    shards: Path
    """The data: as given, else to be prepared there."""
    output: Path
    """The run's folder."""
    tokenizer: str | None = None
    """The tokenizer for the command that prepares the data; None: not named."""
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
    """Fills in a file of templates/. Raises UndefinedError for a name that the template mistypes."""
    return _templates().get_template(template).render(values)


def lines_of(template: str, macro: str, *arguments: Any, **names: Any) -> list[str]:
    """Calls a macro of a file of templates/; returns its lines. names: what the file uses beside the arguments."""
    module = _templates().get_template(template).make_module(names)
    return str(getattr(module, macro)(*arguments)).splitlines()


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
    # count replaces Jinja's own filter, an alias of length. A JSON string is a YAML string, whatever its characters.
    templates.filters.update(
        bytes=bytes_text,
        count=count_text,
        duration=duration_text,
        gib=lambda value, form: format(value / GIB, form),
        number=lambda value, form=",": format(value, form),
        quoted=lambda value: json.dumps(str(value)),
    )
    return templates
