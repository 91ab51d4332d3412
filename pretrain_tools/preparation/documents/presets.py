"""Well-known datasets by name: where each is on the Hub, and what a document of it is."""

import re
from dataclasses import dataclass
from pathlib import Path

ARTICLE_HEADING = re.compile(rb"\s= [^=].* =\s*")
"""WikiText comes line by line: a line such as ' = Title = ' begins an article, ' = = Section = = ' does not."""


@dataclass(frozen=True)
class Preset:
    """A dataset of the Hub. `streams`: too large to download first; it streams unless the command line says otherwise.

    `document_start`: rows are lines, and those that match it begin a document; None: each row is a document.
    """

    path: str
    subset: str | None = None
    streams: bool = False
    document_start: re.Pattern[bytes] | None = None


FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
SMOLLM_CORPUS = "HuggingFaceTB/smollm-corpus"
PRESETS = {
    "wikitext-2": Preset("Salesforce/wikitext", "wikitext-2-raw-v1", document_start=ARTICLE_HEADING),
    "wikitext-103": Preset("Salesforce/wikitext", "wikitext-103-raw-v1", document_start=ARTICLE_HEADING),
    "tinystories": Preset("roneneldan/TinyStories"),
    "openwebtext": Preset("Skylion007/openwebtext", "plain_text"),
    "wikipedia": Preset("wikimedia/wikipedia", "20231101.en"),
    "fineweb-edu": Preset(FINEWEB_EDU, "default", streams=True),
    "fineweb-edu-10bt": Preset(FINEWEB_EDU, "sample-10BT", streams=True),
    "fineweb-edu-100bt": Preset(FINEWEB_EDU, "sample-100BT", streams=True),
    "fineweb-edu-350bt": Preset(FINEWEB_EDU, "sample-350BT", streams=True),
    "cosmopedia-v2": Preset(SMOLLM_CORPUS, "cosmopedia-v2", streams=True),
    "fineweb-edu-dedup": Preset(SMOLLM_CORPUS, "fineweb-edu-dedup", streams=True),
    "smollm-corpus": Preset(SMOLLM_CORPUS, streams=True),
    "pile": Preset("monology/pile-uncopyrighted", streams=True),
    "pile-deduplicated": Preset("EleutherAI/the_pile_deduplicated", streams=True),
}
OTHER_NAMES = {
    "the-pile": "pile",
    "wikitext-2-raw": "wikitext-2",
    "wikitext-103-raw": "wikitext-103",
    "wikitext-2-raw-v1": "wikitext-2",
    "wikitext-103-raw-v1": "wikitext-103",
    "fineweb-edu-sample-10bt": "fineweb-edu-10bt",
    "fineweb-edu-sample-100bt": "fineweb-edu-100bt",
    "fineweb-edu-sample-350bt": "fineweb-edu-350bt",
}


def find_preset(name: str) -> Preset | None:
    """The preset of that name, in any case, with _ or -; None where there is none, or a folder has that name."""
    key = name.lower().replace("_", "-")
    if Path(name).exists():
        return None
    return PRESETS.get(OTHER_NAMES.get(key, key))
