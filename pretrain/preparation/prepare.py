"""Documents to a folder of shards: the request, existing progress, and a preparation that resumes after a kill.

While it is unfinished, a folder has `.unfinished/` with the plan (what was asked for), the progress (how far shards
are sound) and the lock. The manifest is written last: without it, nothing counts as done.
"""

import json
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pretrain.data.manifest import FORMAT_NAME, FORMAT_VERSION, MANIFEST_FILE, SPLITS, TOKENIZER_FOLDER, Manifest
from pretrain.data.shards import read_manifest
from pretrain.data.tokenizer import LoadedTokenizer
from pretrain.errors import InputError
from pretrain.files import as_json, sync_files, sync_folder, write_durably
from pretrain.preparation.collector import DisagreementError, Intake, Tally
from pretrain.preparation.deduplicate import seen_in_shards
from pretrain.preparation.documents.sources import BEGINNING, Position
from pretrain.preparation.encode import Encoder, ReferenceEncoder, make_encoder
from pretrain.preparation.plan import Documents, PreparationOptions, plan_of, refuse_differences, source_differences
from pretrain.preparation.shard_writer import ShardWriter, shard_files
from pretrain.preparation.worker import EncodedPart, EncodingSettings, encode_parts
from pretrain.processes import folder_lock

UNFINISHED_FOLDER = ".unfinished"
PLAN_LAYOUT = 2
COMMIT_SECONDS = 2.0
SKIPPED_COUNTS = ("empty_documents", "filtered_documents", "duplicate_documents", "bad_records")


@dataclass(frozen=True)
class PreparationOutcome:
    """How a preparation ended. `already_done` means that nothing had to be made; seconds are this process's."""

    manifest: Manifest
    tally: Tally
    already_done: bool
    continued: bool
    seconds: float
    tokens_made: int
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each stage, added up over the processes: they overlap."""


class StoppedError(Exception):
    """A signal asked to stop; everything until then is kept. Holds the signal's number."""


Report = Callable[[Tally], None]
Encode = Callable[[Position, EncodingSettings], Iterator[EncodedPart]]


def prepare(
    documents: Documents,
    tokenizer: LoadedTokenizer,
    output: Path,
    options: PreparationOptions,
    engine: str = "auto",
    workers: int = 1,
    say: Callable[[str], None] = print,
    report: Report = lambda tally: None,
    encode: Encode | None = None,
) -> PreparationOutcome:
    """Makes, continues or recognises the prepared folder `output`.

    encode: the encoded parts from a position on; None: by `workers` processes of this machine.

    Raises InputError for input that cannot be used or a folder that was made from something else, StoppedError when
    a signal ended it early (run it again to continue).
    """
    options = options.within(documents)
    plan = plan_of(documents, tokenizer, options)
    state_folder = output / UNFINISHED_FOLDER
    finished = _finished(output, plan)
    if finished is not None and not state_folder.exists():
        return finished
    existed = output.is_dir()
    _check_free(output)
    try:
        state_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {output}: cannot be created: {error.strerror}; give a writable folder") from None
    try:
        with folder_lock(state_folder / "lock"):
            # Another process may have finished it before the lock was ours, or was killed when all but this was done.
            finished = _finished(output, plan)
            if finished is not None:
                shutil.rmtree(state_folder, ignore_errors=True)
                return finished
            stages: Counter[str] = Counter()
            encode = encode or _on_this_machine(documents, workers, stages)
            run = _Run(documents, tokenizer, output, options, plan, report, encode, stages)
            try:
                return run.complete(engine, say)
            except InputError:
                if not run.worth_keeping:
                    _discard(output, existed)
                raise
    except OSError as error:
        raise InputError(_disk_problem(output, error)) from error


def _on_this_machine(documents: Documents, workers: int, stages: Counter[str]) -> Encode:
    def encode(start: Position, settings: EncodingSettings) -> Iterator[EncodedPart]:
        return encode_parts(timed(documents.parts(settings.reading, start), stages, "read"), settings, workers)

    return encode


def timed(items: Iterator[Any], stages: Counter[str], name: str) -> Iterator[Any]:
    """The items; the seconds that each took to come are added to stages[name]."""
    while True:
        began = time.perf_counter()
        item = next(items, None)
        stages[name] += time.perf_counter() - began
        if item is None:
            return
        yield item


