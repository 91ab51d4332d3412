"""Documents by their language: by function words where these leave no doubt, else by lingua or a fastText model."""

import functools
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pretrain.errors import InputError, did_you_mean
from pretrain_tools.preparation.cleaning.published import NamedFilter
from pretrain_tools.preparation.cleaning.stages import TextBatch, Verdicts

FUNCTION_WORDS = {
    "en": "the of and to that is was with for you have this are from they which not be at it were but his or had by",
    "de": "der die und das ist nicht zu den mit sich auf ein eine für von auch dem es im wird werden dass aber",
    "fr": "le les et des est une dans que pour qui du au sur pas il avec ce sont plus cette ou par nous vous",
    "es": "el los las y es una por con para del que se lo como más pero sus este fue al ha son también",
    "it": "il di che è per un della non sono con gli del da una le alla dei nel anche più come si ha",
    "pt": "os não uma com para do da em dos que mais como foi ao pelo são também se na no das ou pela",
    "nl": "het een van en dat niet voor met zijn op te aan die ook naar maar door bij wordt deze uit er",
}
"""Frequent words by language; those that another of these has as well count for both."""
PLACES = 5
"""Of a document, in equal distances, that each sample is of: an excerpt or a table in the middle is not all of it."""
_ALIKE = {"id": "id/ms", "ms": "id/ms"}
"""Languages that lingua cannot tell apart: of Indonesian sentences it calls half Malay. Asking for one keeps both."""
LEAST_WORDS = 20
"""Of a sample, to say anything."""
LOOKS = ((600, 0.12, 2, 4), (4000, 0.12, 2, 4), (4000, 0.06, 8, 8), (20_000, 0.06, 8, 10))
"""(bytes of the sample, share, lead, different): a language is certain with that share of its words, `lead` times the
next one's, if so many of them are different and it has half of that share in most places; else the next look decides.
Tables and code leave fewer function words, but none of another language."""
_WITHOUT_SPACES = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
"""Letters of scripts that do not divide words: of a text that has others beside them, lingua sees the others."""

CODE_OR_TABLE = "code or table"


