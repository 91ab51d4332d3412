"""Defines the preparation request, and checks that it matches an existing folder."""

import json
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pretrain.data.manifest import dtype_for
from pretrain.data.tokenizer import LoadedTokenizer
from pretrain.errors import InputError, shortened
from pretrain.registry import digest_of, load_extensions
from pretrain_tools.preparation.cleaning.near_duplicates import NearDuplicates
from pretrain_tools.preparation.cleaning.stages import Cleaning
from pretrain_tools.preparation.documents.hub_dataset import HubDataset
from pretrain_tools.preparation.documents.records import Reading
from pretrain_tools.preparation.documents.sources import Files
from pretrain_tools.preparation.upload import Destination
from pretrain_tools.preparation.validation_split import ValidationSplit, split_with_tail

SHOWN_DIFFERENCES = 8
FREE_OPTIONS = ("on_error", "max_errors")
"""Options that may change until a folder is finished."""
Documents = Files | HubDataset


@dataclass(frozen=True)
class PreparationOptions:
    """Options that affect the output, other than the documents and the tokenizer. None means no limit."""

    reading: Reading = field(default_factory=Reading)
    format: str | None = None
    validation_fraction: float = 0.01
    shard_tokens: int = 100_000_000
    max_documents: int | None = None
    max_tokens: int | None = None
    on_error: str = "stop"
    max_errors: int = 100
    deduplicate: bool = False
    near_duplicates: NearDuplicates | None = None
    cleaning: Cleaning | None = None
    write_text: bool = False
    slice: str | None = None
    extensions: tuple[str, ...] = ()
    """Python files that define file formats."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Loads the extensions, because only forked workers inherit them."""
        load_extensions(state["extensions"])
        self.__dict__.update(state)

    def as_plan(self) -> dict[str, Any]:
        """Returns the manifest entry for the options."""
        # Exclude the stages, because asdict would copy their large indices.
        fields = asdict(replace(self, cleaning=None))
        by_name: dict[str, list[Path]] = {}
        for file in map(Path, self.extensions):
            by_name.setdefault(file.name, []).append(file)
        fields["extensions"] = {name: digest_of(files) for name, files in by_name.items()} or None
        fields["cleaning"] = self.cleaning and self.cleaning.as_plan()
        fields["near_duplicates"] = self.near_duplicates and self.near_duplicates.as_plan()
        reading = fields.pop("reading")
        reading["only"] = reading["only"] or None
        # Store disabled options as None, so that folders made before these options existed still match.
        fields |= {name: fields[name] or None for name in ("deduplicate", "write_text")}
        # Convert tuples to lists, as in a manifest.
        return json.loads(json.dumps({**reading, **fields}))


@dataclass(frozen=True)
class PreparationRequest:
    """A request to prepare the folder `output` and upload it to `destination`, if given.

    If `vocabulary_size` is set, trains a tokenizer instead (or extends `tokenizer`) on at most `sample_bytes` of text.
    `workers` is None for one worker per CPU core in the Ray cluster.
    """

    documents: Documents
    options: PreparationOptions
    tokenizer: LoadedTokenizer | None
    output: Path
    engine: str = "auto"
    workers: int | None = 1
    on_ray: bool = False
    ray_address: str | None = None
    merge_slices: int | None = None
    vocabulary_size: int | None = None
    sample_bytes: int | None = None
    pre_tokenizer: str | None = None
    special_tokens: tuple[str, ...] = ()
    destination: Destination | None = None

    @cached_property
    def split(self) -> ValidationSplit:
        """The validation split. If there are few plain-text files, it may be the tail of one of them."""
        fraction = self.options.validation_fraction
        reading = self.options.reading
        if fraction and isinstance(self.documents, Files) and self.documents.are_whole_documents(reading):
            return split_with_tail(self.documents.texts(reading), fraction)
        return ValidationSplit(fraction)

    def plan(self) -> dict[str, Any]:
        """Returns the manifest entries for everything that affects the output."""
        return {
            "tokenizer": {"name": self.tokenizer.name, "sha256": self.tokenizer.sha256},
            "vocabulary_size": self.tokenizer.vocabulary_size,
            "end_of_document_id": self.tokenizer.end_of_document_id,
            "dtype": dtype_for(self.tokenizer.vocabulary_size),
            "options": self.options.as_plan(),
            "sources": self.documents.description(),
            **self.split.as_plan(),
        }


def refuse_other_files(output: Path, ours: str) -> None:
    """Raises InputError if `output` is a file, or a nonempty folder that doesn't contain `ours`."""
    if output.is_file():
        raise InputError(f"--output {output}: must be a folder, but is a file")
    others = sorted(path.name for path in output.iterdir()) if output.is_dir() else []
    if others and ours not in others:
        raise InputError(
            f"--output {output}: already contains other files ({', '.join(others[:5])}); use a new or empty folder"
        )


def refuse_differences(
    output: Path, made_from: dict[str, Any], plan: dict[str, Any], how: str, *, is_resumed: bool = False
) -> None:
    """Raises InputError if `plan` differs from the existing folder's plan.

    is_resumed: True if the folder's positions are used. FREE_OPTIONS may differ, but the sources must also be in the
    same order, because positions refer to it. The order depends on how their paths are written.
    """
    recorded = made_from.get("options") or {}
    # Ignore options that this version doesn't have.
    options = {name: recorded.get(name) for name in plan["options"]}
    before = _flat({name: made_from.get(name) for name in plan} | {"options": options, "sources": None})
    now = _flat(plan | {"sources": None})
    ignored = {f"options.{name}" for name in FREE_OPTIONS if is_resumed}
    differences = [
        f"{name} was {shortened(repr(before.get(name)))} but is now {shortened(repr(now.get(name)))}"
        for name in before | now
        if before.get(name) != now.get(name) and name not in ignored
    ]
    sources = made_from.get("sources") or []
    changes = source_differences(sources, plan["sources"])
    if is_resumed and not changes and [one["path"] for one in sources] != [one["path"] for one in plan["sources"]]:
        changes = ["the order of the sources has changed"]
    differences += changes
    if differences:
        shown = "; ".join(differences[:SHOWN_DIFFERENCES])
        raise InputError(
            f"{output}: {how} with different options or input: {shown}; use a new --output, or remove this folder"
        )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested entries to {dotted name: value}. For a list of named entries, also gives the names in order."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) and "name" in item for item in value):
            flat[prefix + name] = [item["name"] for item in value]
            value = {item["name"]: item for item in value}
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def source_differences(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    """Describes sources that were added, removed or changed."""
    old = {source["path"]: source for source in before}
    new = {source["path"]: source for source in now}
    return [
        *(f"source {path} was added" for path in new if path not in old),
        *(f"source {path} was removed" for path in old if path not in new),
        *(f"source {path} has changed" for path in new if path in old and old[path] != new[path]),
    ]