def _disk_problem(output: Path, error: OSError) -> str:
    name = f" ({error.filename})" if error.filename else ""
    return (
        f"{output}: {error.strerror or error}{name}; free space or fix permissions, then run the same command again: "
        "it continues where it stopped"
    )


def _finished(output: Path, plan: dict[str, Any]) -> PreparationOutcome | None:
    if not (output / MANIFEST_FILE).is_file():
        return None
    manifest = read_manifest(output)
    made_from = json.loads((output / MANIFEST_FILE).read_bytes())
    refuse_differences(output, made_from, plan, "was finished")
    totals = [manifest.totals(split) for split in SPLITS]
    tally = Tally(
        documents=sum(total[1] for total in totals),
        tokens=sum(total[0] for total in totals),
        text_bytes=sum(total[2] for total in totals),
        validation_tokens=totals[1][0],
        **{name: made_from["skipped"].get(name, 0) for name in SKIPPED_COUNTS},
    )
    return PreparationOutcome(manifest, tally, already_done=True, continued=False, seconds=0.0, tokens_made=0)


def _check_free(output: Path) -> None:
    if output.is_file():
        raise InputError(f"--output {output}: is a file; give a folder")
    if output.is_dir() and not (output / UNFINISHED_FOLDER).is_dir():
        others = sorted(path.name for path in output.iterdir())
        if others:
            shown = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
            raise InputError(f"--output {output}: already contains other files ({shown}); give a new or empty folder")


def _discard(output: Path, existed: bool) -> None:
    """Removes what a preparation without any result has made, and nothing else."""
    for path in shard_files(output):
        path.unlink()
    for name in (TOKENIZER_FOLDER, UNFINISHED_FOLDER):
        shutil.rmtree(output / name, ignore_errors=True)
    if not existed:
        output.rmdir()


