"""Tokenizes documents into a folder of shards. An interrupted preparation can be resumed.

Until the folder is complete, `.unfinished/` contains the plan, the progress and a lock file. The manifest is written
last.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.manifest import MANIFEST_FILE, SHARDS_FORMAT, SPLITS, TOKENIZER_FOLDER, Manifest, Shard, counts_in
from pretrain.data.shards import read_manifest
from pretrain.errors import InputError, UnreachableError
from pretrain.files import as_json, delete, sync_folder, write_durably
from pretrain.processes import folder_lock
from pretrain.terminal import say
from pretrain_tools.preparation.cleaning.account import SAMPLES_FILE
from pretrain_tools.preparation.collector import NO_PROGRESS, PROGRESS_FILE, UNFINISHED_FOLDER, Intake
from pretrain_tools.preparation.documents.sources import Position
from pretrain_tools.preparation.encode import DisagreementError, ReferenceEncoder, make_encoder
from pretrain_tools.preparation.encoded_part import EncodedPart, Tally
from pretrain_tools.preparation.near_duplicate_search import NEAR_DUPLICATES_FILE, STAGES, DuplicateSearch
from pretrain_tools.preparation.plan import (
    PreparationRequest,
    refuse_differences,
    refuse_other_files,
    source_differences,
)
from pretrain_tools.preparation.progress import Progress
from pretrain_tools.preparation.slices import merged_parts, require_slices
from pretrain_tools.preparation.worker import PartEncoder
from pretrain_tools.preparation.workers import Perform, performed, performed_on_ray

FIRST_PASS = "documents"
"""Subfolder of `.unfinished` with all documents, before near duplicates are removed."""
PLAN_LAYOUT = 7
COMMIT_SECONDS = 2.0


@dataclass(frozen=True)
class PreparationOutcome:
    """Result of a preparation. `already_done` is True if the folder was already complete."""

    manifest: Manifest
    already_done: bool


Report = Callable[[Tally], None]


def prepare(request: PreparationRequest, report: Report = lambda tally: None) -> PreparationOutcome:
    """Prepares the folder `request.output`, or resumes it. Does nothing if the folder is already complete.

    Raises InputError if the input is unusable or the folder was made with different options or input. After a
    KeyboardInterrupt at any moment, the same call resumes it.
    """
    output = request.output
    plan = request.plan()
    state_folder = output / UNFINISHED_FOLDER
    finished = _finished(output, plan)
    if finished is not None and not state_folder.exists():
        return finished
    slices = require_slices(request, plan)
    existed = output.is_dir()
    refuse_other_files(output, UNFINISHED_FOLDER)
    try:
        state_folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(state_folder / "lock"):
            # Another process may have finished the folder in the meantime, or died before this cleanup.
            finished = _finished(output, plan)
            if finished is not None:
                shutil.rmtree(state_folder, ignore_errors=True)
                return finished
            run = _Run(request, plan, slices, report)
            was_begun = run.plan_path.exists()
            try:
                return PreparationOutcome(run.complete(), already_done=False)
            except InputError:
                # Keep work from earlier processes, and work committed by this one.
                if not (was_begun or run.progress_path.exists() or (state_folder / FIRST_PASS).exists()):
                    # The folder was new or empty.
                    for path in output.iterdir():
                        delete(path)
                    if not existed:
                        output.rmdir()
                raise
    except UnreachableError:
        raise
    except OSError as error:
        name = f" ({error.filename})" if error.filename else ""
        raise InputError(
            f"{output}: {error.strerror or error}{name}; free up space or fix permissions, then run the same command "
            "again to resume"
        ) from error


def _finished(output: Path, plan: dict[str, Any]) -> PreparationOutcome | None:
    if not (output / MANIFEST_FILE).is_file():
        return None
    refuse_differences(output, json.loads((output / MANIFEST_FILE).read_bytes()), plan, "was finished")
    return PreparationOutcome(read_manifest(output), already_done=True)


@dataclass
class _Run:
    """Prepares an unfinished folder. The caller must hold its lock."""

    request: PreparationRequest
    plan: dict[str, Any]
    slices: list[Path]
    report: Report

    def __post_init__(self) -> None:
        self.options = self.request.options
        self.output = self.request.output
        self.state_folder = self.output / UNFINISHED_FOLDER
        self.plan_path = self.state_folder / "plan.json"
        self.progress_path = self.state_folder / PROGRESS_FILE
        self.removed: np.ndarray | None = None
        """(documents in all slices,) bool: True for near duplicates to remove."""

    def complete(self) -> Manifest:
        """Tokenizes the remaining documents and writes the manifest."""
        tokenizer = self.request.tokenizer
        progress = self._load_progress()
        if progress is NO_PROGRESS:
            folder = self.output / TOKENIZER_FOLDER
            tokenizer.save(folder)
            for path in [*folder.iterdir(), folder]:
                sync_folder(path)
            # Write the plan after the tokenizer, so that a folder with a plan always contains a tokenizer.
            write_durably(self.plan_path, as_json({"layout": PLAN_LAYOUT, **self.plan}))
        else:
            say(f"{self.output}: resuming after {progress['tally']['documents']:,} documents", sys.stderr)
        if self.options.near_duplicates is not None and self.options.slice is None:
            self._find_near_duplicates()
        encoder = None
        if not self.slices:  # documents in slices are already tokenized
            encoder, reason = make_encoder(tokenizer, self.request.engine)
            if reason:
                say(f"using the tokenizers library: {reason}", sys.stderr)
        try:
            tally, shards = self._tokenize(progress, encoder)
        except DisagreementError as error:
            say(f"starting over with the tokenizers library: {error}", sys.stderr)
            self.progress_path.unlink(missing_ok=True)
            tally, shards = self._tokenize(NO_PROGRESS, ReferenceEncoder(tokenizer))
        return self._finish(tally, shards)

    def _find_near_duplicates(self) -> None:
        """Finds the near duplicates to remove. If there are no slices, first prepares a folder with all documents."""
        options = self.options
        if not self.slices:
            self.slices = [self.state_folder / FIRST_PASS]
            label = "all documents, before near duplicates are left out"
            all_options = replace(options, slice=label)
            prepare(replace(self.request, output=self.slices[0], options=all_options), self.report)
        manifests = [read_manifest(folder) for folder in self.slices]
        work = self.state_folder / "near_duplicates"
        search = DuplicateSearch(manifests, options.near_duplicates, work, self.request.tokenizer)
        for stage in STAGES:
            jobs = search.missing(stage)
            progress = Progress(len(jobs), " tasks", f"near duplicates, {stage}")
            with closing(progress), closing(self._performed(search.perform, jobs)) as tasks:
                for done, _ in enumerate(tasks, 1):
                    progress.update(done)
        duplicates = search.duplicates()
        write_durably(self.output / NEAR_DUPLICATES_FILE, as_json(search.report(duplicates)))
        self.removed = np.zeros(search.order.documents, bool)
        self.removed[duplicates["document"]] = True

    def _load_progress(self) -> dict[str, Any]:
        if not self.plan_path.is_file():
            return NO_PROGRESS
        try:
            earlier = json.loads(self.plan_path.read_bytes())
            progress = json.loads(self.progress_path.read_bytes()) if self.progress_path.is_file() else NO_PROGRESS
        except ValueError as error:
            raise InputError(
                f"{self.output}: the progress file is damaged ({error}); remove the folder and start over"
            ) from None
        if earlier.pop("layout", None) != PLAN_LAYOUT:
            raise InputError(
                f"{self.output}: was started by a different version of Groundwork; remove it and prepare it again"
            )
        refuse_differences(self.output, earlier, self.plan, "was started", is_resumed=True)
        return progress

    def _tokenize(self, progress: dict[str, Any], encoder: ReferenceEncoder | None) -> tuple[Tally, list[Shard]]:
        options = self.options
        if self.slices:
            # The slices already respect the limits.
            options = replace(options, max_documents=None, max_tokens=None)
        intake = Intake(self.output, self.plan, options, progress)
        committed = time.monotonic()
        try:
            with closing(self._encoded(intake.position, encoder)) as parts:
                for encoded in parts:
                    intake.add(encoded)
                    self.report(intake.tally)
                    if intake.is_complete:
                        break
                    if time.monotonic() - committed > COMMIT_SECONDS:
                        intake.commit()
                        committed = time.monotonic()
            if not intake.tally.documents and options.slice is None:
                # Otherwise the folder would be kept to resume from.
                shutil.rmtree(self.state_folder / FIRST_PASS, ignore_errors=True)
                raise InputError(self._nothing_found(intake.tally, intake.is_complete))
            return intake.tally, intake.writer.finish()
        except InputError:
            # Save the work done before the bad record.
            if intake.tally.documents:
                intake.commit()
            raise

    def _nothing_found(self, tally: Tally, is_first_too_long: bool) -> str:
        if is_first_too_long:
            limit = self.request.options.max_tokens
            return (
                f"the first document is longer than --max_tokens {limit:,}, so nothing was written; raise --max_tokens"
            )
        removed = sum(amounts["documents"] for amounts in tally.cleaning.removed.values())
        skipped = f"skipped {tally.skipped_text()}; {removed:,} removed by cleaning"
        if not removed:
            return f"the input contains no documents ({skipped}), so nothing was written; {tally.advice_if_empty()}"
        advice = "use --filter to change a filter's parameters"
        message = f"no documents are left ({skipped}), so nothing was written; {advice}"
        return "\n  ".join([message, *tally.cleaning.removed_whole_lines()])

    def _encoded(self, start: Position, encoder: ReferenceEncoder | None) -> Iterator[EncodedPart]:
        """Yields encoded parts, beginning at `start`, from slices, a Ray cluster or local processes."""
        request = self.request
        documents = request.documents
        reading = self.options.reading
        if self.slices:
            total_bytes = documents.total_bytes or 0
            return merged_parts(self.slices, start, total_bytes, self.removed)
        source_numbers = {source["path"]: number for number, source in enumerate(self.plan["sources"])}
        part_encoder = PartEncoder(request.tokenizer, encoder, self.options, request.split, source_numbers)
        if not request.on_ray:
            # Compile before forking. Otherwise each worker would compile the kernels itself.
            part_encoder.compile()
        return self._performed(part_encoder.encode, documents.parts(reading, start))

    def _performed(self, perform: Perform, jobs: Iterable[Any]) -> Iterator[Any]:
        """Runs jobs in local processes or on a Ray cluster, and yields the results in order."""
        request = self.request
        if request.on_ray:
            return performed_on_ray(perform, jobs, request.workers, request.ray_address)
        return performed(perform, jobs, request.workers)

    def _finish(self, tally: Tally, shards: list[Shard]) -> Manifest:
        changed = source_differences(self.plan["sources"], self.request.documents.description())
        if changed:
            raise InputError(
                f"{self.output}: the input changed while it was being read: {'; '.join(changed[:8])}; "
                "prepare it again with a new --output"
            )
        manifest = {**SHARDS_FORMAT, **self.plan}
        sources = manifest.pop("sources")
        manifest["shards"] = [asdict(shard) for shard in shards]
        manifest["totals"] = {split: counts_in(shards, split) for split in SPLITS}
        manifest["skipped"] = tally.skipped()
        if self.request.options.cleaning is not None:
            manifest["cleaning"] = tally.cleaning.as_manifest()
            write_durably(self.output / SAMPLES_FILE, as_json(tally.cleaning.samples))
        manifest["sources"] = sources
        # Write the manifest last, because it marks the folder as complete.
        sync_folder(self.output)
        write_durably(self.output / MANIFEST_FILE, as_json(manifest))
        shutil.rmtree(self.state_folder, ignore_errors=True)
        return read_manifest(self.output)
