"""Runs the project's scripts on mutated input.

One process imports everything and forks a child for each case, which takes a second or two.

    python tests/support/fuzzing.py < cases.jsonl      # prints one JSON result per case
"""

import contextlib
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_CPU_SECONDS, MOST_SECONDS = 20, 120
"""Limits per case. The wall-clock limit is higher because the machine may be busy."""
MOST_BYTES = 16 << 30
IMPORTS = (
    "pretrain_tools.evaluation.evaluate", "pretrain_tools.planning.report", "pretrain_tools.preparation.prepare",
    "pretrain_tools.publishing.publish", "pretrain_tools.runs.history", "pretrain_tools.runs.status",
    "pretrain_tools.runs.comparison",
    "pretrain_tools.runs.step_documents", "pretrain_tools.publishing.hub_upload",
    "pretrain.data.tokenizer", "pretrain_tools.preparation.documents.sources", "pretrain_tools.preparation.slices",
    "pretrain.data.shards", "pretrain_tools.preparation.inspect",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A command line and what its error message must contain."""

    script: str
    arguments: list[str]
    names: list[str] = field(default_factory=list)
    """Changed settings, flags or values. An error message must contain one of them, ignoring case."""
    folder: str = ""
    """Working folder."""


@dataclass(frozen=True)
class Result:
    """The outcome of a case."""

    code: int
    output: str
    seconds: float
    timed_out: bool = False

    def problem(self, case: Case) -> str | None:
        """Returns what is wrong with the outcome, or None."""
        if self.timed_out:
            return f"took longer than {MOST_CPU_SECONDS} s of CPU time or {MOST_SECONDS} s"
        if "Traceback (most recent call last)" in self.output:
            return "a traceback"
        if self.code not in (0, 2):
            return f"exit status {self.code}"
        said = without_usage(self.output).lower()
        if self.code == 2 and not any(name.lower()[:200] in said for name in case.names):  # long names are truncated
            return f"names none of {case.names}"
        if len(self.output) > 30_000 + sum(map(len, case.arguments)):
            return f"{len(self.output):,} characters of output"
        return None


def without_usage(output: str) -> str:
    """Removes argparse's usage, which lists every flag."""
    _, mark, error = output.rpartition(": error: ")
    return error if mark and "usage: " in output else output


def run_cases(cases: Iterable[Case]) -> Iterator[tuple[Case, Result]]:
    """Yields every case with its result, in order."""
    from support.warm_python import WarmPopen

    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["HF_TOKEN"] = "hf_of_nobody"
    if os.path.exists("/dev/nvidiactl"):  # hide the GPU
        environment["CUDA_VISIBLE_DEVICES"] = ""
    worker = WarmPopen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        for case in cases:
            worker.stdin.write(json.dumps(asdict(case)) + "\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
            if not line:
                raise RuntimeError(f"the worker process died on {case}")
            yield case, Result(**json.loads(line))
    finally:
        worker.stdin.close()
        worker.wait(30)


def serve() -> None:
    """Runs cases from stdin. No other thread may be running when a child is forked."""
    answers = os.fdopen(os.dup(1), "w")
    sys.path.insert(0, str(ROOT))
    for name in IMPORTS:
        __import__(name)
    runpy.run_path(str(ROOT / "train.py"), run_name="imported")  # imports its dependencies
    for line in sys.stdin:
        answers.write(json.dumps(asdict(run_case(Case(**json.loads(line))))) + "\n")
        answers.flush()


def run_case(case: Case) -> Result:
    with tempfile.TemporaryFile() as output:
        begun = time.monotonic()
        child = os.fork()
        if child == 0:
            become(case, output.fileno())
        timer = threading.Timer(MOST_SECONDS, os.killpg, (child, signal.SIGKILL))
        timer.start()
        _, status = os.waitpid(child, 0)
        timer.cancel()
        timer.join()
        seconds = time.monotonic() - begun
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # leftover processes
        output.seek(0)
        text = output.read().decode(errors="replace")
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXCPU)
    return Result(os.waitstatus_to_exitcode(status), text[:100_000], round(seconds, 2), killed)


def become(case: Case, output: int) -> None:
    """Runs the script in the child process, in a new session so that all its processes can be killed."""
    code = 1
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_SECONDS, MOST_CPU_SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, stream in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(number, stream)
        os.chdir(case.folder or tempfile.gettempdir())
        sys.argv = [case.script, *case.arguments]
        runpy.run_path(str(ROOT / case.script), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
