"""Monitors a rank from a thread: signals, heartbeats, hangs and dead processes on the same machine.

Python runs signal handlers in the main thread, which may be stuck in a collective. This thread wakes up for each
signal and several times per second.
"""

import faulthandler
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from pretrain.checkpoint.run_state import Request
from pretrain.errors import CRASHED
from pretrain.files import write_durably
from pretrain.processes import is_alive, process_state, status_after
from pretrain.runs.run_folder import heartbeat_path
from pretrain.terminal import CLEAR_LINE, is_terminal

SIGNALS = {
    signal.SIGTERM: Request.PREEMPT,
    signal.SIGUSR1: Request.PREEMPT,  # SLURM's --signal=USR1@300
    signal.SIGHUP: Request.PREEMPT,  # the terminal or connection was closed
    signal.SIGINT: Request.INTERRUPT,
}
SAME_SIGNAL_SECONDS = 1.0
"""Signals within this time count as one, because the launcher also forwards Ctrl-C."""
HEARTBEAT_SECONDS = 2.0
"""Interval between heartbeats on rank 0."""
HEARTBEAT_SECONDS_OF_OTHERS = 10.0
"""Interval between heartbeats on other ranks."""
ORPHAN_SECONDS = 3.0
"""Grace period for the launcher to stop the other processes after one has died."""
REPORT_SECONDS = 3.0
"""Time limit for the final messages, which can block on a tracker or terminal."""
OWN_PAUSE_SECONDS = 5.0
"""If the watch thread is delayed this long, or half the step timeout if shorter, the process was suspended."""
END_FILE = "heartbeats/last-word.json"
"""Contains the exit code and the reason why a rank ended the run."""
LAUNCHER = os.getppid()
"""Parent process at import time, because the launcher may die before training starts."""


