"""Places and text of the recipes that plan.py and train.py --text write. Imports nothing heavy."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.files import write_durably

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


def recipe_text(template: str, **values: Any) -> str:
    """Fills in a file of templates/. A name that the template mistypes raises UndefinedError."""
    import jinja2

    folder = Path(__file__).parent / "templates"
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder, encoding="utf-8"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    # A JSON string is a YAML string, whatever characters a path or a prompt has.
    templates.filters["quoted"] = lambda value: json.dumps(str(value))
    templates.filters["short"] = lambda value: f"{value:g}"
    return templates.get_template(template).render(values)
