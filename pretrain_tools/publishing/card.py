"""The model card: README.md with the Hub's metadata, and a picture of the loss. The only writer of cards.

Metadata: https://github.com/huggingface/hub-docs/blob/main/modelcard.md; results in its model-index format.
"""

import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml

from pretrain.data.data_record import is_hub_id, public_name
from pretrain.files import CARD_FILE, PICTURE_FILE
from pretrain.runs.history import Score
from pretrain.units import JOULES_PER_KWH, count_text, duration_text, energy_text
from pretrain_tools.publishing.card_facts import CardFacts, budget_text, read_card_facts

TAGS = ("pretraining", "base-model", "groundwork")
METRIC_TYPES = {"acc": "accuracy", "acc_norm": "accuracy", "exact_match": "exact_match", "perplexity": "perplexity"}
"""{measure: the Hub's metric id}; the others keep their names."""


@dataclass(frozen=True)
class Publication:
    """How a model is offered, which a run's files cannot say. All None: not published yet."""

    repository: str | None = None
    """owner/name on the Hub."""
    revision: str = "main"
    license: str | None = None
    """A licence id of the Hub, apache-2.0."""
    languages: tuple[str, ...] = ()
    """ISO 639 codes."""
    dtype: str | None = None
    """Of the weights, as a recipe's export.dtype."""


def write_card(run: Path, folder: Path, publication: Publication | None = None, *, step: int | None = None) -> None:
    """Writes README.md and, where the run's log has losses, loss.png into a model folder of the run.

    step: the model's optimizer step; None: the log's last.
    """
    facts = read_card_facts(run, step, folder)
    has_picture = plot_losses(facts, folder / PICTURE_FILE)
    text = model_card(facts, publication or Publication(), has_picture=has_picture)
    (folder / CARD_FILE).write_text(text, encoding="utf-8")


def model_card(facts: CardFacts, publication: Publication, *, has_picture: bool) -> str:
    """The whole card as Markdown with YAML metadata in front."""
    sections = [
        f"# {title_of(facts, publication)}",
        introduction(facts),
        use_section(facts, publication),
        "## Model\n\n" + markdown_table("property", architecture_rows(facts, publication)),
        "## Data\n\n" + data_section(facts),
        "## Training\n\n" + markdown_table("setting", training_rows(facts)),
        "![Training and validation loss](loss.png)" if has_picture else "",
        evaluation_section(facts),
        "## Lineage\n\n" + lineage_text(facts),
        "## Limits\n\n" + limits_text(facts, publication),
        recipe_section(facts),
    ]
    return f"---\n{metadata(facts, publication)}\n---\n\n" + "\n\n".join(filter(None, sections)) + "\n"


def title_of(facts: CardFacts, publication: Publication) -> str:
    return publication.repository.split("/")[-1] if publication.repository else facts.run_name


def metadata(facts: CardFacts, publication: Publication) -> str:
    """The YAML at the top, checked by huggingface_hub's own classes."""
    from huggingface_hub import ModelCardData

    base = facts.model_source
    continues = facts.setting("init") == "pretrained" and is_hub_id(base)
    datasets = dict.fromkeys(name for source in facts.sources for name in source.hub_datasets)
    results = eval_results(facts)
    data = ModelCardData(
        language=list(publication.languages) or None,
        license=publication.license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=list(TAGS),
        datasets=list(datasets) or None,
        base_model=base.partition("@")[0] if continues else None,
        model_name=title_of(facts, publication) if results else None,
        eval_results=results or None,
        co2_eq_emissions=emissions(facts),
    )
    return data.to_yaml(line_break="\n")


def emissions(facts: CardFacts) -> dict[str, Any] | None:
    """Grams of CO2, and how they were found, as the Hub's metadata takes them; None where the energy or the grid is
    not known."""
    joules, grams, start = (
        facts.history.joules,
        facts.setting("energy.grid_grams_per_kwh"),
        facts.history.last("start"),
    )
    if joules is None or grams is None:
        return None
    how = f"{start.get('energy')}; {grams:g} g of CO2 per kWh"
    return {
        "emissions": round(joules / JOULES_PER_KWH * grams, 3),
        "source": f"energy {how}",
        "training_type": "pre-training",
        "hardware_used": hardware_text(facts.environment, facts.strategy.get("ranks") or 1),
    }