@dataclass(frozen=True)
class LanguageFilter(NamedFilter):
    """Keeps documents in these languages (ISO 639-1, joined by +), judged by a sample of places all over them.

    `minimum`: confidence. `model`: a fastText model for language identification, such as lid.176.ftz, instead of
    lingua. `characters`: the sample that either of the two sees. `code` on: code and tables stay unjudged.
    """

    name: ClassVar[str] = "language"
    languages: tuple[str, ...]
    minimum: float = 0.65
    characters: int = 200
    model: str | None = None
    code: bool = False

    def __post_init__(self) -> None:
        if self.model is not None:
            if not Path(self.model).is_file():
                raise InputError(f"--filter language: model={self.model}: no such file; give a fastText model")
            return
        known = set(_lingua_languages())
        problems = [
            f"--filter language: {language}: is not known{did_you_mean(language, known)}"
            for language in self.languages
            if language not in known
        ]
        if problems:
            raise InputError(*problems)

    def as_plan(self) -> dict[str, Any]:
        plan = super().as_plan()
        if self.model is not None:
            plan["model"] = {"name": Path(self.model).name, "sha256": _sha256(self.model)}
        return plan

    def preload(self) -> None:
        """lingua's models, for which other threads need not wait: reading them takes 0.4 s without Python."""
        if self.model is None:
            _lingua_detector()

    def open(self) -> Callable[[TextBatch], Verdicts]:
        detect = self._lingua() if self.model is None else self._fasttext()
        wanted, minimum = set(self.languages), self.minimum
        if self.model is None:
            wanted = {_ALIKE.get(language, language) for language in wanted}

        def judge(batch: TextBatch) -> Verdicts:
            certain = certain_languages(batch)
            unjudged = is_code_or_table(batch) if self.code else [False] * len(batch)
            found = [
                (CODE_OR_TABLE, 1.0) if skip else detect(self._sample(text)) if language is None else (language, 1.0)
                for text, language, skip in zip(batch.texts, certain, unjudged, strict=True)
            ]
            verdicts = Verdicts(values={"language": [language for language, _ in found]})
            for number, (language, confidence) in enumerate(found):
                if language not in wanted and language != CODE_OR_TABLE:
                    verdicts.removed[number] = language
                elif confidence < minimum:
                    verdicts.removed[number] = "uncertain"
                    # lingua's last digits differ from one call to the next.
                    verdicts.measured[number] = round(confidence, 4), minimum
            return verdicts

        certain_languages(TextBatch([b"compiled once, before workers are forked"], [None]))
        return judge

    def _sample(self, text: bytes) -> str:
        """So many characters, in equal parts from places all over a text, or all of a shorter one."""
        # A place among the bytes is near enough to one among the characters; of a short text the parts could overlap.
        units = text if len(text) > 16 * self.characters else text.decode()
        if len(units) <= self.characters:
            return " ".join(units.split())
        each = max(1, self.characters // PLACES)
        parts = []
        for place in range(PLACES):
            first = len(units) * (2 * place + 1) // (2 * PLACES) - each // 2
            part = units[first : first + (each if isinstance(units, str) else 4 * each)]
            parts.append((part if isinstance(part, str) else part.decode(errors="ignore"))[:each])
        without = [part for part in parts if 3 * len(_WITHOUT_SPACES.findall(part)) > len(part)]
        most = without if 2 * len(without) > len(parts) else [part for part in parts if part not in without]
        return " ".join(" ".join(most).split())

    def _lingua(self) -> Callable[[str], tuple[str, float]]:
        detector = _lingua_detector()

        def detect(sample: str) -> tuple[str, float]:
            values = detector.compute_language_confidence_values(sample)
            language, confidence = _code(values[0]), values[0].value
            if language in _ALIKE:
                confidence = sum(value.value for value in values if _code(value) in _ALIKE)
            return (_ALIKE.get(language, language), confidence) if confidence else ("unknown", 0.0)

        return detect

    def _fasttext(self) -> Callable[[str], tuple[str, float]]:
        try:
            import fasttext
        except ImportError:
            raise InputError("--filter language(model=...): needs fastText; pip install fasttext-predict") from None
        try:
            model = fasttext.load_model(self.model)
        except ValueError as error:
            raise InputError(f"--filter language: model={self.model}: is no fastText model ({error})") from None

        def detect(sample: str) -> tuple[str, float]:
            labels, confidences = model.predict(sample)
            return (labels[0].removeprefix("__label__"), float(confidences[0])) if labels else ("unknown", 0.0)

        return detect


def _code(value: Any) -> str:
    """The ISO 639-1 code of one of lingua's confidence values."""
    return value.language.iso_code_639_1.name.lower()


@functools.cache
def _lingua_detector() -> Any:
    from lingua import LanguageDetectorBuilder

    # Trigrams only: with the other models lingua takes 1.5 GB, and no less time, and these texts are not short.
    builder = LanguageDetectorBuilder.from_all_languages().with_low_accuracy_mode()
    return builder.with_preloaded_language_models().build()


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _lingua_languages() -> list[str]:
    try:
        from lingua import Language
    except ImportError:
        raise InputError("--filter language: needs lingua; pip install lingua-language-detector") from None
    return [language.iso_code_639_1.name.lower() for language in Language.all()]


@functools.cache
def _words_table() -> tuple[np.ndarray, np.ndarray]:
    from pretrain_tools.preparation.cleaning.compiled.function_words import word_table

    return word_table({language: of_language.split() for language, of_language in FUNCTION_WORDS.items()})


def is_code_or_table(batch: TextBatch) -> list[bool]:
    """Whether each text is code or a table, by its lines."""
    from pretrain_tools.preparation.cleaning.forms import CODE

    return (batch.forms >= CODE).tolist()


def certain_languages(batch: TextBatch) -> list[str | None]:
    """The language of each text whose function words leave no doubt."""
    from pretrain_tools.preparation.cleaning.compiled.function_words import certain_numbers

    found = certain_numbers(*batch.joined, _words_table(), LEAST_WORDS, LOOKS, PLACES)
    names = [*FUNCTION_WORDS, None]
    return [names[number] for number in found.tolist()]
