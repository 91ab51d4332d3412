"""A filter of the user's own: a function of a document's text, in a file."""

import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pretrain.errors import InputError, did_you_mean, one_line
from pretrain_tools.preparation.cleaning.stages import TextBatch, Verdicts


@dataclass(frozen=True)
class UserFunction:
    """`--filter mine.py:keep`: keep(text) gives True to keep the document, False to remove it, or its new text.

    The function must depend on the text alone, or interruptions and workers would change the result.
    """

    path: str
    function: str
    sha256: str
    """Of the file: another content is another filter."""

    @classmethod
    def load(cls, given: str) -> Self:
        """From 'FILE.py:FUNCTION'. Raises InputError where there is no such function."""
        path, _, function = given.rpartition(":")
        try:
            sha256 = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except OSError as error:
            raise InputError(f"--filter {given}: {path}: {error.strerror}; give FILE.py:FUNCTION") from None
        stage = cls(path, function, sha256)
        stage._found()
        return stage

    @property
    def label(self) -> str:
        return f"{Path(self.path).stem}.{self.function}"

    def as_plan(self) -> dict[str, Any]:
        return {"name": f"{Path(self.path).name}:{self.function}", "sha256": self.sha256}

    def open(self) -> Callable[[TextBatch], Verdicts]:
        keep = self._found()

        def judge(batch: TextBatch) -> Verdicts:
            verdicts = Verdicts()
            for number, text in enumerate(batch.texts):
                answer = self._answer(keep, text.decode())
                if isinstance(answer, str):
                    if (changed := answer.encode()) != text:
                        verdicts.changed[number] = changed
                elif not answer:
                    verdicts.removed[number] = ""
            return verdicts

        return judge

    def _answer(self, keep: Callable[[str], Any], text: str) -> bool | str:
        try:
            answer = keep(text)
            if isinstance(answer, str):
                answer.encode()
        except Exception as error:  # whatever the user's code raises
            raise InputError(
                f"--filter {self.path}:{self.function}: {type(error).__name__}: {one_line(error)}, for the text "
                f"{text[:80]!r}; mend it, then run the same command in a new folder"
            ) from None
        if not isinstance(answer, bool | str) and type(answer).__name__ != "bool":  # numpy's is one as well
            raise InputError(
                f"--filter {self.path}:{self.function}: gave {answer!r} for the text {text[:80]!r}; "
                "must give True, False or a text"
            )
        return answer

    def _found(self) -> Callable[[str], Any]:
        spec = importlib.util.spec_from_file_location(Path(self.path).stem, self.path)
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # whatever the user's code raises
            raise InputError(f"--filter {self.path}: {type(error).__name__}: {one_line(error)}") from None
        found = getattr(module, self.function, None)
        if not callable(found):
            functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            near = did_you_mean(self.function, functions)
            raise InputError(f"--filter {self.path}:{self.function}: no such function{near}")
        return found