def eval_results(facts: CardFacts) -> list[Any]:
    """Scores as huggingface_hub.EvalResult, for the model-index, without those over part of a task."""
    from huggingface_hub import EvalResult

    names = {score: score.metric.partition(",")[0] for score in facts.scores if score.is_whole}
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Text generation",
            dataset_name=score_name(score),
            dataset_type=score.task,
            metric_type=METRIC_TYPES.get(name, name),
            metric_name=score.metric.replace("_", " "),
            metric_value=round(score.value, 6),
        )
        for score, name in names.items()
    ]


def introduction(facts: CardFacts) -> str:
    size = f"of {count_text(facts.parameters)} parameters " if facts.parameters else ""
    if facts.active_parameters:
        size += f"({count_text(facts.active_parameters)} active for a token) "
    how = "trained further" if facts.setting("init") == "pretrained" else "pretrained from scratch"
    text = f"A base language model {size}{how} with Groundwork on {budget_text(facts).split(',')[0]}. "
    return text + "It continues text; it has not been trained to follow instructions or to chat."


def use_section(facts: CardFacts, publication: Publication) -> str:
    """Code that runs as it stands once the model is where it says."""
    where = publication.repository or "path/to/this/folder"
    options = "" if publication.revision == "main" else f', revision="{publication.revision}"'
    note = ""
    if facts.model.get("auto_map"):
        options += ", trust_remote_code=True"
        note = "\n\nThe architecture's code is in this repository, hence `trust_remote_code`; read it first."
    return (
        f"## How to use\n\n```python\nfrom transformers import pipeline\n\n"
        f'generate = pipeline("text-generation", model="{where}"{options})\n'
        f'print(generate("Once", max_new_tokens=50)[0]["generated_text"])\n```\n\n'
        "Begin with the end-of-document token where a new document should start: in training every document followed "
        f"one.{note}"
    )


def architecture_rows(facts: CardFacts, publication: Publication) -> Iterable[tuple[str, Any]]:
    """(name, value) of the model's shape; the names of different families are brought to one."""
    model = facts.model
    yield "architecture", model.get("model_type")
    yield "parameters", f"{facts.parameters:,}" if facts.parameters else None
    yield "active parameters", f"{facts.active_parameters:,}" if facts.active_parameters else None
    for name in SHAPES:
        value = shape_fact(model, name)
        yield name, f"{value:,}" if isinstance(value, int) else value
    yield "input and output embeddings", "tied" if model.get("tie_word_embeddings", True) else "separate"
    yield "dtype of the weights", publication.dtype or facts.setting("export.dtype")
    used = next((source.vocabulary_size for source in facts.sources if source.vocabulary_size), None)
    size = model.get("vocab_size")
    if used and size and used < size:
        text = f"{used:,} ids; the {size - used:,} rows above them are padding for speed and stand for no text"
        yield "used vocabulary", text
    yield "tokenizer", next((source.tokenizer for source in facts.sources if source.tokenizer), None)


SHAPES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "width": ("hidden_size", "n_embd"),
    "feed-forward width": ("intermediate_size", "n_inner"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "experts per token": ("num_experts_per_tok",),
    "shared experts": ("n_shared_experts",),
    "expert width": ("moe_intermediate_size",),
    "attention heads": ("num_attention_heads", "n_head"),
    "key-value heads": ("num_key_value_heads",),
    "vocabulary size": ("vocab_size",),
    "longest context": ("max_position_embeddings", "n_positions"),
    "activation": ("hidden_act", "activation_function"),
}
"""{name in the card: keys of config.json that may hold it}"""


def shape_fact(model: dict[str, Any], name: str) -> Any:
    """The value of the first of its keys that this model has; None without any."""
    return next((model[key] for key in SHAPES[name] if model.get(key) is not None), None)


