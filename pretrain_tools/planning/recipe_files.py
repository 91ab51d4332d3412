"""Places of the recipes that plan.py and train.py --text write. Imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path

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
