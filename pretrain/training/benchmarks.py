"""Runs multiple-choice lm-evaluation-harness tasks on the training ranks, under any strategy.

A separate process (`pretrain_tools.evaluation.answers`) tokenizes the questions and answers once per run. They are
packed into windows of the training length, which avoids recompilation, and split across the ranks. The scores are acc
and acc_norm as in the harness, and the bits per byte of the correct answer.

Shapes: R requests (a question with one of its answers), D questions, T tokens per window, W windows.
"""

import io
import json
import math
import statistics
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter

from pretrain import config
from pretrain.config import WindowSpec
from pretrain.files import write_durably
from pretrain.model.attention import IGNORED, HostBatch, document_layout
from pretrain.model.loss import recording_losses
from pretrain.parallel.launcher import ToolError, run_tool
from pretrain.parallel.strategy import Strategy
from pretrain.runs.run_folder import EVALUATIONS
from pretrain.training.background_jobs import task_arguments

MEASURES = ("acc", "acc_norm", "bits_per_byte")
Scores = dict[str, float | None]
"""{metric: mean, metric_stderr: standard error}."""
LONGEST_TOKENIZING_SECONDS = 24 * 3600.0
"""Time limit for tokenizing the requests, which may have to be downloaded."""


@dataclass(frozen=True)
class Task:
    """A task or a task group. All questions in a group have the same weight."""

    name: str
    measures: tuple[str, ...]
    """Metrics from MEASURES that the harness reports for this task."""
    questions: tuple[tuple[int, int], ...]
    """Ranges [first, end) of questions."""
    few_shots: int | None
    is_part: bool
    """True if the task belongs to a group that has its own score."""

    @property
    def count(self) -> int:
        """Number of questions."""
        return sum(end - first for first, end in self.questions)


@dataclass(frozen=True)
class Requests:
    """The requests of all tasks."""

    tasks: list[Task]
    ids: np.ndarray
    """Token IDs of all requests, concatenated."""
    ends: np.ndarray
    """(R,): end of each request in `ids`."""
    answer_tokens: np.ndarray
    """(R,): number of answer tokens, at the end of each request."""
    characters: np.ndarray
    """(R,): answer length in characters, used to normalize acc_norm."""
    bytes: np.ndarray
    """(R,): answer length in UTF-8 bytes."""
    question_ends: np.ndarray
    """(D,): index after each question's last request."""
    right: np.ndarray
    """(D,): index of the correct answer among the question's answers."""

    @classmethod
    def read(cls, path: Path) -> "Requests":
        """Reads a file written by `write`."""
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return cls(TypeAdapter(list[Task]).validate_json(bytes(arrays.pop("tasks"))), **arrays)

    def write(self, path: Path) -> None:
        """Writes the requests to an .npz file atomically."""
        values = dict(vars(self))
        text = json.dumps([vars(task) for task in values.pop("tasks")]).encode()
        content = io.BytesIO()
        np.savez(content, tasks=np.frombuffer(text, np.uint8), **values)
        write_durably(path, content.getbuffer())

    def scores(self, log_likelihoods: np.ndarray) -> dict[Task, Scores]:
        """Returns each task's scores from (R,) log-likelihoods."""
        starts = np.concatenate([[0], self.question_ends[:-1]])
        of_questions = {name: np.empty(len(starts)) for name in MEASURES}
        for number, (start, end) in enumerate(zip(starts, self.question_ends, strict=True)):
            likelihoods = log_likelihoods[start:end]
            right = self.right[number]
            of_questions["acc"][number] = likelihoods.argmax() == right
            of_questions["acc_norm"][number] = (likelihoods / self.characters[start:end]).argmax() == right
            of_questions["bits_per_byte"][number] = -likelihoods[right] / math.log(2) / self.bytes[start + right]
        found = {}
        for task in self.tasks:
            here = np.concatenate([np.arange(first, end) for first, end in task.questions])
            found[task] = {}
            for name in task.measures:
                found[task] |= mean_and_error(name, of_questions[name][here].tolist())
        return found


