"""Tables of optimizers, schedules and other entries that recipes refer to by name.

Extensions and code in a model folder can add entries. Built-in entries are 'module:name' strings, so that checking a
recipe doesn't import them. To add your own class, register it with a decorator:

    from pretrain.registry import OPTIMIZERS

    @OPTIMIZERS.register("mine")
    class MineSpec(OptimizerSpec): ...
"""

import hashlib
import importlib
import sys
from collections import UserDict
from collections.abc import Callable, Iterable
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, TypeVar

from pretrain.errors import OWN_FOLDERS, InputError, did_you_mean, error_in_file, shortened

_Entry = TypeVar("_Entry")


class Table(UserDict[str, Any]):
    """{name in a recipe: class or function}. Built-in entries are imported on first use."""

    def __init__(self, kind: str, own: dict[str, str], base: str | None = None, needs: tuple[str, str] | None = None):
        """Creates a table with the built-in entries `own`.

        Args:
            base: 'module:name' of the class that entries must inherit from. None for functions.
            needs: (attribute that entries must have, what sets it).
        """
        super().__init__(own)
        self.kind = kind
        self._base = base
        self._needs = needs
        self._files: dict[str, str] = {}

    def register(self, name: str) -> Callable[[_Entry], _Entry]:
        """Returns a decorator that registers a class or function as `name`.

        Raises InputError if the name is taken, and TypeError like `entries.check_entry`.
        """

        def add(entry: _Entry) -> _Entry:
            from pretrain.entries import check_entry

            check_entry(entry, self.kind, self._base and resolve_name(self._base), self._needs)
            file = sys.modules[entry.__module__].__file__ or entry.__module__
            if name in self.data and self._files.get(name) != file:
                raise InputError(f"{file}: {self.kind} {name} already exists; use another name")
            self.data[name] = entry
            self._files[name] = file
            return entry

        return add

    def checked(self, name: str) -> str:
        """Returns the name if it is in the table, otherwise raises ValueError."""
        if name not in self.data:
            raise ValueError(f"{name!r} is not {self.kind}, and no extension adds it{did_you_mean(name, self)}")
        return name

    def __getitem__(self, name: str) -> Any:
        entry = self.data[name]
        return resolve_name(entry) if isinstance(entry, str) else entry


OPTIMIZERS = Table(
    "an optimizer",
    {
        "adamw": "pretrain.optim.optimizers:AdamWSpec",
        "adafactor": "pretrain.optim.adafactor:AdafactorSpec",
        "muon": "pretrain.optim.muon:MuonSpec",
        "adamw_8bit": "pretrain.optim.adamw_8bit:AdamW8bitSpec",
    },
    base="pretrain.optim.optimizers:OptimizerSpec",
)
"""Subclasses of `optim.optimizers.OptimizerSpec`."""
SCHEDULES = Table(
    "a schedule",
    {
        "cosine": "pretrain.optim.learning_rate:cosine",
        "linear": "pretrain.optim.learning_rate:linear",
        "constant": "pretrain.optim.learning_rate:constant",
        "wsd": "pretrain.optim.learning_rate:warmup_stable_decay",
        "infinite": "pretrain.optim.learning_rate:infinite",
    },
)
"""Functions (schedule, step) -> fraction of the peak learning rate; see `optim.learning_rate`."""
LOSS_TERMS = Table("a loss term", {}, base="pretrain.model.loss_terms:LossTerm")
"""Subclasses of `model.loss_terms.LossTerm`."""
SAMPLERS = Table(
    "a sampling method",
    {
        "epochs": "pretrain.data.sampling:epochs",
        "best_fit": "pretrain.data.packing:best_fit",
        "random_windows": "pretrain.data.sampling:random_windows",
    },
)
"""Functions (draws, stream) -> first tokens of windows; see `data.sampling`."""
TRANSFORMATIONS = Table("a data transformation", {}, base="pretrain.data.transformations:Transformation")
"""Subclasses of `data.transformations.Transformation`."""
ARCHITECTURES = Table("an architecture", {})
"""{model_type: causal language model}. pretrain.model.architectures registers them with transformers."""
FORMATS = Table("a document format", {}, needs=("suffixes", "@file_format(...) below @FORMATS.register"))
"""Functions (stream, reading) -> records. pretrain_tools.preparation.documents.formats adds the built-in ones."""
TASKS = Table("a task", {})
"""Functions (model, tokenizer) -> {metric: value}. Tasks for evaluate.py in addition to lm-eval's."""
TRACKERS = Table("a tracker", {}, base="accelerate.tracking:GeneralTracker")
"""Subclasses of accelerate's GeneralTracker, in addition to accelerate's own."""

EXTENSIONS: list[str] = []
"""Paths of the loaded extensions."""
LOADED_CODE: dict[str, str] = {}
"""{loaded file or folder: first 16 hex digits of its sha256}, recorded in checkpoints."""


def import_file(path: Path, package: str) -> ModuleType:
    """Imports a file as a module of `package`. Relative imports (`from .other import X`) work within its folder.

    For any error in the file, raises InputError with file, line and message.
    """
    path = path.absolute()
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    if package not in sys.modules:
        folder = ModuleType(package)
        folder.__path__ = [str(path.parent)]
        sys.modules[package] = folder
    OWN_FOLDERS.add(path.parent)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # __pycache__ would damage a checkpoint
    try:
        return importlib.import_module(f"{package}.{path.stem}")
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise InputError(error_in_file(error, path)) from error
    finally:
        sys.dont_write_bytecode = before


def load_extensions(files: Iterable[str]) -> None:
    """Imports extensions, each only once. Raises InputError like `import_file`."""
    for file in files:
        path = Path(file)
        if path.suffix != ".py" or not path.is_file():
            raise InputError(f"extensions: {file}: no such Python file")
        digest = digest_of([path])
        # The package name contains the hash, so that a file is imported again only if it has changed.
        import_file(path, f"groundwork_extension_{digest}")
        if (loaded := str(path.absolute())) not in EXTENSIONS:
            EXTENSIONS.append(loaded)
        same_name = [other for other in map(Path, EXTENSIONS) if other.name == path.name]
        LOADED_CODE[f"extension {path.name}"] = digest_of(same_name)


def check_options(kind: str, options_class: Any, given: dict[str, Any]) -> Any:
    """Validates an entry's options with its pydantic `Options` class. Raises ValueError listing all problems."""
    from pydantic import ValidationError

    if options_class is None:
        if given:
            raise ValueError(f"{kind} takes no options (got {', '.join(given)})")
        return None
    try:
        return options_class.model_validate(given)
    except ValidationError as error:
        said = []
        for problem in error.errors():
            path = ".".join(map(str, problem["loc"]))
            if problem["type"] == "extra_forbidden":
                said.append(f"{kind} has no option {path}{did_you_mean(path, options_class.model_fields)}")
            else:
                said.append(f"{kind}: {path}: {problem['msg']} (got {shortened(repr(problem['input']), 60)})")
        raise ValueError("; ".join(said)) from None


def check_entries(setting: str, table: Table, given: dict[str, dict[str, Any] | None]) -> None:
    """Checks a setting of the form {name: options or None}. Raises ValueError for an unknown name or option."""
    for name, options in given.items():
        check_options(f"{setting}.{name}", table[table.checked(name)].Options, options or {})


def digest_of(files: Iterable[Path]) -> str:
    """Hashes the files' names and contents, regardless of their order."""
    whole = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.name):
        whole.update(f"{path.name}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()[:16]
