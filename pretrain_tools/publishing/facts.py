"""Collects facts about a model from its run folder, for the model card and other records.

Missing facts are omitted.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.data.data_record import DATA_FILE, public_name
from pretrain.runs.event_log import Event, read_metrics
from pretrain.runs.run_folder import METRICS_FILE, checkpoint_name, read_config, read_json, read_state, setting
from pretrain_tools.runs.history import (
    BY_OTHER_PROCESSES,
    History,
    Score,
    count_flops,
    measured,
    planned_steps,
    read_data_record,
    scores_of,
)

SHAPES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "width": ("hidden_size", "n_embd"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "experts per token": ("num_experts_per_tok",),
    "attention heads": ("num_attention_heads", "n_head"),
    "vocabulary size": ("vocab_size",),
    "longest context": ("max_position_embeddings", "n_positions"),
}
"""{name in the card: possible keys in config.json}"""


@dataclass(frozen=True)
class Publication:
    """Publication details that aren't in the run's files. A value is None if it isn't known."""

    repository: str | None = None
    """Hub repository, owner/name."""
    revision: str = "main"
    license: str | None = None
    """Hub license ID, such as apache-2.0."""
    languages: tuple[str, ...] = ()
    """ISO 639 codes."""
    dtype: str | None = None
    """Dtype of the weights (export.dtype in the recipe)."""
    trust_remote_code: bool = False
    """Allows running code from the checkpoint."""

    @property
    def name(self) -> str:
        """Repository name without the owner, or ''."""
        return (self.repository or "").rpartition("/")[2]

    @property
    def owner(self) -> str:
        """User or organization that owns the repository, or ''."""
        return (self.repository or "").partition("/")[0]


@dataclass(frozen=True)
class DataSource:
    """A folder of shards in the data mixture, with counts for its training split. Unrecorded values are None."""

    name: str
    weight: float
    """Fraction of the stage's sequences, 0 to 1."""
    stage: str | None
    """Curriculum stage, or steps with this mixture; None in a run with a single mixture."""
    max_epochs: float | None
    tokens: int | None
    documents: int | None
    text_bytes: int | None
    manifest_sha256: str | None
    """Hash of the manifest, which contains the hash of each shard."""
    tokenizer: str | None
    tokenizer_sha256: str | None
    vocabulary_size: int | None
    hub_datasets: tuple[str, ...]
    contamination: tuple[dict[str, Any], ...]
    """One entry per benchmark, see pretrain.data.data_record."""
    preparation: dict[str, Any]
    """See pretrain.data.data_record."""

    @property
    def reference(self) -> str:
        """ID in the bill of materials, from the name and the hash of the manifest."""
        return f"data:{self.name}" + (f":{self.manifest_sha256[:12]}" if self.manifest_sha256 else "")


@dataclass(frozen=True)
class Facts:
    """Everything known about one of a run's models."""

    run_name: str
    config: dict[str, Any]
    """Contents of config.yaml."""
    model: dict[str, Any]
    """The model's config.json."""
    strategy: dict[str, Any]
    environment: dict[str, Any]
    history: History
    """Events up to `step`."""
    step: int
    tokens: int | None
    """Number of training tokens seen up to `step`."""
    total_steps: int | None
    sources: list[DataSource]
    scores: list[Score]
    lineage: list[dict[str, Any]]
    """Runs that this run branched from, see `RunState`."""
    offer: Publication

    def setting(self, name: str) -> Any:
        """Returns the value of a recipe setting, given its dotted name, or None."""
        return setting(self.config, name)

    def shape(self, name: str) -> Any:
        """Returns a value from config.json, given its name in SHAPES, or None."""
        return next((self.model[key] for key in SHAPES[name] if self.model.get(key) is not None), None)

    @property
    def title(self) -> str:
        return self.offer.name or self.run_name

    @property
    def start(self) -> Event:
        """The run's last start event, or {}."""
        return self.history.last("start")

    @property
    def model_source(self) -> str | None:
        """The recipe's model: a file, folder or Hub ID."""
        return self.setting("model.config") or self.setting("model")

    @property
    def is_continued(self) -> bool:
        """True if training started from another model's weights."""
        return self.setting("init") == "pretrained"

    @property
    def is_partial(self) -> bool:
        """True if the model was saved before the run's last step."""
        return bool(self.total_steps and self.step < self.total_steps)

    @property
    def parameters(self) -> int | None:
        return self.start.get("parameters")

    @property
    def active_parameters(self) -> int | None:
        """Active parameters per token of an MoE model; None for dense models."""
        active = self.start.get("active_parameters")
        return active if active != self.parameters else None

    @property
    def validation(self) -> dict[str, Event]:
        """{source: last validation event}"""
        return {source: events[-1] for source, events in self.history.validation().items()}

    @property
    def trained_lengths(self) -> list[int]:
        """Sequence lengths in tokens, in training order."""
        first = next(iter(self.setting("data.stages") or []), {}).get("sequence_length")
        later = [event["sequence_length"] for event in self.history.of("stage")]
        return [*dict.fromkeys(filter(None, [first or self.setting("data.sequence_length"), *later]))]

    @property
    def distinct_sources(self) -> list[DataSource]:
        """Data sources of all stages, without duplicates."""
        return list({(source.name, source.manifest_sha256): source for source in self.sources}.values())

    @property
    def training_flops(self) -> float | None:
        """Training FLOPs (counted as for MFU), or None if the token count or model size is unknown.

        Repeated steps are counted once. The training of a pretrained initial model isn't included.
        """
        logged = self.history.last("train").get("tokens")
        flops = count_flops(self.history)
        # The last log line may be before `step`.
        return flops * self.tokens / logged if flops and self.tokens and logged else None