def data_section(facts: CardFacts) -> str:
    if not facts.sources:
        return "Not recorded."
    staged = any(source.stage for source in facts.sources)
    header = [*(["stage"] if staged else []), "source", "share", "tokens", "documents", "text", "tokenizer"]
    rows = []
    for source in facts.sources:
        name = source.name + (f" ({', '.join(source.hub_datasets)})" if source.hub_datasets else "")
        limit = f", at most {source.max_epochs:g} epochs" if source.max_epochs else ""
        cells = [
            name,
            f"{source.weight:.1%}{limit}",
            count_text(source.tokens) if source.tokens else "not recorded",
            f"{source.documents:,}" if source.documents else "",
            f"{count_text(source.text_bytes)}B" if source.text_bytes else "",
            source.tokenizer or "",
        ]
        rows.append([source.stage, *cells] if staged else cells)
    lengths, masked = trained_lengths(facts), facts.setting("data.document_mask")
    shown = " and then ".join(f"{length:,}" for length in lengths)
    packing = f"Documents were packed into sequences of {shown} tokens" if lengths else ""
    attending = "; tokens attended within their own document only." if masked else "."
    found = contamination_section(facts)
    return grid(header, rows) + (f"\n\n{packing}{attending}" if packing else "") + (f"\n\n{found}" if found else "")


def trained_lengths(facts: CardFacts) -> list[int]:
    """Tokens of the sequences that it was trained on, in the order of the run's stages."""
    first = next(iter(facts.setting("data.stages") or []), {}).get("sequence_length")
    lengths = [first or facts.setting("data.sequence_length")]
    lengths += [event["sequence_length"] for event in facts.history.of("stage")]
    return [*dict.fromkeys(filter(None, lengths))]


def contamination_section(facts: CardFacts) -> str:
    """Which benchmarks were kept out of the data; nothing where none was looked for."""
    rows = [
        [
            source.name,
            row["benchmark"],
            f"{row['items']:,}" + (f" ({row['sought']:,} sought)" if row["sought"] < row["items"] else ""),
            f"{row['found']:,}",
            f"{row['documents']:,}, {'removed' if row['remove'] == 'document' else 'in which they were cut out'}",
        ]
        for source in {source.name: source for source in facts.sources}.values()
        for row in source.contamination
    ]
    if not rows:
        return ""
    header = ["source", "benchmark", "items", "items found", "documents with them"]
    return "These benchmarks were kept out of the training data:\n\n" + grid(header, rows)


def training_rows(facts: CardFacts) -> Iterable[tuple[str, Any]]:
    """(name, value) of how, on what and how fast."""
    machine, strategy = facts.environment, facts.strategy
    optim = facts.setting("optim") or {}
    start = facts.history.last("start")
    yield "budget", budget_text(facts)
    yield "global batch", batch_text(facts)
    yield "optimizer", f"{optim['name']}, weight decay {optim.get('weight_decay', 0):g}" if "name" in optim else None
    peak = max((event.get("learning_rate") or 0 for event in facts.history.of("train")), default=0)
    rate = peak or optim.get("learning_rate") or optim.get("base_learning_rate")
    warmup = f", {start['warmup_steps']:,} warmup steps" if "warmup_steps" in start else ""
    yield "learning rate", f"{rate:.3g} at the peak, {optim.get('schedule')}{warmup}" if rate else None
    yield "precision", strategy.get("precision") or facts.setting("precision")
    yield "seed", facts.setting("seed")
    yield "hardware", hardware_text(machine, strategy.get("ranks") or 1)
    yield "strategy", strategy.get("strategy")
    speed, mfu = facts.history.median("tokens_per_second"), facts.history.median("mfu")
    yield "throughput", f"{speed:,.0f} tokens/s" + (f", MFU {mfu:.1%}" if mfu else "") if speed else None
    if speed and facts.tokens:
        yield "time in training steps", duration_text(facts.tokens / speed)
    if facts.history.joules is not None:
        yield (
            "energy",
            energy_text(facts.history.joules, start.get("energy"), facts.setting("energy.grid_grams_per_kwh")),
        )
    packages = machine.get("packages") or {}
    yield "software", ", ".join(f"{name} {packages[name]}" for name in SOFTWARE if name in packages)
    yield "code", machine.get("commit")
    losses = [event["loss"] for event in facts.history.of("train") if event.get("loss") is not None]
    yield "training loss at the end", f"{losses[-1]:.4f}" if losses else None


