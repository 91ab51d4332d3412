"""training_content.md: the public summary of training content that the EU's AI Act asks for, from the run's records.

The template of the European Commission's AI Office (24 July 2025, explanatory notice and template, Article 53(1)(d) of
Regulation (EU) 2024/1689), in its three sections. What the records do not say is left to the provider, never guessed.
"""

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pretrain.data.data_record import public_name
from pretrain.runs.history import is_number
from pretrain.units import bytes_text, count_text
from pretrain_tools.publishing.card import Publication, grid, markdown_table, title_of, trained_lengths
from pretrain_tools.publishing.card_facts import CardFacts, DataSource, distinct_sources, training_flops

TRAINING_CONTENT_FILE = "training_content.md"
GENERAL_PURPOSE_FLOPS = 1e23
"""Above this a model that generates language counts as of general purpose: the Commission's indicative criterion."""
SIZES = ((1e9, "less than 1 billion tokens"), (1e13, "1 billion to 10 trillion tokens"))
FILL = "**To be filled in by the provider**"
LARGE_SHARE = 0.03
"""Of all public datasets: from there on one is listed by name."""


def write_training_content(facts: CardFacts, folder: Path, publication: Publication) -> None:
    """Writes the summary into a model folder."""
    (folder / TRAINING_CONTENT_FILE).write_text(training_content(facts, publication), encoding="utf-8")


def training_content(facts: CardFacts, publication: Publication) -> str:
    """The whole summary as Markdown."""
    sections = [
        f"# Public summary of training content: {title_of(facts, publication)}",
        "In the form of the template of the European Commission's AI Office (24 July 2025) for Article 53(1)(d) of "
        "Regulation (EU) 2024/1689, the AI Act. Written from the records of the training; what they do not say is "
        f"marked: {FILL.lower()}. It is a draft until then, and no legal advice.",
        "## When it is required\n\n" + obligation_text(facts),
        "## 1. General information",
        general_section(facts, publication),
        "## 2. List of data sources",
        sources_section(facts),
        "## 3. Data processing aspects",
        processing_section(facts),
    ]
    return "\n\n".join(sections) + "\n"


def obligation_text(facts: CardFacts) -> str:
    """What the law asks for, and where this model's compute stands."""
    law = (
        "Providers of general-purpose AI models have to publish the summary when they place a model on the Union "
        "market, open models included: since 2 August 2025, and by 2 August 2027 for models that were there before. "
        "By the guidelines of the Commission (18 July 2025) a model that can generate language is indicated to be one "
        "if its training took more than 10^23 FLOP. Beside the compute, what the model can do counts."
    )
    flops, is_exact = training_flops(facts)
    if flops is None:
        return f"{law}\n\nThe compute of this training is not recorded. {FILL}."
    how = "as the run counts them for MFU" if is_exact else "as 6 per parameter and token"
    share = flops / GENERAL_PURPOSE_FLOPS
    is_above = flops > GENERAL_PURPOSE_FLOPS
    verdict = (
        "**above** the criterion: presumed to be of general purpose, and the summary required" if is_above
        else "**below** the criterion: by its compute alone the summary is not required"
    )  # fmt: skip
    beside = (
        " The compute of the model that it began with comes on top." if facts.setting("init") == "pretrained" else ""
    )
    return (
        f"{law}\n\nThis training took {flops:.3g} FLOP ({how}), {share:.2g} times 10^23, {verdict}.{beside} Repeated "
        "steps, experiments before it and the making of synthetic data are not in the figure."
    )


