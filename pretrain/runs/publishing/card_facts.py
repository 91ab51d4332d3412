"""What a model card states, read from the run's folder alone, so that any run can be described at any time.

A piece that a run does not have (a data folder since moved, no evaluation) is left out; nothing is guessed.
"""

import statistics
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from pretrain.data.manifest import MANIFEST_FILE
from pretrain.runs.history import current_events, read_metrics
from pretrain.runs.run_folder import METRICS_FILE, read_json, read_state
from pretrain.runs.run_folder import read_config
from pretrain.units import count_text

DATA_FILE = "data.json"
"""What the run kept of its shards' manifests when it began (training/run_records.py), by folder as the recipe names
it."""
NOT_METRICS = ("few_shots", "samples", "version", "is_part")
ABOUT_EVALUATION = ("event", "step", "tokens", "model", "source", "task", "split", "time", "limit", "evaluated_tokens")
"""Keys of an evaluation event that say what was measured, beside the measures."""


@dataclass(frozen=True)
class DataSource:
    """One folder of shards in the mixture. Counts are of its training split; None where nobody kept them."""

    name: str
    weight: float
    """Share of the sequences of its stage, 0 to 1."""
    stage: str | None
    """Which stage of a curriculum; None in a run of one mixture."""
    max_epochs: float | None
    tokens: int | None = None
    documents: int | None = None
    text_bytes: int | None = None
    tokenizer: str | None = None
    vocabulary_size: int | None = None
    hub_datasets: tuple[str, ...] = ()


@dataclass(frozen=True)
class CardScore:
    """One number of an evaluation of the model that the card describes."""

    task: str
    metric: str
    """As the harness names it: acc, or exact_match,strict-match; loss, perplexity, bits_per_byte for shards."""
    value: float
    standard_error: float | None = None
    few_shots: int | None = None
    is_whole: bool = True
    """Over all documents of the task: a score over a few of them is no result."""


@dataclass(frozen=True)
class CardFacts:
    """Everything known of one model of a run."""

    run_name: str
    config: dict[str, Any]
    """config.yaml as it stands."""
    model: dict[str, Any]
    """config.json of the model."""
    strategy: dict[str, Any]
    environment: dict[str, Any]
    events: list[dict[str, Any]] = field(repr=False)
    """Lines of metrics.jsonl up to `step`."""
    step: int
    total_steps: int | None
    sources: tuple[DataSource, ...] = ()
    scores: tuple[CardScore, ...] = ()
    lineage: tuple[dict[str, Any], ...] = ()
    """As in `RunState`: the runs that this one branched from."""

    @property
    def tokens(self) -> int | None:
        """Training tokens seen."""
        return next((event["tokens"] for event in reversed(self.events_named("train"))), None)

    @property
    def parameters(self) -> int | None:
        return next((event.get("parameters") for event in self.events_named("start")), None)

    @property
    def active_parameters(self) -> int | None:
        """Those that a token meets, where they are fewer: in a mixture of experts."""
        active = next((event.get("active_parameters") for event in self.events_named("start")), None)
        return active if active != self.parameters else None

    @property
    def tokens_per_second(self) -> float | None:
        """Median over the log lines: restarts and pauses do not count."""
        return self._median("tokens_per_second")

    @property
    def mfu(self) -> float | None:
        """Median part of the peak arithmetic rate."""
        return self._median("mfu")

    @property
    def validation(self) -> dict[str, dict[str, Any]]:
        """{source: its last validation up to the step}"""
        return {event["source"]: event for event in self.events_named("validation")}

    def events_named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("event") == name]

    def _median(self, name: str) -> float | None:
        values = [event[name] for event in self.events_named("train") if event.get(name)]
        return statistics.median(values) if values else None


def read_card_facts(run: Path, step: int | None = None, model_folder: Path | None = None) -> CardFacts:
    """The facts of a run's model at `step`; None: at the last step that the run's log has.

    Args:
        model_folder: where the model's config.json is; None: the run's model.json.
    """
    events = read_events(run)
    steps = [event["step"] for event in events if event.get("event") in ("train", "checkpoint") and "step" in event]
    at = max(steps, default=0) if step is None else step
    config = read_config(run)
    model = read_json(model_folder / "config.json") if model_folder else {}
    state = (read_state(run / "checkpoints" / f"step-{at:08d}") or {}).get("state") or {}
    starts = [event["total_steps"] for event in events if event.get("event") == "start" and "total_steps" in event]
    return CardFacts(
        run_name=run.resolve().name,
        config=config,
        model=model or read_json(run / "model.json"),
        strategy=read_json(run / "strategy.json"),
        environment=read_json(run / "environment.json"),
        events=[event for event in events if (event.get("to_step") or event.get("step") or 0) <= at],
        step=at,
        total_steps=starts[-1] if starts else None,
        sources=tuple(read_sources(config, read_json(run / DATA_FILE))),
        scores=tuple(read_scores(run, events, at)),
        lineage=tuple(state.get("lineage") or ()),
    )