def batch_text(facts: CardFacts) -> str:
    """'524,288 tokens (256 sequences of 2,048)'"""
    tokens, length = facts.setting("batch.tokens_per_step"), facts.setting("data.sequence_length")
    return f"{tokens:,} tokens ({tokens // length:,} sequences of {length:,})" if tokens and length else "not recorded"


def hardware_text(machine: dict[str, Any], ranks: int) -> str | None:
    """'8 x NVIDIA H100', or 'CPU (x86_64, 2 cores)'."""
    device = machine.get("device")
    if device in CPUS:
        text = f"CPU ({device}, {machine.get('cores', '?')} cores)"
        return f"{text}, {ranks} processes" if ranks > 1 else text
    return f"{ranks} x {device}" if ranks > 1 and device else device


CPUS = ("x86_64", "AMD64", "aarch64", "arm64", "arm", "i386")
"""What the system calls a processor where no GPU trained."""
SOFTWARE = ("torch", "transformers", "accelerate", "deepspeed")


def evaluation_section(facts: CardFacts) -> str:
    """Validation loss per source, and the scores of tasks; nothing where nothing was measured."""
    parts = []
    if facts.validation:
        header = ["held-out text", "loss (nats per token)", "perplexity", "bits per byte"]
        rows = [
            [source, *(f"{event[name]:{form}}" if event.get(name) is not None else "" for name, form in CARD_MEASURES)]
            for source, event in facts.validation.items()
        ]
        averages = {source: event.get("average_loss") for source, event in facts.validation.items()}
        rows += [
            [f"{source}, average", f"{loss:.4f}", "", ""] for source, loss in averages.items() if loss is not None
        ]
        step = next(reversed(facts.validation.values()))["step"]
        which = "; the run's final model has the average" if facts.setting("export.weights") == "average" else ""
        parts.append(f"During training, at step {step:,}{which}:\n\n{grid(header, rows)}")
    if facts.scores:
        scores = sorted(facts.scores, key=marked_name)
        rows = [[marked_name(score), score.metric.replace("_", " "), score_text(score)] for score in scores]
        for above, row in reversed(list(itertools.pairwise(rows))):
            row[0] = "" if row[0] == above[0] else row[0]  # a name stands on the first of its lines
        parts.append("After training:\n\n" + grid(["task or text", "measure", "score"], rows))
    if any(not score.is_whole for score in facts.scores):
        parts.append("Scores marked \\* cover only part of the task and cannot be compared with other results.")
    return "## Evaluation\n\n" + "\n\n".join(parts) if parts else ""


CARD_MEASURES = (("loss", ".4f"), ("perplexity", ".2f"), ("bits_per_byte", ".4f"))


def score_name(score: Score) -> str:
    return score.task if score.few_shots is None else f"{score.task} ({score.few_shots}-shot)"


def marked_name(score: Score) -> str:
    return score_name(score) + ("" if score.is_whole else " \\*")


def score_text(score: Score) -> str:
    error, digits = score.standard_error, 2 if "perplexity" in score.metric else 4
    text = f"{score.value:.{digits}f}"
    return text if error is None else f"{text} ± {error:.{digits}f}"