def general_section(facts: CardFacts, publication: Publication) -> str:
    """1.1 to 1.3."""
    name = f"{publication.repository or facts.run_name}, {publication.revision}"
    base = public_name(facts.model_source) if facts.setting("init") == "pretrained" else None
    dependencies = f"{base}; its own summary: {FILL}" if base else "none: trained from random weights"
    tokens, unique = facts.tokens, sum(source.tokens or 0 for source in distinct_sources(facts.sources))
    size = next((text for most, text in SIZES if unique < most), "more than 10 trillion tokens")
    rows = [
        ("modality", "text only"),
        (
            "training data size",
            f"{size}: {count_text(unique)} different tokens in the prepared sources" if unique else FILL,
        ),
        ("tokens trained on, repetitions included", f"{tokens:,}" if tokens else None),
        ("types of content", f"{FILL} (fiction, non-fiction, scientific text, press, legal text, source code, ...)"),
        ("latest date of data acquisition", f"{FILL}{_before_start(facts)}"),
        ("is the model trained on new data after that date", FILL),
        ("linguistic characteristics", languages_text(facts, publication)),
        ("other characteristics", facts_of_tokenizers(facts.sources)),
    ]
    return "\n\n".join(
        [
            "### 1.1. Provider identification",
            markdown_table("about", [
                ("provider's name and contact details", FILL + _owner(publication)),
                ("authorised representative's name and contact details", f"{FILL}, if there is one"),
            ]),
            "### 1.2. Model identification",
            markdown_table("about", [
                ("versioned model name", f"{name}: step {facts.step:,} of the run {facts.run_name}"),
                ("model dependencies", dependencies),
                ("date of placement on the Union market", FILL),
            ]),
            "### 1.3. Modalities, overall training data size and other characteristics",
            markdown_table("about", rows),
        ]
    )  # fmt: skip


def _owner(publication: Publication) -> str:
    owner = (publication.repository or "").partition("/")[0]
    return f" (on the Hub: {owner})" if owner else ""


def _before_start(facts: CardFacts) -> str:
    """A bound, which is all that a run knows: its data were there when it began."""
    times = [event["time"] for event in facts.history.of("start") if is_number(event.get("time"))]
    return f": not after {time.strftime('%m/%Y', time.gmtime(max(times)))}, when training last began" if times else ""


def languages_text(facts: CardFacts, publication: Publication) -> str:
    """As declared, and as the filters have counted them before they removed any."""
    counted: Counter[str] = Counter()
    for source in distinct_sources(facts.sources):
        counted.update(source.preparation.get("languages") or {})
    parts = [f"declared: {', '.join(publication.languages)}"] if publication.languages else []
    if counted:
        shown = ", ".join(f"{name} {count / counted.total():.1%}" for name, count in counted.most_common(12))
        parts.append(f"of the documents before filtering, by a language detector: {shown}")
    return "; ".join(parts) or FILL


def facts_of_tokenizers(sources: Iterable[DataSource]) -> str:
    names = dict.fromkeys(source.tokenizer for source in sources if source.tokenizer)
    return f"tokens are those of {', '.join(names)}" if names else ""


def sources_section(facts: CardFacts) -> str:
    """2.1 to 2.6: what came from the Hub by name; which kind files are of, no run records."""
    sources = distinct_sources(facts.sources)
    from_hub = [source for source in sources if source.preparation.get("datasets") or source.hub_datasets]
    files = [source for source in sources if source.preparation.get("files")]
    unknown = [source for source in sources if source not in from_hub and source not in files]
    domains: Counter[str] = Counter()
    for source in sources:
        domains.update(source.preparation.get("domains") or {})
    drawn = sum(source.preparation.get("domain_sample") or 0 for source in sources)
    parts = ["### 2.1. Publicly available datasets"]
    if from_hub:
        parts.append(
            "Datasets of the Hugging Face Hub were used (modality: text). Those with more than 3 % of all public "
            f"datasets' tokens are large in the template's sense. {FILL}: whether each is public, and its link if it "
            "is kept elsewhere.\n\n" + grid(["dataset", "part", "tokens", "share", "link"], _dataset_rows(from_hub))
        )
    else:
        said = "is recorded" if unknown or not sources else "was used"
        parts.append(f"No dataset of the Hugging Face Hub {said}. Others: {FILL}, for the files below.")
    parts += [
        "### 2.2. Private non-publicly available datasets obtained from third parties",
        f"2.2.1. Commercially licensed by rightsholders or their representatives: {FILL} (yes or no; modality).\n\n"
        f"2.2.2. Obtained from other third parties: {FILL} (yes or no; modality; list or description).",
        "### 2.3. Data crawled and scraped from online sources",
        f"Crawlers used by the provider or on its behalf: {FILL} (yes or no; names, purposes and behaviour of the "
        "crawlers, period of collection, types of content and sources, and the domain names with the most content: "
        "the top 10 %, for small and medium enterprises the top 5 % or 1,000).",
    ]
    if domains:
        parts.append(
            f"Domain names in a random sample of {drawn:,} documents that stayed after filtering, whoever crawled "
            f"them: {', '.join(f'{name} ({count})' for name, count in domains.most_common(30))}."
        )
    parts += [
        "### 2.4. User data",
        f"From interactions with the model: {FILL}. From the provider's other services or products: {FILL}.",
        "### 2.5. Synthetic data",
        f"Created by the provider or on its behalf to train the model: {FILL} (yes or no; modality; models used).",
        "### 2.6. Other sources of data",
        f"{FILL} (yes or no; description).",
    ]
    if files or unknown:
        parts.append(
            f"#### Sources of which the records do not say to which of 2.1 to 2.6 they belong\n\n{FILL}.\n\n"
            + grid(["source", "tokens", "files", "size", "read from"], _file_rows([*files, *unknown]))
        )
    return "\n\n".join(parts)


