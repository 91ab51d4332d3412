"""Filters documents by language. Detects the language from function words or, if these are unclear, with lingua."""

import functools
import itertools
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from pretrain.errors import InputError, did_you_mean
from pretrain_tools.preparation.cleaning.document_types import CODE
from pretrain_tools.preparation.cleaning.stages import CleaningStage, TextBatch, Verdicts

FUNCTION_WORDS = {
    "en": "the of and to that is was with for you have this are from they which not be at it were but his or had by",
    "de": "der die und das ist nicht zu den mit sich auf ein eine für von auch dem es im wird werden dass aber",
    "fr": "le les et des est une dans que pour qui du au sur pas il avec ce sont plus cette ou par nous vous",
    "es": "el los las y es una por con para del que se lo como más pero sus este fue al ha son también",
    "it": "il di che è per un della non sono con gli del da una le alla dei nel anche più come si ha",
    "pt": "os não uma com para do da em dos que mais como foi ao pelo são também se na no das ou pela",
    "nl": "het een van en dat niet voor met zijn op te aan die ook naar maar door bij wordt deze uit er",
}
"""{language: frequent words}. A word may appear in several languages."""
WORDS_OF = {language: set(words.encode().split()) for language, words in FUNCTION_WORDS.items()}
LANGUAGES_OF = {
    word: [language for language, words in WORDS_OF.items() if word in words]
    for word in set().union(*WORDS_OF.values())
}
"""{word: languages}"""
PLACES = 5
"""Number of evenly spaced locations at which a document is sampled."""
ALIKE = {"id": "id/ms", "ms": "id/ms"}
"""Languages that are treated as one, because lingua labels half of all Indonesian sentences as Malay."""
LEAST_WORDS = 20
"""Minimum number of words in a sample."""
LOOKS = {600: [(0.12, 2, 4)], 4000: [(0.12, 2, 4), (0.06, 8, 8)], 20_000: [(0.06, 8, 10)]}
"""{sample size in bytes: alternative criteria (share, lead, different)}. A criterion is met if a language's function
words make up `share` of all words, are `lead` times as frequent as those of the next language, include `different`
distinct words, and reach half of `share` in the majority of locations. If no criterion is met, the next larger sample
is used."""
IDEOGRAM = re.compile(rb"[\xe0\xe1\xe3-\xed]")
"""First UTF-8 bytes of letters in scripts that may omit spaces. Excludes 0xE2, which begins punctuation."""
WITHOUT_SPACES = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
"""Letters in scripts without spaces. lingua ignores them next to other letters."""
CODE_OR_TABLE = "code or table"


@dataclass(frozen=True)
class LanguageFilter(CleaningStage):
    """Keeps documents in these languages (ISO 639-1 codes separated by +).

    `minimum` is the minimum confidence, and `characters` the sample size for lingua. If `code` is True, code and
    tables are kept in any language.
    """

    label: ClassVar[str] = "language"
    languages: tuple[str, ...]
    minimum: float = 0.65
    characters: int = 200
    code: bool = False

    def __post_init__(self) -> None:
        known = lingua_languages()
        problems = [
            f"--filter language: {language}: unknown language{did_you_mean(language, known)}"
            for language in self.languages
            if language not in known
        ]
        if problems:
            raise InputError(*problems)

    def judge(self, batch: TextBatch) -> Verdicts:
        wanted = {CODE_OR_TABLE, *(ALIKE.get(language, language) for language in self.languages)}
        found = []
        for number, text in enumerate(batch.texts):
            if self.code and batch.forms[number] >= CODE:
                found.append((CODE_OR_TABLE, 1.0))
            elif language := certain_language(text):
                found.append((language, 1.0))
            else:
                found.append(detect_by_lingua(sample_of(text, self.characters)))
        verdicts = Verdicts(values={"language": [language for language, _ in found]})
        for number, (language, confidence) in enumerate(found):
            if language not in wanted:
                verdicts.removed[number] = language
            elif confidence < self.minimum:
                verdicts.removed[number] = "uncertain"
                # Round, because lingua's last digits aren't reproducible.
                verdicts.measured[number] = round(confidence, 4), self.minimum
        return verdicts


def certain_language(text: bytes) -> str | None:
    """Detects a document's language from its function words. Returns None if they are unclear."""
    places = PLACES if len(text) > min(LOOKS) else 1
    for size, looks in LOOKS.items():
        each = min(size, len(text)) // places
        samples = [text[middle - each // 2 :][:each].lower() for middle in middles(len(text), places)]
        words = [sample.split() for sample in samples]
        counts = [Counter(itertools.chain.from_iterable(LANGUAGES_OF.get(w, ()) for w in found)) for found in words]
        totals = [len(found) + len(IDEOGRAM.findall(s)) for found, s in zip(words, samples, strict=True)]
        frequent = sum(counts, Counter()).most_common(2)
        if sum(totals) < LEAST_WORDS or not frequent:
            continue
        best, most = frequent[0]
        second = frequent[-1][1] if len(frequent) > 1 else 0
        distinct = len(WORDS_OF[best].intersection(itertools.chain.from_iterable(words)))
        for share, lead, least_different in looks:
            agree = sum(2 * count[best] >= share * total for count, total in zip(counts, totals, strict=True))
            is_frequent = most >= share * sum(totals) and most >= lead * second
            if is_frequent and 2 * agree > places and distinct >= least_different:
                return best
    return None


def middles(length: int, places: int) -> list[int]:
    """Returns evenly spaced locations in a document."""
    return [length * (2 * place + 1) // (2 * places) for place in range(places)]


def sample_of(text: bytes, characters: int) -> str:
    """Samples about this many characters at evenly spaced locations. Returns shorter documents in full."""
    each = max(1, characters // PLACES)
    if len(text) > 16 * characters:
        # Sample long documents at byte offsets, to avoid decoding them completely.
        starts = [middle - each // 2 for middle in middles(len(text), PLACES)]
        parts = [text[start : start + 4 * each].decode(errors="ignore")[:each] for start in starts]
    else:
        decoded = text.decode()
        if len(decoded) <= characters:
            return " ".join(decoded.split())
        parts = [decoded[middle - each // 2 :][:each] for middle in middles(len(decoded), PLACES)]
    without = [part for part in parts if 3 * len(WITHOUT_SPACES.findall(part)) > len(part)]
    most = without if 2 * len(without) > len(parts) else [part for part in parts if part not in without]
    return " ".join(" ".join(most).split())


def detect_by_lingua(sample: str) -> tuple[str, float]:
    """Detects a sample's language with lingua. Returns (language, confidence)."""
    values = _lingua_detector().compute_language_confidence_values(sample)
    codes = [value.language.iso_code_639_1.name.lower() for value in values]
    language = codes[0]
    confidence = values[0].value
    if language in ALIKE:
        confidence = sum(value.value for value, code in zip(values, codes, strict=True) if code in ALIKE)
    return (ALIKE.get(language, language), confidence) if confidence else ("unknown", 0.0)


@functools.cache
def _lingua_detector() -> Any:
    from lingua import LanguageDetectorBuilder

    # Low-accuracy mode uses only trigrams. The other models need 1.5 GB of memory and help only with short text.
    builder = LanguageDetectorBuilder.from_all_languages().with_low_accuracy_mode()
    return builder.with_preloaded_language_models().build()


def lingua_languages() -> set[str]:
    """Returns the language codes that lingua supports."""
    from lingua import Language

    return {language.iso_code_639_1.name.lower() for language in Language.all()}