def mean_and_error(name: str, values: list[float]) -> Scores:
    """Computes {name: mean, name_stderr: standard error}, like the harness. The error is None for a single value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {name: statistics.fmean(values), f"{name}_stderr": error}


@dataclass(frozen=True)
class Windows:
    """Requests packed into windows. With document_mask, a window may contain several requests."""

    ids: np.ndarray
    """(W, T + 1) token IDs."""
    begins: np.ndarray
    """(W, T): 1 at the start of each request and of the padding."""
    request: np.ndarray
    """(W, T): request index at positions that predict an answer token; -1 elsewhere."""
    shortened: int
    """Number of requests that were truncated at the start to fit a window."""


def packed(requests: Requests, window: WindowSpec, multiple: int) -> Windows:
    """Packs requests into windows, in order. Adds empty windows, so that their number is a multiple of `multiple`."""
    length = window.sequence_length
    sizes = np.diff(requests.ends, prepend=0)
    kept = np.minimum(sizes, length + 1)
    places: list[tuple[int, int]] = []  # (window, first position) of each request
    row = -1
    end = length + 1
    for size in kept.tolist():
        if end + size > length + 1 or not window.document_mask:
            row += 1
            end = 0
        places.append((row, end))
        end += size
    windows = math.ceil((row + 1) / multiple) * multiple
    ids = np.zeros((windows, length + 1), np.int64)
    begins = np.zeros((windows, length), np.int64)
    request = np.full((windows, length), -1)
    for number, (row, place) in enumerate(places):
        end = place + kept[number]
        ids[row, place:end] = requests.ids[requests.ends[number] - kept[number] : requests.ends[number]]
        begins[row, place] = 1
        if end < length:  # the next request, or the padding
            begins[row, end] = 1
        answer = min(requests.answer_tokens[number], kept[number] - 1)
        request[row, end - 1 - answer : end - 1] = number
    return Windows(ids, begins, request, int((sizes > length + 1).sum()))


class Benchmarks:
    """A run's benchmarks. All methods except `begin` are collective.

    Args:
        run: the run folder.
        settings: the recipe's `benchmarks`.
        tokenizer: the tokenizer folder.
    """

    def __init__(self, run: Path, settings: config.Benchmarks, tokenizer: Path):
        self._arguments = [*task_arguments(settings), "--tokenizer", str(tokenizer.absolute())]
        if settings.limit is not None:
            self._arguments += ["--limit", f"{settings.limit:g}"]
        name = f"answers-{sha256(json.dumps(self._arguments).encode()).hexdigest()[:8]}"
        self._path = run / EVALUATIONS / f"{name}.npz"
        self._tokenizing: Future[Requests | str] | None = None
        self._requests: Requests | None = None
        self._windows: Windows | None = None

    def begin(self) -> None:
        """Starts tokenizing the requests in the background. Main rank only."""
        executor = ThreadPoolExecutor(max_workers=1)
        self._tokenizing = executor.submit(self._tokenized)
        executor.shutdown(wait=False)

    def _tokenized(self) -> Requests | str:
        words = [*self._arguments, "--output", str(self._path.absolute())]
        try:
            if not self._path.is_file():
                self._path.parent.mkdir(parents=True, exist_ok=True)
                run_tool("evaluation.answers", *words, seconds=LONGEST_TOKENIZING_SECONDS)
            return Requests.read(self._path)
        except (ToolError, OSError) as error:
            return str(error)

    def measure(
        self,
        model: torch.nn.Module,
        strategy: Strategy,
        *,
        window: WindowSpec,
        sequences: int,
        attention: str,
        beat: Callable[[], None],
    ) -> tuple[dict[Task, Scores], int] | str:
        """Returns ({task: scores}, number of truncated requests), or an error message.

        Args:
            window: must have the shape that the model was compiled for.
            sequences: number of windows per forward pass.
        """
        together = sequences * strategy.data_ranks
        if self._windows is None:
            found = strategy.ranks.by_main(lambda: self._tokenizing.result(), beat)
            found = strategy.ranks.gather(found)[0]
            if isinstance(found, str):
                return found
            self._requests = found
            self._windows = packed(found, window, together)
        requests = self._requests
        windows = self._windows
        sums = torch.zeros(len(requests.ends), dtype=torch.float64)
        model.eval()
        try:
            for first in range(strategy.data_rank * sequences, len(windows.ids), together):
                mine = slice(first, first + sequences)
                layout = document_layout(windows.begins[mine], 1) if window.document_mask else {}
                batch = HostBatch(torch.from_numpy(windows.ids[mine]), layout).on_device(strategy.device, attention)
                request_BT = torch.from_numpy(windows.request[mine])
                is_answer_BT = (request_BT >= 0).to(strategy.device)
                batch["targets_BT"] = batch["targets_BT"].masked_fill(~is_answer_BT, IGNORED)
                with torch.no_grad(), recording_losses(model) as losses:
                    model(**batch)
                if losses:
                    request_N = request_BT.chunk(strategy.sequence_parts, dim=1)[strategy.part].flatten()
                    of_answers = request_N >= 0
                    sums.index_add_(0, request_N[of_answers], torch.cat(losses).cpu().double()[of_answers])
                beat()
        finally:
            model.train()
        log_likelihoods = -strategy.sum(sums.to(strategy.device)).cpu().numpy()
        return requests.scores(log_likelihoods), windows.shortened
