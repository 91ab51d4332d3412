"""Parses --filter, and loads user-defined filter functions."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import TypeAdapter, ValidationError

from pretrain.errors import InputError, Problems, did_you_mean, one_line
from pretrain.files import sha256_of
from pretrain.registry import import_file
from pretrain_tools.preparation.cleaning.language import LanguageFilter
from pretrain_tools.preparation.cleaning.personal_data import PersonalData
from pretrain_tools.preparation.cleaning.published import C4Quality, FineWebQuality, GopherQuality, GopherRepetition
from pretrain_tools.preparation.cleaning.quality_classifier import ClassifierFilter
from pretrain_tools.preparation.cleaning.stages import Cleaning, CleaningStage, TextBatch, Verdicts

CLASSES = (
    GopherQuality, GopherRepetition, C4Quality, FineWebQuality, LanguageFilter, PersonalData, ClassifierFilter
)  # fmt: skip
FILTERS: dict[str, type] = {filter_class.label: filter_class for filter_class in CLASSES}
"""{name: filter class}. The dataclass fields are the filter's parameters."""
OFF = "off"
"""Value that turns a rule off."""


def read_cleaning(
    given: Sequence[str], languages: str | None = None, clean: bool = False, has_urls: bool = True
) -> Cleaning | None:
    """Creates the stages for --language, --clean and --filter, in this order, or None if there are none.

    A filter passed with --filter replaces the --clean filter with the same name. Raises InputError listing all
    problems.
    """
    problems = Problems()
    stages = [problems.attempt(parse_filter, text) for text in given]
    labels = [stage.label for stage in stages if stage]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    problems += [f"--filter {label}: specified twice; remove one of them" for label in twice]
    for stage in stages:
        if isinstance(stage, UserFunction) and stage.takes_url and not has_urls:
            problems.append(f"--filter {stage.label}(text, url): requires --url_field FIELD, the field with the URL")
    first = []
    if languages is not None or clean:
        names = tuple(("en" if languages is None else languages).split(","))
        first.append(problems.attempt(LanguageFilter, names, code=clean))
        first += sensible_set(names == ("en",)) if clean else []
    problems.stop_if_any()
    stages = [stage for stage in first if stage.label not in labels] + stages
    return Cleaning(tuple(stages)) if stages else None


def sensible_set(is_english: bool) -> list[CleaningStage]:
    """Returns the filters for --clean: FineWeb's filters with its parameters. Checks stop words only in English.

    Unlike FineWeb, checks quality first, because checking repetition is slower. Both orders keep the same documents.
    """
    return [
        GopherQuality(max_words=None, min_stop_words=2 if is_english else None),
        GopherRepetition(),
        C4Quality(endings=False, max_curly_brackets=0.005),
        FineWebQuality(),
        PersonalData(),
    ]


def parse_filter(text: str) -> CleaningStage:
    """Parses 'gopher_quality', 'gopher_quality(min_words=30, max_symbols=off)' or 'mine.py:keep'.

    A value can be a number, off, a word, or several words separated by +. A value without a name sets the first
    parameter. Raises InputError.
    """
    if re.fullmatch(r".*\.py:\w+", text):
        return UserFunction.load(text)
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    if match is None:
        raise InputError(f"--filter {text}: must be NAME, NAME(parameter=value, ...) or FILE.py:FUNCTION")
    name, inside = match.groups()
    if name not in FILTERS:
        raise InputError(f"--filter {text}: no such filter{did_you_mean(name, FILTERS)}")
    fields = {field.name: field.type for field in dataclasses.fields(FILTERS[name])}
    values = {}
    problems = Problems()
    for part in filter(None, map(str.strip, (inside or "").split(","))):
        parameter, equals, value = map(str.strip, part.partition("="))
        if not equals:
            parameter, value = next(iter(fields), ""), parameter
        if parameter not in fields:
            problems.append(f"--filter {text}: {name} has no parameter {parameter!r}{did_you_mean(parameter, fields)}")
        elif parameter in values:
            problems.append(f"--filter {text}: {parameter} is specified twice; remove one of them")
        elif value == OFF and fields[parameter] is not bool:
            values[parameter] = None
        else:
            values[parameter] = tuple(value.split("+")) if "tuple" in str(fields[parameter]) else value
    problems.stop_if_any()
    try:
        return TypeAdapter(FILTERS[name]).validate_python(values)
    except ValidationError as error:
        wrong = [f"--filter {text}: {problem['loc'][0]}: {problem['msg']}" for problem in error.errors()]
        raise InputError(*wrong) from None


@dataclass(frozen=True)
class UserFunction(CleaningStage):
    """A user-defined filter, as in `--filter mine.py:keep`.

    keep(text) returns True to keep the document, False to remove it, or its new text. If the function has a parameter
    `url`, it is called with the URL from --url_field. The result must depend only on the arguments.
    """

    path: str
    function: str
    sha256: str
    """Hash of the file."""

    @classmethod
    def load(cls, given: str) -> Self:
        """Loads 'FILE.py:FUNCTION'. Raises InputError if the function doesn't exist."""
        path, _, function = given.rpartition(":")
        if "." in Path(path).stem:
            raise InputError(f"--filter {given}: the name of a Python module must not contain dots; rename {path}")
        try:
            sha256 = sha256_of(Path(path))
        except OSError as error:
            raise InputError(f"--filter {given}: {path}: {error.strerror}; must be FILE.py:FUNCTION") from None
        _load_function(path, function, sha256)
        return cls(path, function, sha256)

    @property
    def label(self) -> str:
        return f"{Path(self.path).stem}.{self.function}"

    @cached_property
    def takes_url(self) -> bool:
        """True if the function has a parameter `url`."""
        return "url" in inspect.signature(_load_function(self.path, self.function, self.sha256)).parameters

    def as_plan(self) -> dict[str, Any]:
        return {"name": f"{Path(self.path).name}:{self.function}", "sha256": self.sha256}

    def compile(self) -> None:
        """Does nothing, because only real documents should reach the function."""

    def judge(self, batch: TextBatch) -> Verdicts:
        keep = _load_function(self.path, self.function, self.sha256)
        verdicts = Verdicts()
        for number, text in enumerate(batch.texts):
            more = {"url": batch.urls[number]} if self.takes_url else {}
            answer = self._answer(keep, text.decode(), more)
            if isinstance(answer, bytes):
                if answer != text:
                    verdicts.changed[number] = answer
            elif not answer:
                verdicts.removed[number] = ""
        return verdicts

    def _answer(self, keep: Callable[..., Any], text: str, more: dict[str, str | None]) -> bool | bytes:
        try:
            answer = keep(text, **more)
            if isinstance(answer, str):
                return answer.encode()  # fails for lone surrogates
        except Exception as error:  # user code may raise anything
            raise InputError(
                f"--filter {self.path}:{self.function}: failed with {one_line(error)} for the "
                f"text {text[:80]!r}; fix the function, then run the same command with a new output folder"
            ) from None
        if not isinstance(answer, bool | np.bool):
            raise InputError(
                f"--filter {self.path}:{self.function}: must return True, False or a str, but returned {answer!r} for "
                f"the text {text[:80]!r}"
            )
        return answer


def _load_function(path: str, function: str, sha256: str) -> Callable[..., Any]:
    """Loads a function from a Python file. sha256: hash of the file. A changed file is loaded again."""
    module = import_file(Path(path), f"groundwork_filter_{sha256[:8]}")
    found = getattr(module, function, None)
    if not callable(found):
        functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise InputError(f"--filter {path}:{function}: no such function{did_you_mean(function, functions)}")
    return found
