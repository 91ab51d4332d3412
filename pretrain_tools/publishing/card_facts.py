"""What a model card states, read from the run's folder alone, so that any run can be described at any time.

What a run does not have (a data folder since moved, no evaluation) is left out; nothing is guessed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from pretrain.data.data_record import DATA_FILE, contamination_of, hub_datasets_of, preparation_of, public_name
from pretrain.data.manifest import MANIFEST_FILE
from pretrain.files import sha256_of
from pretrain.runs.history import Event, History, Score, current_events, joules_of, read_metrics, scores_of
from pretrain.runs.run_folder import checkpoint_name, read_config, read_json, read_state, setting
from pretrain.units import count_text
from pretrain_tools.runs.curves import Places, flops_per_token_of


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
    manifest_sha256: str | None = None
    """The identity of the shards: the manifest has the hash of each."""
    tokenizer: str | None = None
    tokenizer_sha256: str | None = None
    vocabulary_size: int | None = None
    hub_datasets: tuple[str, ...] = ()
    contamination: tuple[dict[str, Any], ...] = ()
    """By benchmark, as `contamination_of` gives it."""
    preparation: dict[str, Any] = field(default_factory=dict)
    """As `preparation_of` gives it."""


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
    history: History
    """Up to `step`."""
    step: int
    total_steps: int | None
    sources: tuple[DataSource, ...] = ()
    scores: tuple[Score, ...] = ()
    lineage: tuple[dict[str, Any], ...] = ()
    """As in `RunState`: the runs that this one branched from."""

    def setting(self, name: str) -> Any:
        """Of the recipe, by its dotted name; None where it does not say."""
        return setting(self.config, name)

    @property
    def model_source(self) -> str | None:
        """The file, folder or Hub id of the recipe's model."""
        return self.setting("model.config") or self.setting("model")

    @property
    def tokens(self) -> int | None:
        """Training tokens seen."""
        return self.history.last("train").get("tokens")

    @property
    def parameters(self) -> int | None:
        return next((event.get("parameters") for event in self.history.of("start")), None)

    @property
    def active_parameters(self) -> int | None:
        """Those used for each token, where they are fewer: in a mixture of experts."""
        active = next((event.get("active_parameters") for event in self.history.of("start")), None)
        return active if active != self.parameters else None

    @property
    def validation(self) -> dict[str, Event]:
        """{source: its last validation up to the step}"""
        return {source: events[-1] for source, events in self.history.validation().items()}


def read_card_facts(run: Path, step: int | None = None, model_folder: Path | None = None) -> CardFacts:
    """The facts of a run's model at `step`; None: at the last step that the run's log has.

    model_folder: where the model's config.json is; None: the run's model.json.
    """
    logged = read_metrics(run)
    joules = joules_of(event for event in logged if step is None or (event.get("step") or 0) <= step)
    events = current_events(logged)
    steps = [event["step"] for event in events if event["event"] in ("train", "checkpoint") and "step" in event]
    at = max(steps, default=0) if step is None else step
    config = read_config(run)
    model = read_json(model_folder / "config.json") if model_folder else {}
    return CardFacts(
        run_name=run.resolve().name,
        config=config,
        model=model or read_json(run / "model.json"),
        strategy=read_json(run / "strategy.json"),
        environment=read_json(run / "environment.json"),
        history=History(run, [e for e in events if (e.get("to_step") or e.get("step") or 0) <= at], joules),
        step=at,
        total_steps=History(run, events).last("start").get("total_steps"),
        sources=tuple(read_sources(config, read_json(run / DATA_FILE))),
        scores=tuple(read_scores(run, events, at)),
        lineage=tuple(setting(read_state(run / "checkpoints" / checkpoint_name(at)), "state.lineage") or ()),
    )


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
    totals = setting(record, "totals.train") or {}
    return DataSource(
        Path(source["shards"]).name,
        weight,
        stage,
        source.get("max_epochs"),
        **{key: totals.get(key) for key in ("tokens", "documents", "text_bytes")},
        manifest_sha256=record.get("manifest_sha256"),
        tokenizer_sha256=setting(record, "tokenizer.sha256"),
        # A tokenizer may have been given by its path, which stays private.
        tokenizer=public_name(setting(record, "tokenizer.name")),
        vocabulary_size=record.get("vocabulary_size"),
        hub_datasets=tuple(record.get("hub_datasets") or hub_datasets_of(record)),
        contamination=tuple(record.get("contamination") or contamination_of(record)),
        preparation=record.get("preparation") or preparation_of(manifest_behind(record, Path(source["shards"]))),
    )


def manifest_behind(record: dict[str, Any], shards: Path) -> dict[str, Any]:
    """The manifest whose totals a run kept, if it still lies there unchanged: runs once kept less of it."""
    if "manifest_sha256" not in record:
        return record  # it is the manifest
    path = shards / MANIFEST_FILE
    return read_json(path) if path.is_file() and sha256_of(path) == record["manifest_sha256"] else {}


def distinct_sources(sources: Iterable[DataSource]) -> list[DataSource]:
    """Each folder of shards once, in whatever stages it is."""
    return list({(source.name, source.manifest_sha256): source for source in sources}.values())


def training_flops(facts: CardFacts) -> tuple[float | None, bool]:
    """(FLOPs of the model's training by the formula of MFU, whether the run recorded those of a token).

    Steps that were repeated count once, and a model that it began with not at all. None where tokens are not known.
    """
    per_token, is_exact = flops_per_token_of(facts.history)
    if facts.tokens is None or per_token is None:
        return None, False
    steps = [{"hours": 0.0, **event} for event in facts.history.of("train")]  # a card's facts do without
    places = Places(steps, per_token, facts.history.of("stage"))
    return places.of([{"step": facts.step}])["flops"][0], is_exact


def read_scores(run: Path, events: list[Event], step: int) -> list[Score]:
    """Scores of the model of this step, from the log and from evaluation*.json; the last measured counts."""
    found = [event for event in events if event["event"] == "evaluation" and event.get("step") == step]
    for path in sorted(run.glob("evaluation*.json"), key=lambda path: path.stat().st_mtime):
        contents = read_json(path)
        for model in contents.get("models") or []:
            # A folder of evaluations may hold those of other runs too.
            if model.get("step") != step or PurePath(model.get("run") or "").name != run.resolve().name:
                continue
            for kind, named, limit in (("sources", "source", "sequences"), ("tasks", "task", "limit")):
                found += [
                    {**measures, named: name, "limit": setting(contents, f"settings.{limit}")}
                    for name, measures in (model.get(kind) or {}).items()
                ]
    scores = {(score.task, score.metric, score.few_shots): score for event in found for score in scores_of(event)}
    return list(scores.values())


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