def _dataset_rows(sources: list[DataSource]) -> list[list[str]]:
    total = sum(source.tokens or 0 for source in sources)
    rows = []
    for source in sources:
        found = source.preparation.get("datasets") or [{"name": name} for name in source.hub_datasets]
        share = (source.tokens or 0) / total if total else None
        size = "" if share is None else f"{share:.1%}, {'large' if share > LARGE_SHARE else 'not large'}"
        for dataset in found:
            name = str(dataset.get("name"))
            part = ", ".join(str(dataset[key]) for key in ("subset", "split") if dataset.get(key))
            link = f"https://huggingface.co/datasets/{name}" if "/" in name else ""
            # Several datasets in one source were not counted apart.
            beside = f" with {len(found) - 1} others" if len(found) > 1 else ""
            rows.append([name, part, count_text(source.tokens) + beside if source.tokens else FILL, size, link])
    return rows


def _file_rows(sources: list[DataSource]) -> list[list[str]]:
    return [
        [
            source.name,
            count_text(source.tokens) if source.tokens else FILL,
            f"{source.preparation['files']:,}" if source.preparation.get("files") else "not recorded",
            bytes_text(source.preparation["file_bytes"]) if source.preparation.get("file_bytes") else "not recorded",
            ", ".join(
                source.preparation.get("file_hosts") or ["local files" if source.preparation else "not recorded"]
            ),
        ]
        for source in sources
    ]


def processing_section(facts: CardFacts) -> str:
    """3.1 to 3.3."""
    sources = distinct_sources(facts.sources)
    filters = [row for source in sources for row in _filter_rows(source)]
    measures = (
        "These filters ran over the data before training; whether they serve to remove illegal content the records do "
        f"not say. {FILL}.\n\n" + grid(["source", "filter or rule", "documents removed"], filters)
        if filters
        else f"No filter of documents is recorded. {FILL}."
    )
    return "\n\n".join(
        [
            "### 3.1. Respect of reservation of rights from the text and data mining exception or limitation",
            f"Signatory to the Code of Practice for general-purpose AI models: {FILL}. Measures taken before training "
            "to respect reservations of rights (opt-out protocols and solutions honoured by the provider, or by those "
            f"from whom datasets were obtained): {FILL}.",
            "### 3.2. Removal of illegal content",
            measures,
            "### 3.3. Other information",
            "\n".join(f"- {line}" for line in _processing_lines(facts, sources)) or "Nothing else is recorded.",
        ]
    )


def _filter_rows(source: DataSource) -> list[list[str]]:
    made = source.preparation
    removed = {rule: count for rule, count in (made.get("removed") or {}).items() if count}
    without = [name for name in made.get("filters") or [] if not any(rule.startswith(str(name)) for rule in removed)]
    rows = [[source.name, rule, f"{count:,}"] for rule, count in removed.items()]
    return rows + [[source.name, name, "0"] for name in without]


def _processing_lines(facts: CardFacts, sources: list[DataSource]) -> Iterable[str]:
    for source in sources:
        made = source.preparation
        if made.get("documents_in"):
            yield f"{source.name}: {made['documents_in']:,} documents before filtering"
        if made.get("deduplicated"):
            yield f"{source.name}: exact copies of documents were left out"
        if made.get("near_duplicates_at"):
            yield f"{source.name}: near copies were left out, from a similarity of {made['near_duplicates_at']:g} on"
        for row in source.contamination:
            yield (
                f"{source.name}: the benchmark {row['benchmark']} was looked for and removed: {row['found']:,} of "
                f"{row['items']:,} items, in {row['documents']:,} documents"
            )
    lengths: Any = trained_lengths(facts)
    if lengths:
        shown = " and then ".join(f"{length:,}" for length in lengths)
        yield f"documents were cut into sequences of {shown} tokens; shares and sizes of the sources are in README.md"