class _Run:
    """One process's work on an unfinished folder, under its lock."""

    def __init__(
        self,
        documents: Documents,
        tokenizer: LoadedTokenizer,
        output: Path,
        options: PreparationOptions,
        plan: dict[str, Any],
        report: Report,
        encode: Encode,
        stages: Counter[str],
    ):
        self.encode, self.stages = encode, stages
        self.documents, self.tokenizer, self.output = documents, tokenizer, output
        self.options, self.plan, self.report = options, plan, report
        self.plan_path = output / UNFINISHED_FOLDER / "plan.json"
        self.progress_path = output / UNFINISHED_FOLDER / "progress.json"
        # What an earlier process left is not this one's to throw away.
        self.worth_keeping = self.plan_path.exists()

    def complete(self, engine: str, say: Callable[[str], None]) -> PreparationOutcome:
        """Tokenises what is left and writes the manifest."""
        started = time.monotonic()
        progress = self._load_progress()
        if progress is None:
            self.tokenizer.save(self.output / TOKENIZER_FOLDER)
            sync_files(self.output / TOKENIZER_FOLDER)
            write_durably(self.plan_path, as_json({"layout": PLAN_LAYOUT, **self.plan}))
        else:
            say(f"{self.output}: continuing after {progress['tally']['documents']:,} documents")
        encoder, reason = make_encoder(self.tokenizer, engine)
        if reason:
            say(f"tokenising with tokenizers: {reason}")
        before = progress["tally"]["tokens"] if progress else 0
        try:
            tally, shards = self._tokenise(progress, encoder)
        except DisagreementError as error:
            if engine == "fast":
                raise InputError(f"--engine fast: {error}; remove {self.output} and use --engine reference") from None
            say(f"starting over with tokenizers: {error}")
            self.progress_path.unlink(missing_ok=True)
            before = 0
            tally, shards = self._tokenise(None, ReferenceEncoder(self.tokenizer))
        manifest = self._finish(tally, shards)
        seconds = time.monotonic() - started
        return PreparationOutcome(
            manifest, tally, False, progress is not None, seconds, tally.tokens - before, dict(self.stages)
        )

    def _load_progress(self) -> dict[str, Any] | None:
        if not self.plan_path.is_file():
            return None
        try:
            earlier = json.loads(self.plan_path.read_bytes())
            progress = json.loads(self.progress_path.read_bytes()) if self.progress_path.is_file() else None
        except ValueError as error:
            raise InputError(f"{self.output}: its progress is damaged ({error}); remove it and start over") from None
        if earlier.pop("layout", None) != PLAN_LAYOUT:
            raise InputError(f"{self.output}: was begun by another version; remove it and prepare it again")
        refuse_differences(self.output, earlier, self.plan, "was begun", free=("on_error", "max_errors"))
        return progress

    def _tokenise(self, progress: dict[str, Any] | None, encoder: Encoder) -> tuple[Tally, list[Any]]:
        options = self.options
        tally = Tally(**progress["tally"]) if progress else Tally()
        position = Position(*progress["position"]) if progress else BEGINNING
        state = progress["writer"] if progress else None
        dtype = self.plan["dtype"]
        writer = ShardWriter(self.output, dtype, options.shard_tokens, state, options.megatron)
        seen = seen_in_shards(self.output, writer.written(), dtype) if options.deduplicate else None
        names = (source["path"] for source in self.plan["sources"])
        intake = Intake(tally, writer, options, {name: number for number, name in enumerate(names)}, seen)
        settings = EncodingSettings(
            self.tokenizer,
            encoder,
            options.reading,
            options.validation_fraction,
            stop_at_problem=options.on_error == "stop",
            deduplicate=options.deduplicate,
        )
        committed = time.monotonic()
        try:
            with _stop_signals() as stopped, _closing(self.encode(position, settings)) as encoded_parts:
                for encoded in () if progress and progress["complete"] else encoded_parts:
                    began = time.perf_counter()
                    complete = intake.add(encoded)
                    self.stages.update(encoded.stage_seconds)
                    self.stages["write"] += time.perf_counter() - began
                    position = encoded.after
                    self.worth_keeping = self.worth_keeping or tally.documents > 0
                    self.report(tally)
                    if complete or stopped or time.monotonic() - committed > COMMIT_SECONDS:
                        self._commit(writer, tally, position, complete)
                        committed = time.monotonic()
                    if complete:
                        break
                    if stopped:
                        raise StoppedError(stopped[0])
            if not tally.documents and options.slice is None:
                raise InputError(_nothing_found(tally, options))
            return tally, writer.finish()
        except InputError:
            # What came before the bad record is sound and need not be made again.
            if tally.documents:
                self._commit(writer, tally, position, complete=False)
            raise
        finally:
            writer.close()

    def _commit(self, writer: ShardWriter, tally: Tally, position: Position, complete: bool) -> None:
        began = time.perf_counter()
        state = {"position": position, "complete": complete, "tally": asdict(tally), "writer": writer.sync()}
        write_durably(self.progress_path, as_json(state))
        self.stages["sync"] += time.perf_counter() - began

    def _finish(self, tally: Tally, shards: list[Any]) -> Manifest:
        changed = source_differences(self.plan["sources"], self.documents.description())
        if changed:
            raise InputError(
                f"{self.output}: the input changed while it was read: {'; '.join(changed[:8])}; "
                f"remove {self.output} and prepare it again"
            )
        manifest = {"format": FORMAT_NAME, "version": FORMAT_VERSION, **self.plan}
        sources = manifest.pop("sources")
        manifest["shards"] = [asdict(shard) for shard in shards]
        manifest["totals"] = {
            split: {
                name: sum(getattr(shard, name) for shard in shards if shard.split == split)
                for name in ("tokens", "documents", "text_bytes")
            }
            for split in SPLITS
        }
        manifest["skipped"] = tally.skipped()
        manifest["sources"] = sources
        sync_folder(self.output)
        write_durably(self.output / MANIFEST_FILE, as_json(manifest))
        shutil.rmtree(self.output / UNFINISHED_FOLDER, ignore_errors=True)
        return read_manifest(self.output)


def _nothing_found(tally: Tally, options: PreparationOptions) -> str:
    skipped = f"{tally.empty_documents:,} empty documents and {tally.bad_records:,} bad records were skipped"
    if tally.filtered_documents:
        skipped += f", {tally.filtered_documents:,} left out by filters"
    limit = options.max_tokens
    limits = f", and --max_tokens {limit:,} is less than the first document" if limit is not None else ""
    return f"the input holds no documents ({skipped}{limits}); nothing was written; give files that contain text"


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM so that work stops between parts; a second one acts at once."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(number, previous[number])

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _closing(generator: Iterator[EncodedPart]) -> Iterator[Iterator[EncodedPart]]:
    try:
        yield generator
    finally:
        generator.close()