def read_events(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that the model is made of, in order; [] where there is no such file."""
    return current_events(read_metrics(run)) if (run / METRICS_FILE).is_file() else []


def read_sources(config: dict[str, Any], records: dict[str, Any]) -> list[DataSource]:
    """The sources of every stage, in the recipe's order.

    records: {folder: what the run kept of its manifest}; of a folder that is not in it, the manifest itself is read.
    """
    data = config.get("data") or {}
    stages = data.get("stages") or [{"train": data.get("train") or []}]
    sources, start = [], 0.0
    for stage in stages:
        end = float(stage.get("until") or 1)
        total = sum(float(source.get("weight", 1)) for source in stage["train"]) or 1.0
        name = f"{start:.0%} to {end:.0%}" if len(stages) > 1 else None
        for source in stage["train"]:
            share = float(source.get("weight", 1)) / total
            record = records.get(str(source["shards"])) or read_json(Path(source["shards"]) / MANIFEST_FILE)
            sources.append(describe_source(source, record, share, name))
        start = end
    return sources


def describe_source(source: dict[str, Any], record: dict[str, Any], weight: float, stage: str | None) -> DataSource:
    """One source of the recipe, with what is known of it."""
    totals = (record.get("totals") or {}).get("train") or {}
    return DataSource(
        Path(source["shards"]).name,
        weight,
        stage,
        source.get("max_epochs"),
        tokens=totals.get("tokens"),
        documents=totals.get("documents"),
        text_bytes=totals.get("text_bytes"),
        # A tokenizer may have been given by its path, which is nobody's business.
        tokenizer=public_name((record.get("tokenizer") or {}).get("name")),
        vocabulary_size=record.get("vocabulary_size"),
        hub_datasets=tuple(record.get("hub_datasets") or hub_datasets_of(record)),
    )


def hub_datasets_of(manifest: dict[str, Any]) -> list[str]:
    """Ids of the Hub datasets that shards were made from: sources that have a split and an owner."""
    found = [
        source["path"]
        for source in manifest.get("sources") or []
        if isinstance(source, dict) and "split" in source and is_hub_id(source.get("path"))
    ]
    return list(dict.fromkeys(found))


def is_hub_id(name: Any) -> bool:
    """owner/name, and nothing of that name on this machine."""
    return (
        isinstance(name, str) and len(PurePath(name).parts) == 2 and name[:1] not in "./~" and not Path(name).exists()
    )


def public_name(path: str | None) -> str | None:
    """A Hub id whole; of a path on this machine the last part."""
    if not path:
        return None
    return path if is_hub_id(path) else PurePath(path).name


def read_scores(run: Path, events: list[dict[str, Any]], step: int) -> list[CardScore]:
    """Scores of the model of this step, from the log and from evaluation*.json; the last measured counts."""
    scores: dict[tuple[str, str, int | None], CardScore] = {}

    def add(task: str, measures: dict[str, Any], few_shots: int | None, is_whole: bool) -> None:
        for metric, value in measures.items():
            if isinstance(value, int | float) and "_stderr" not in metric and metric not in NOT_METRICS:
                name, comma, chosen_by = metric.partition(",")
                error = measures.get(f"{name}_stderr{comma}{chosen_by}")
                scores[task, metric, few_shots] = CardScore(task, metric, value, error, few_shots, is_whole)

    for event in events:
        if event.get("event") == "evaluation" and event.get("step") == step and not event.get("is_part"):
            measures = {name: value for name, value in event.items() if name not in ABOUT_EVALUATION}
            add(event.get("task") or event["source"], measures, event.get("few_shots"), event.get("limit") is None)
    for path in sorted(run.glob("evaluation*.json"), key=lambda path: path.stat().st_mtime):
        contents = read_json(path)
        settings = contents.get("settings") or {}
        for model in contents.get("models") or []:
            # A folder of evaluations may hold those of other runs too.
            if model.get("step") != step or PurePath(model.get("run") or "").name != run.resolve().name:
                continue
            for source, measures in (model.get("sources") or {}).items():
                whole = settings.get("sequences") is None
                add(source, {k: v for k, v in measures.items() if k != "tokens"}, None, whole)
            for task, measures in (model.get("tasks") or {}).items():
                if not measures.get("is_part"):
                    add(task, measures, measures.get("few_shots"), settings.get("limit") is None)
    return list(scores.values())


def batch_text(config: dict[str, Any]) -> str:
    """'524,288 tokens (256 sequences of 2,048)'"""
    tokens = (config.get("batch") or {}).get("tokens_per_step")
    length = (config.get("data") or {}).get("sequence_length")
    if not tokens or not length:
        return "not recorded"
    return f"{tokens:,} tokens ({tokens // length:,} sequences of {length:,})"


def budget_text(facts: CardFacts) -> str:
    """'1.5M tokens in 733 steps, 0.5 per parameter'"""
    if facts.tokens is None:
        return f"{facts.step:,} steps"
    text = f"{count_text(facts.tokens)} tokens in {facts.step:,} steps"
    if facts.active_parameters:
        text += f", {facts.tokens / facts.active_parameters:.3g} per active parameter"
    elif facts.parameters:
        text += f", {facts.tokens / facts.parameters:.3g} per parameter"
    if facts.total_steps and facts.step < facts.total_steps:
        text += f" of {facts.total_steps:,} planned"
    return text