class Watch:
    """Monitors a rank from `start` to `close`.

    Args:
        run: the run folder, for heartbeats and stack traces.
        rank: this process's rank.
        neighbors: process IDs of the other ranks on this machine.
        step_timeout_seconds: maximum time between two calls of `beat`.
        first_step_timeout_seconds: the same, until the first step is done.
        held: lock file to touch with each heartbeat.
        on_end: called with the exit code and reason before this process is terminated, for up to REPORT_SECONDS.
    """

    def __init__(
        self,
        run: Path,
        rank: int,
        neighbors: Iterable[int],
        *,
        step_timeout_seconds: float,
        first_step_timeout_seconds: float,
        held: Path | None,
        on_end: Callable[[int, str], None],
    ):
        self.run = run
        self.rank = rank
        self.heartbeat_path = heartbeat_path(run, rank)
        self.neighbors = list(neighbors)
        self.step_timeout_seconds = step_timeout_seconds
        self.held = held
        self.on_end = on_end
        self.request = Request.NONE
        """Most urgent request from a signal so far."""
        self.step = 0
        self._timeout = self.first_step_timeout_seconds = first_step_timeout_seconds
        self._last_beat = time.monotonic()
        self._last_heartbeat = self._first_signal = self._neighbor_died = None
        self._stopped_since: dict[int, float] = {}
        launched = {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
        self._launcher = LAUNCHER if launched else None
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def start(self) -> None:
        """Installs the signal handlers and starts the thread. Call it from the main thread."""
        self.heartbeat_path.parent.mkdir(parents=True, exist_ok=True)
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # for nohup
                signal.signal(number, lambda *_: None)  # the wakeup socket requires a Python handler
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._last_beat = time.monotonic()
        self._thread.start()

    def beat(self, step: int | None = None) -> None:
        """Reports progress. step: number of completed steps, after each step."""
        if step is not None:
            self.step = step
            self._timeout = self.step_timeout_seconds
        self._last_beat = time.monotonic()

    def allow_compiling(self) -> None:
        """Applies the first step's timeout to the next step, because it compiles again."""
        self._timeout = self.first_step_timeout_seconds
        self.beat()

    def close(self) -> None:
        """Stops watching. Call it before any rank exits, which would look like a crash. Signals are then ignored."""
        self._closed.set()
        self._writer.send(b"\0")
        self._thread.join()
        signal.set_wakeup_fd(-1)
        self.heartbeat_path.unlink(missing_ok=True)

    def _watch(self) -> None:
        tick = min(0.5, self.step_timeout_seconds / 40)
        own_pause = max(min(OWN_PAUSE_SECONDS, self.step_timeout_seconds / 2), 2 * tick)
        woke = time.monotonic()
        while not self._closed.is_set():
            ready, _, _ = select.select([self._reader], [], [], tick)
            was = woke
            woke = time.monotonic()
            if woke - was > own_pause:
                self._exclude_suspension(woke - was)
            numbers = self._reader.recv(64) if ready else b""
            if self._closed.is_set():
                return
            for number in numbers:
                if number in SIGNALS:
                    self._handle(signal.Signals(number))
            self._heartbeat()
            self._check_launcher()
            self._check_neighbors()
            if time.monotonic() - self._last_beat > self._timeout:
                self._end_hang()

    def _exclude_suspension(self, seconds: float) -> None:
        """Excludes the time when this process was suspended."""
        self._last_beat += seconds
        self._stopped_since.clear()
        if self._neighbor_died is not None:
            self._neighbor_died += seconds

    def _handle(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._first_signal is None:
            self._first_signal = now
            self.request = max(self.request, SIGNALS[number])
            self._say(f"{number.name}: finishing this step and saving; press Ctrl-C again to quit now")
        elif now - self._first_signal > SAME_SIGNAL_SECONDS:
            self._end(status_after(number), f"second signal ({number.name}): quitting now, nothing saved")

    def _heartbeat(self) -> None:
        now = time.monotonic()
        interval = HEARTBEAT_SECONDS if self.rank == 0 else HEARTBEAT_SECONDS_OF_OTHERS
        if self._last_heartbeat is not None and now - self._last_heartbeat < interval:
            return
        self._last_heartbeat = now
        beat = {"pid": os.getpid(), "host": socket.gethostname(), "step": self.step, "time": time.time()}
        beat["silent_seconds"] = round(now - self._last_beat, 1)
        with suppress(OSError):  # a full or unreachable disk must not stop the run
            fresh = self.heartbeat_path.with_suffix(".new")
            fresh.write_text(json.dumps(beat))
            fresh.rename(self.heartbeat_path)
            if self.held is not None:
                os.utime(self.held)

    def _check_launcher(self) -> None:
        if self._launcher is not None and os.getppid() != self._launcher:
            self._launcher = None
            hint = ""
            if self.request == Request.INTERRUPT:  # accelerate launch doesn't wait for a single process
                hint = " (python -m pretrain.launch waits for the run)"
            self.request = max(self.request, Request.PREEMPT)
            self._say(f"the launcher exited; saving and stopping{hint}")

    def _check_neighbors(self) -> None:
        now = time.monotonic()
        if dead := [pid for pid in self.neighbors if not is_alive(pid)]:
            self._neighbor_died = self._neighbor_died or now
            # After a death, the launcher sends SIGTERM. Don't save, because that would wait for the dead process.
            if self._first_signal is not None or now - self._neighbor_died > ORPHAN_SECONDS:
                of_death = f"process {', '.join(map(str, dead))} of this run has died"
                self._end(*(recorded_end(self.run) or (CRASHED, of_death)))
            return
        # A stopped neighbor counts as a hang even if this rank still beats.
        stopped = [pid for pid in self.neighbors if process_state(pid) == "T"]
        self._stopped_since = {pid: self._stopped_since.get(pid, now) for pid in stopped}
        if stopped and now - min(self._stopped_since.values()) > self._timeout:
            self._end_hang(f"process {', '.join(map(str, stopped))} of this run is stopped")

    def _end_hang(self, cause: str = "no progress") -> None:
        seconds = time.monotonic() - self._last_beat
        path = self.run / f"stacks-rank-{self.rank:05d}.txt"
        reason = f"{cause}, {seconds:.0f} s after step {self.step:,}; stack traces written to {path}"
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} rank {self.rank}: {reason}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            reason += f", which could not be written ({error})"
        time.sleep(min(2.0, self.step_timeout_seconds / 16))  # let all ranks write their stacks first
        for pid in self.neighbors:
            if process_state(pid) == "T":  # a stopped process reacts only to SIGKILL
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        self._end(CRASHED, reason)

    def _end(self, code: int, reason: str) -> None:
        """Reports the reason and exits, even if the report blocks."""
        speaker = threading.Thread(target=self._report_end, args=(code, reason), name="report end", daemon=True)
        speaker.start()
        speaker.join(timeout=REPORT_SECONDS)
        # Not sys.exit, because the main thread may never return from a collective.
        os._exit(code)

    def _report_end(self, code: int, reason: str) -> None:
        self._say(reason)
        try:
            self.on_end(code, reason)
        except (OSError, ValueError, RuntimeError) as error:
            self._say(f"could not record the end of the run: {error}")
        with suppress(OSError, ValueError):
            sys.stdout.flush()

    def _say(self, text: str) -> None:
        with suppress(OSError, ValueError):  # stderr may be closed
            # Overwrites another process's progress line.
            start = CLEAR_LINE if is_terminal(sys.stderr) else ""
            print(f"{start}rank {self.rank}: {text}", file=sys.stderr, flush=True)


def record_end(run: Path, code: int, reason: str) -> None:
    """Records why this rank ends the run, for the main rank's log."""
    with suppress(OSError):
        write_durably(run / END_FILE, json.dumps([code, reason]))


def recorded_end(run: Path) -> tuple[int, str] | None:
    """Returns the exit code and reason recorded by a rank since the start, or None."""
    with suppress(OSError, ValueError):
        code, reason = json.loads((run / END_FILE).read_bytes())
        return code, reason
    return None
