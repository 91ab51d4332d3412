"""Writes the model card: README.md with Hub metadata, and a loss plot.

The metadata follows https://github.com/huggingface/hub-docs/blob/main/modelcard.md, with results in model-index
format. The text comes from templates/, which are also used by the bill of materials and the provenance.
"""

import sys
from functools import cache
from pathlib import Path, PurePath
from typing import Any

import jinja2
import yaml

from pretrain.data.data_record import is_hub_id, public_name
from pretrain.files import CARD_FILE, PICTURE_FILE
from pretrain.units import bytes_text, count_text, counted, duration_text
from pretrain_tools.publishing.facts import SHAPES, Facts, read_facts
from pretrain_tools.runs.history import Score
from pretrain_tools.runs.plots import Line, Panel, color_of, draw_panel, points_of

TAGS = ["pretraining", "base-model", "groundwork"]
CARD_MEASURES = ("loss", "perplexity", "bits_per_byte")
"""Validation metrics in the card, the bill of materials and the provenance."""


def write_card(facts: Facts, folder: Path) -> None:
    """Writes README.md and, if the run has logged losses, loss.png to a model folder."""
    has_picture = plot_losses(facts, folder / PICTURE_FILE)
    (folder / CARD_FILE).write_text(model_card(facts, has_picture=has_picture), encoding="utf-8")


def model_card(facts: Facts, *, has_picture: bool) -> str:
    """Renders the model card as Markdown with YAML metadata."""
    text = yaml.safe_dump(without_folders(facts.config), sort_keys=False, allow_unicode=True).rstrip()
    return render(
        "card.md.j2",
        facts=facts,
        metadata=metadata(facts),
        shapes=SHAPES,
        scores=sorted(facts.scores, key=marked_name),
        has_picture=has_picture,
        recipe=text if facts.config else "",
    )


def render(template: str, **values: Any) -> str:
    """Renders a template from templates/."""
    return environment().get_template(template).render(values)


def statements(name: str, facts: Facts) -> list[str]:
    """Renders a macro from templates/statements.j2 and returns its lines without list dashes."""
    macro = getattr(environment().get_template("statements.j2").module, name)
    return [line.removeprefix("- ") for line in str(macro(facts)).splitlines()]


@cache
def environment() -> jinja2.Environment:
    """Returns the Jinja environment, in which undefined names raise UndefinedError."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates", encoding="utf-8"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    # `count` overrides Jinja's built-in filter.
    templates.filters.update(
        bytes=bytes_text,
        cell=cell,
        count=count_text,
        counted=counted,
        duration=duration_text,
        marked_name=marked_name,
        number=number,
        public_name=public_name,
        score_name=score_name,
    )
    templates.tests["hub_id"] = is_hub_id
    return templates


def number(value: Any, form: str = ",") -> str:
    """Formats a number. Returns '' for None, and strings unchanged."""
    return "" if value is None else value if isinstance(value, str) else format(value, form)


def cell(value: Any) -> str:
    """Formats a value for a Markdown table cell."""
    return number(value, "").replace("|", "\\|")


def metadata(facts: Facts) -> str:
    """Returns the YAML metadata, validated by huggingface_hub."""
    from huggingface_hub import ModelCardData

    base = facts.model_source
    datasets = dict.fromkeys(name for source in facts.sources for name in source.hub_datasets)
    results = eval_results(facts)
    data = ModelCardData(
        language=list(facts.offer.languages) or None,
        license=facts.offer.license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=TAGS,
        datasets=list(datasets) or None,
        base_model=base.partition("@")[0] if facts.is_continued and is_hub_id(base) else None,
        model_name=facts.title if results else None,
        eval_results=results or None,
    )
    return data.to_yaml(line_break="\n")


def eval_results(facts: Facts) -> list[Any]:
    """Converts scores on full tasks to huggingface_hub.EvalResult objects."""
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type="text-generation",
            task_name="Text generation",
            dataset_name=score_name(score),
            dataset_type=score.task,
            metric_type=score.metric.partition(",")[0],
            metric_name=score.metric.replace("_", " "),
            metric_value=round(score.value, 6),
        )
        for score in facts.scores
        if score.is_whole
    ]


def score_name(score: Score) -> str:
    """Returns the task name and number of shots, such as 'hellaswag (0-shot)', or the source and split."""
    if score.split:
        return f"{score.task} {score.split}"
    return score.task if score.few_shots is None else f"{score.task} ({score.few_shots}-shot)"


def marked_name(score: Score) -> str:
    """Returns the score's name, with an asterisk if only part of the task was evaluated."""
    return score_name(score) + ("" if score.is_whole else " \\*")


def without_folders(value: Any) -> Any:
    """Replaces absolute and home paths with their last component, because paths may reveal user or machine names."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    if isinstance(value, str) and (value.startswith("~") or {"/", "//", ".."} & {*PurePath(value).parts}):
        return PurePath(value).name
    return value


def plot_losses(facts: Facts, path: Path) -> bool:
    """Plots training and validation loss as a PNG. Returns False with fewer than two points."""
    named = {"training": facts.history.of("train")}
    named |= {f"validation, {source}": events for source, events in facts.history.validation().items()}
    points = {name: points_of(events, "step", "loss") for name, events in named.items()}
    if points["training"].shape[1] < 2:
        return False
    from matplotlib.figure import Figure

    lines = [Line(of_name, color_of(n), label=name) for n, (name, of_name) in enumerate(points.items())]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    draw_panel(figure.subplots(), Panel(f"{facts.run_name}: loss (nats per token)", lines))
    # Omit the software version, so that the file is reproducible and isn't uploaded twice.
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return True


if __name__ == "__main__":  # started by a run after the export, with arguments RUN FOLDER
    model_folder = Path(sys.argv[2])
    write_card(read_facts(Path(sys.argv[1]), model_folder=model_folder), model_folder)