def read_facts(
    run: Path, step: int | None = None, model_folder: Path | None = None, offer: Publication | None = None
) -> Facts:
    """Collects the facts about a run's model.

    Args:
        step: the model's step; None for the last step in the log.
        model_folder: folder with the model's config.json; None for the run's model.json.
    """
    logged = read_metrics(run)
    whole = History.of_events(run, logged)
    steps = [event["step"] for event in whole.events if event["event"] in ("train", "checkpoint") and "step" in event]
    at = max(steps, default=0) if step is None else step
    config = read_config(run)
    model = read_json(model_folder / "config.json") if model_folder else {}
    # A rollback is logged after the step it returns to, but affects the model from that step on.
    history = History.of_events(run, [e for e in logged if (e.get("to_step") or e.get("step") or 0) <= at])
    # A start at the model's own step doesn't affect it.
    starts = [event for event in history.of("start") if (event.get("step") or 0) < at]
    state = read_state(run / "checkpoints" / checkpoint_name(at))
    # The checkpoint may be gone, and a log with logging.every_steps doesn't contain every step.
    tokens = [event["tokens"] for event in measured(history.events, "tokens") if event.get("step") == at]
    return Facts(
        run_name=run.resolve().name,
        config=config,
        model=model or read_json(run / "model.json"),
        strategy=read_json(run / "strategy.json"),
        environment=read_json(run / "environment.json"),
        history=history,
        step=at,
        tokens=setting(state, "state.tokens") or (tokens[-1] if tokens else None),
        total_steps=planned_steps(whole.events),
        sources=read_sources(config, read_data_record(run), starts),
        scores=[score for event in whole.of("evaluation") if event.get("step") == at for score in scores_of(event)],
        lineage=setting(state, "state.lineage") or [],
        offer=offer or Publication(),
    )


def gaps_in_records(run: Path, step: int) -> list[str]:
    """Lists a run's missing, damaged or incomplete records, without which the card of the model at `step` has gaps."""
    records = {name: read_json(run / name) for name in ("model.json", "strategy.json", "environment.json")}
    records[DATA_FILE] = read_data_record(run)
    gaps = [f"{run / name} is missing or damaged" for name, record in records.items() if not record]
    trained = [event for event in read_metrics(run) if event["event"] not in BY_OTHER_PROCESSES]
    last = max((event["step"] for event in measured(trained, "step")), default=0)
    if last < step:
        gaps.append(f"{run / METRICS_FILE} ends at step {last:,}, before the model's step {step:,}")
    return gaps


def read_sources(config: dict[str, Any], records: dict[str, Any], starts: list[Event]) -> list[DataSource]:
    """Lists the data sources of all stages and of all mixtures that the run resumed with, in training order.

    Args:
        records: {folder: manifest data recorded by the run}
        starts: the run's start events. They contain the data if the mixture has changed.
    """
    mixtures = [(0, config.get("data") or {})]
    for start in starts:
        if data := start.get("data"):
            step = start["origin"]["step"]
            mixtures = [mixtures[0], *(mixture for mixture in mixtures[1:] if mixture[0] < step)]
            if any(data.get(key) != mixtures[-1][1].get(key) for key in ("train", "stages")):
                mixtures.append((step, data))
    ends = [step for step, _ in mixtures[1:]]
    sources = []
    for number, (first, data) in enumerate(mixtures):
        steps = f"steps {first + 1:,} to {ends[number]:,}" if number < len(ends) else f"from step {first + 1:,} on"
        sources += sources_of_mixture(data, records, steps if ends else None)
    return sources


def sources_of_mixture(data: dict[str, Any], records: dict[str, Any], steps: str | None) -> list[DataSource]:
    """Lists the data sources of all stages, in the recipe's order.

    steps: the steps with this mixture, for a run that changed its mixture.
    """
    stages = data.get("stages") or [{"train": data.get("train") or []}]
    sources = []
    start = 0.0
    for stage in stages:
        end = float(stage.get("until") or 1)
        total = sum(float(source.get("weight", 1)) for source in stage["train"]) or 1.0
        share = f"{start:.0%} to {end:.0%}" if len(stages) > 1 else None
        name = ", ".join(filter(None, (steps, share))) or None
        for source in stage["train"]:
            record = records.get(str(source["shards"])) or {}
            totals = setting(record, "totals.train") or {}
            sources.append(
                DataSource(
                    Path(source["shards"]).name,
                    float(source.get("weight", 1)) / total,
                    name,
                    source.get("max_epochs"),
                    **{key: totals.get(key) for key in ("tokens", "documents", "text_bytes")},
                    **{key: record.get(key) for key in ("manifest_sha256", "vocabulary_size")},
                    **{key: tuple(record.get(key) or ()) for key in ("hub_datasets", "contamination")},
                    # A tokenizer's local path isn't published.
                    tokenizer=public_name(setting(record, "tokenizer.name")),
                    tokenizer_sha256=setting(record, "tokenizer.sha256"),
                    preparation=record.get("preparation") or {},
                )
            )
        start = end
    return sources
