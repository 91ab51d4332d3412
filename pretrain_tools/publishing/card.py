"""Writes the model card: README.md with the Hub's metadata, and a plot of the loss.

The metadata follows https://github.com/huggingface/hub-docs/blob/main/modelcard.md, with results in model-index
format. The text is in templates/, including the statements repeated in the bill of materials and the provenance.
"""

import sys
from functools import cache
from pathlib import Path, PurePath
from typing import Any

import jinja2
import yaml

from pretrain.data.data_record import is_hub_id, public_name
from pretrain.files import CARD_FILE, PICTURE_FILE
from pretrain.units import JOULES_PER_KWH, bytes_text, count_text, duration_text, energy_text
from pretrain_tools.publishing.facts import SHAPES, Facts, read_facts
from pretrain_tools.runs.curves import curves_of
from pretrain_tools.runs.history import Score
from pretrain_tools.runs.plots import Line, Panel, color_of, draw_panel, points_of

TAGS = ("pretraining", "base-model", "groundwork")
METRIC_TYPES = {"acc": "accuracy", "acc_norm": "accuracy", "exact_match": "exact_match", "perplexity": "perplexity"}
"""{measure: the Hub's metric ID}. Other measures keep their names."""
CARD_MEASURES = ("loss", "perplexity", "bits_per_byte")
"""Validation measures in the card, the bill of materials and the provenance."""
CPUS = ("x86_64", "AMD64", "aarch64", "arm64", "arm", "i386")
"""Names of CPU architectures in operating systems, which are the device names of runs without a GPU."""


def write_card(facts: Facts, folder: Path) -> None:
    """Writes README.md and, if the run's log has losses, loss.png into a model folder of the run."""
    has_picture = plot_losses(facts, folder / PICTURE_FILE)
    (folder / CARD_FILE).write_text(model_card(facts, has_picture=has_picture), encoding="utf-8")


def model_card(facts: Facts, *, has_picture: bool) -> str:
    """Renders the whole card as Markdown with YAML metadata at the top."""
    text = yaml.safe_dump(without_folders(facts.config), sort_keys=False, allow_unicode=True).rstrip()
    grid = facts.setting("energy.carbon_grams_per_kwh")
    joules = facts.history.joules
    return render(
        "card.md.j2",
        facts=facts,
        metadata=metadata(facts),
        shapes=SHAPES,
        hardware=hardware_text(facts),
        energy=None if joules is None else energy_text(joules, facts.start.get("energy"), grid),
        scores=sorted(facts.scores, key=marked_name),
        has_picture=has_picture,
        recipe=text if facts.config else "",
    )


def render(template: str, **values: Any) -> str:
    """Renders a file in templates/."""
    return environment().get_template(template).render(values)


def statements(name: str, facts: Facts) -> list[str]:
    """Returns the lines of a macro in templates/statements.j2, without the dashes of a list."""
    macro = getattr(environment().get_template("statements.j2").module, name)
    return [line.removeprefix("- ") for line in str(macro(facts)).splitlines()]


@cache
def environment() -> jinja2.Environment:
    """Returns the environment of the templates. An unknown name in a template raises UndefinedError."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates", encoding="utf-8"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    # `count` replaces Jinja's own filter, an alias of length.
    templates.filters.update(
        bytes=bytes_text,
        cell=cell,
        count=count_text,
        duration=duration_text,
        marked_name=marked_name,
        number=number,
        public_name=public_name,
    )
    return templates


def number(value: Any, form: str = ",") -> str:
    """Formats a number. None becomes '', and text stays unchanged."""
    return "" if value is None else value if isinstance(value, str) else format(value, form)


def cell(value: Any) -> str:
    """Formats a value for a cell of a Markdown table."""
    return number(value, "").replace("|", "\\|")


def metadata(facts: Facts) -> str:
    """Returns the YAML at the top, which huggingface_hub's own classes check."""
    from huggingface_hub import ModelCardData

    base = facts.model_source
    datasets = dict.fromkeys(name for source in facts.sources for name in source.hub_datasets)
    results = eval_results(facts)
    data = ModelCardData(
        language=list(facts.offer.languages) or None,
        license=facts.offer.license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=list(TAGS),
        datasets=list(datasets) or None,
        base_model=base.partition("@")[0] if facts.is_continued and is_hub_id(base) else None,
        model_name=facts.title if results else None,
        eval_results=results or None,
        co2_eq_emissions=emissions(facts),
    )
    return data.to_yaml(line_break="\n")


def emissions(facts: Facts) -> dict[str, Any] | None:
    """Returns the Hub's metadata on CO2; None if energy or grid are unknown."""
    joules = facts.history.joules
    grams = facts.setting("energy.carbon_grams_per_kwh")
    if joules is None or grams is None:
        return None
    return {
        "emissions": round(joules / JOULES_PER_KWH * grams, 3),
        # The Hub shows this text next to the figure.
        "source": f"energy {facts.start.get('energy')}; {grams:g} g of CO2 per kWh",
        "training_type": "pre-training",
        "hardware_used": hardware_text(facts),
    }


def eval_results(facts: Facts) -> list[Any]:
    """Returns the scores over whole tasks as huggingface_hub.EvalResult, for the model-index."""
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type="text-generation",
            task_name="Text generation",
            dataset_name=score_name(score),
            dataset_type=score.task,
            metric_type=METRIC_TYPES.get(name := score.metric.partition(",")[0], name),
            metric_name=score.metric.replace("_", " "),
            metric_value=round(score.value, 6),
        )
        for score in facts.scores
        if score.is_whole
    ]


def hardware_text(facts: Facts) -> str | None:
    """Returns '8 x NVIDIA H100', or 'CPU (x86_64, 2 cores)'."""
    device = facts.environment.get("device")
    ranks = facts.strategy.get("ranks") or 1
    if device in CPUS:
        text = f"CPU ({device}, {facts.environment.get('cores', '?')} cores)"
        return f"{text}, {ranks} processes" if ranks > 1 else text
    return f"{ranks} x {device}" if ranks > 1 and device else device


def score_name(score: Score) -> str:
    """Returns the task with its number of examples, such as 'hellaswag (0-shot)'."""
    return score.task if score.few_shots is None else f"{score.task} ({score.few_shots}-shot)"


def marked_name(score: Score) -> str:
    """Returns the name, with a star for a score over part of a task."""
    return score_name(score) + ("" if score.is_whole else " \\*")


def without_folders(value: Any) -> Any:
    """Copies values, shortening absolute and home paths to their last part, because they name users and machines."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    if isinstance(value, str) and (value.startswith("~") or PurePath(value).is_absolute() or ".." in value):
        return PurePath(value).name
    return value


def plot_losses(facts: Facts, path: Path) -> bool:
    """Draws training and validation loss against tokens as a PNG. Returns False for fewer than two points."""
    curves = curves_of(facts.history)
    if points_of(curves.train, "tokens", "loss").shape[1] < 2:
        return False
    from matplotlib.figure import Figure

    named = {"training": curves.train}
    named |= {f"validation, {source}": columns for source, columns in curves.validation.items()}
    lines = [Line(color_of(n), columns, "loss", label=name) for n, (name, columns) in enumerate(named.items())]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    draw_panel(figure.subplots(), Panel(f"{facts.run_name}: loss (nats per token)", lines, "tokens"))
    # Without date and version, the same run gives the same file, which isn't uploaded twice.
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return True


if __name__ == "__main__":  # a run starts this after exporting its model, with arguments RUN FOLDER
    model_folder = Path(sys.argv[2])
    write_card(read_facts(Path(sys.argv[1]), model_folder=model_folder), model_folder)