def lineage_text(facts: CardFacts) -> str:
    """Where the weights began, and every restart."""
    lines = [
        f"- branched from the run {public_name(trunk['run'])} at step {trunk['step']:,}, after "
        f"{count_text(trunk['tokens'])} tokens"
        for trunk in facts.lineage
    ]
    if facts.setting("init") == "pretrained":
        lines.append(f"- began with the weights of {public_name(facts.model_source)}")
    elif not facts.lineage:
        lines.append(f"- began with random weights of seed {facts.config.get('seed', 'not recorded')}")
    for event in facts.history.of("resume"):
        lines.append(f"- continued at step {event['step']:,} from its own checkpoint")
    for event in facts.history.of("rollback"):
        reason = f": {event['reason']}" if event.get("reason") else ""
        change = f"; {event['change']}" if event.get("change") else ""
        lines.append(f"- went back to step {event.get('to_step', 0):,}{reason}{change}")
    return "\n".join(lines)


def limits_text(facts: CardFacts, publication: Publication) -> str:
    tokens = f" of {count_text(facts.tokens)} tokens" if facts.tokens else ""
    context, length = shape_fact(facts.model, "longest context"), max(trained_lengths(facts), default=None)
    lines = [
        f"- A base model: it continues text as its training text{tokens} would, including what is wrong, private or "
        "offensive in it. It has had no safety training and no filter.",
        "- What it writes can be false, however fluent. Do not use it where that matters without checking.",
    ]
    if publication.languages:
        lines.append(f"- Trained on text in these languages only: {', '.join(publication.languages)}.")
    if length and context and length < context:
        lines.append(f"- It was trained on at most {length:,} tokens at a time, though {context:,} positions exist.")
    if facts.total_steps and facts.step < facts.total_steps:
        lines.append(
            f"- A checkpoint from within a run: step {facts.step:,} of {facts.total_steps:,}, with the learning rate "
            "not decayed to its end."
        )
    return "\n".join(lines)


def recipe_section(facts: CardFacts) -> str:
    """The resolved recipe, without this machine's folders."""
    if not facts.config:
        return ""
    text = yaml.safe_dump(without_folders(facts.config), sort_keys=False, allow_unicode=True).rstrip()
    return f"## Recipe\n\n<details><summary>Every setting of the run</summary>\n\n```yaml\n{text}\n```\n\n</details>"


def without_folders(value: Any) -> Any:
    """The same values; of every absolute or home path only the last part: the others name users and machines."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    if isinstance(value, str) and (value.startswith("~") or PurePath(value).is_absolute() or ".." in value):
        return PurePath(value).name
    return value


def markdown_table(named: str, rows: Iterable[tuple[str, Any]]) -> str:
    """Rows of name and value, under what the names are; what is None or empty is left out."""
    return grid([named, "value"], [[name, value] for name, value in rows if value not in (None, "")])


def grid(header: list[str], rows: list[list[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def plot_losses(facts: CardFacts, path: Path) -> bool:
    """Training and validation loss against tokens, as a PNG; False where there are fewer than two points to draw."""
    train = {event["step"]: (event["tokens"], event["loss"]) for event in facts.history.of("train")}
    points = [(tokens, loss) for tokens, loss in train.values() if loss is not None]
    if len(points) < 2:
        return False
    from matplotlib.figure import Figure

    tokens_at = {step: tokens for step, (tokens, _) in train.items()} | {0: 0}
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.add_subplot(
        title=f"{facts.run_name}: loss", xlabel="training tokens", ylabel="loss (nats per token)"
    )
    axis.plot(*zip(*points, strict=True), linewidth=1, alpha=0.7, label="training")
    for source, events in facts.history.validation().items():
        measured = {
            event["step"]: (tokens_at[event["step"]], event["loss"])
            for event in events
            if event["step"] in tokens_at and event.get("loss") is not None
        }
        if measured:
            axis.plot(*zip(*measured.values(), strict=True), marker="o", markersize=3, label=f"validation, {source}")
    axis.xaxis.set_major_formatter(lambda value, _: count_text(value))
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3)
    axis.legend()
    # Without date and version: the same run gives the same picture, which need not be uploaded twice.
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return True


if __name__ == "__main__":  # started by a run that exports its model
    write_card(Path(sys.argv[1]), Path(sys.argv[2]))
