"""Filters by name, with their numbers: what --filter may be given."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pretrain.errors import InputError, Problems, did_you_mean
from pretrain_tools.preparation.cleaning.language import LanguageFilter
from pretrain_tools.preparation.cleaning.lists import CharactersFilter, LengthFilter, PersonalData, UrlList, WordList
from pretrain_tools.preparation.cleaning.published import C4Quality, FineWebQuality, GopherQuality, GopherRepetition
from pretrain_tools.preparation.cleaning.quality_classifier import ClassifierFilter
from pretrain_tools.preparation.cleaning.stages import Cleaning, CleaningStage
from pretrain_tools.preparation.cleaning.user_function import UserFunction

CLASSES = (
    GopherQuality, GopherRepetition, C4Quality, FineWebQuality, LanguageFilter, LengthFilter, CharactersFilter,
    WordList, UrlList, PersonalData, ClassifierFilter,
)  # fmt: skip
FILTERS: dict[str, type] = {filter_class.name: filter_class for filter_class in CLASSES}
"""Frozen dataclasses that are stages: their fields are the parameters, each with a default or required."""
OFF = "off"
"""The value of a parameter that switches its rule off."""


def read_cleaning(
    given: Sequence[str], languages: str | None = None, clean: bool = False, has_urls: bool = True
) -> Cleaning | None:
    """The stages of `--filter`, in order, after those of `--language` and `--clean`; None without any.

    A filter that is given replaces the one of its name in the set of --clean. Raises InputError with everything that
    is wrong.
    """
    problems = Problems()
    stages = [stage for text in given if (stage := problems.attempt(parse_filter, text)) is not None]
    labels = [stage.label for stage in stages]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    problems += [f"--filter {label}: is given twice" for label in twice]
    if any(isinstance(stage, UrlList) for stage in stages) and not has_urls:
        problems.append("--filter url_list: needs --url_field FIELD, the field that holds the URL")
    if languages is not None or clean:
        names = tuple((languages or "en").split(","))
        judged = problems.attempt(LanguageFilter, names, code=clean)
        first = [judged, *(sensible_set(names == ("en",)) if clean else ())]
        stages = [stage for stage in first if stage is not None and stage.label not in labels] + stages
    problems.stop_if_any()
    return Cleaning(tuple(stages)) if stages else None


def sensible_set(is_english: bool) -> list[CleaningStage]:
    """The filters of --clean, FineWeb's with its numbers; stop words are counted in English only.

    FineWeb has repetition before quality: the same documents stay, but what quality removes would be searched in vain
    for repetition, which takes longer.
    """
    quality = GopherQuality(max_words=None)
    return [
        quality if is_english else replace(quality, min_stop_words=None),
        GopherRepetition(),
        C4Quality(endings=False, max_curly_brackets=0.005),
        FineWebQuality(),
        PersonalData(),
    ]


def parse_filter(text: str) -> CleaningStage:
    """'gopher_quality', 'gopher_quality(min_words=30, stop_words=off)' or 'mine.py:keep' -> the stage.

    A value is a number, off, a word, or several joined by +. One value without a name is the first parameter's.
    Raises InputError naming what is allowed.
    """
    if re.fullmatch(r".*\.py:\w+", text):
        return UserFunction.load(text)
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    if match is None:
        raise InputError(f"--filter {text}: must be NAME, NAME(parameter=value, ...) or FILE.py:FUNCTION")
    name, inside = match.groups()
    if name not in FILTERS:
        raise InputError(f"--filter {text}: no such filter{did_you_mean(name, FILTERS)}")
    fields = {field.name: field for field in dataclasses.fields(FILTERS[name])}
    values, problems = {}, Problems()
    for part in filter(None, map(str.strip, (inside or "").split(","))):
        parameter, equals, value = map(str.strip, part.partition("="))
        if not equals:
            parameter, value = next(iter(fields), ""), parameter
        if parameter not in fields:
            problems.append(f"--filter {text}: {name} has no parameter {parameter!r}{did_you_mean(parameter, fields)}")
        elif parameter in values:
            problems.append(f"--filter {text}: {parameter} is given twice")
        else:
            values[parameter] = problems.attempt(
                _value, f"--filter {text}: {parameter}", value, fields[parameter].type
            )
    missing = [f.name for f in fields.values() if f.default is dataclasses.MISSING and f.name not in values]
    problems += [f"--filter {text}: {name} needs {parameter}=..." for parameter in missing]
    problems.stop_if_any()
    return FILTERS[name](**values)


def _value(what: str, given: str, allowed: Any) -> Any:
    """A parameter's value, by its field's type: int, float, bool, str, tuple of str; `| None` where it may be off."""
    if allowed is bool:
        if given not in ("on", OFF):
            raise InputError(f"{what}={given}: must be on or {OFF}")
        return given != OFF
    if given == OFF:
        if type(None) not in getattr(allowed, "__args__", ()):
            raise InputError(f"{what}={given}: cannot be switched off")
        return None
    if allowed in (tuple[str, ...], tuple[str, ...] | None):
        return tuple(given.split("+"))
    for kind, noun in ((int, "a whole number"), (float, "a number")):
        if allowed in (kind, kind | None):
            try:
                return kind(given)
            except ValueError:
                off = "" if allowed is kind else f" or {OFF}"
                raise InputError(f"{what}={given}: must be {noun}{off}") from None
    return given
