"""Writes training_content.md, the public summary of training content required by the EU's AI Act.

Follows the template of the European Commission's AI Office (24 July 2025, explanatory notice and template, Article
53(1)(d) of Regulation (EU) 2024/1689). The provider has to fill in facts that the run didn't record.
"""

import time
from collections import Counter
from typing import Any

from pretrain_tools.publishing.card import render
from pretrain_tools.publishing.facts import DataSource, Facts
from pretrain_tools.runs.history import measured

TRAINING_CONTENT_FILE = "training_content.md"
GENERAL_PURPOSE_FLOPS = 1e23
"""FLOPs above which the Commission considers a language model general-purpose (indicative criterion)."""
SIZES = ((1e9, "less than 1 billion tokens"), (1e13, "1 billion to 10 trillion tokens"))
"""(upper token limit, category in the template)"""
FILL = "**To be filled in by the provider**"
LARGE_SHARE = 0.03
"""Fraction of all public datasets' tokens above which the template requires a dataset to be named."""
MOST_LANGUAGES = 12
MOST_DOMAINS = 30


def training_content(facts: Facts) -> str:
    """Renders the summary as Markdown."""
    sources = facts.distinct_sources
    from_hub = [source for source in sources if source.preparation.get("datasets") or source.hub_datasets]
    others = [source for source in sources if source.preparation.get("files")]
    unknown = [source for source in sources if source not in from_hub and source not in others]
    unique = sum(source.tokens or 0 for source in sources)
    starts = [event["time"] for event in measured(facts.history.of("start"), "time")]
    made = [source.preparation for source in sources]
    languages = sum((Counter(one.get("languages")) for one in made), Counter())
    domains = sum((Counter(one.get("domains")) for one in made), Counter())
    shares = [f"{name} {count / languages.total():.1%}" for name, count in languages.most_common(MOST_LANGUAGES)]
    return render(
        "training_content.md.j2",
        facts=facts,
        fill=FILL,
        general_purpose_flops=GENERAL_PURPOSE_FLOPS,
        unique_tokens=unique,
        size=next((text for most, text in SIZES if unique < most), "more than 10 trillion tokens"),
        # The data can't be newer than the start of training.
        last_start=time.strftime("%m/%Y", time.gmtime(max(starts))) if starts else "",
        languages=", ".join(shares),
        domains=", ".join(f"{name} ({count})" for name, count in domains.most_common(MOST_DOMAINS)),
        sampled=sum(one.get("domain_sample") or 0 for one in made),
        hub_sources=from_hub,
        large_share=LARGE_SHARE,
        all_recorded=sources and not unknown,
        other_sources=[*others, *unknown],
        filter_rows=[row for source in sources for row in filter_rows(source)],
    )


def filter_rows(source: DataSource) -> list[tuple[str, Any, int]]:
    """Returns rows (source, rule, documents removed). A filter that removed nothing has one row with 0."""
    removed = {rule: count for rule, count in (source.preparation.get("removed") or {}).items() if count}
    filters = source.preparation.get("filters") or []
    # In the manifest, rules are named 'filter.rule', and the filter 'mine.py:keep' has the rule 'mine.keep'.
    idle = [name for name in filters if not any(rule.startswith(str(name).replace(".py:", ".")) for rule in removed)]
    return [(source.name, rule, count) for rule, count in {**removed, **dict.fromkeys(idle, 0)}.items()]
