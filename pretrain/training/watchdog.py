"""Monitors a rank in a thread: signals, heartbeats, hangs and dead neighbors.

The loop can't monitor itself while it waits in a collective, because Python runs signal handlers in the main thread,
which may be stuck there. This thread wakes up for every signal and several times per second.
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
from pretrain.errors import CRASHED, EXIT_INTERRUPTED, EXIT_PREEMPTED
from pretrain.files import write_durably
from pretrain.processes import is_alive, process_state
from pretrain.runs.run_folder import heartbeat_path
from pretrain.terminal import CLEAR_LINE, is_terminal

SIGNALS = {
    signal.SIGTERM: Request.PREEMPT,
    signal.SIGUSR1: Request.PREEMPT,  # SLURM's --signal=USR1@300
    signal.SIGHUP: Request.PREEMPT,  # the terminal or the connection was closed
    signal.SIGINT: Request.INTERRUPT,
}
END_CODES = {Request.PREEMPT: EXIT_PREEMPTED, Request.INTERRUPT: EXIT_INTERRUPTED}
SAME_SIGNAL_SECONDS = 1.0
"""Maximum time between signals that count as one. Ctrl-C arrives both from the terminal and from the launcher."""
HEARTBEAT_SECONDS = 2.0
"""Seconds between rank 0's heartbeats."""
HEARTBEAT_SECONDS_OF_OTHERS = 10.0
"""Seconds between the other ranks' heartbeats."""
ORPHAN_SECONDS = 3.0
"""Time for the launcher to stop the other processes after one has died."""
REPORT_SECONDS = 3.0
"""Time limit for final messages, for trackers without a network and blocked terminals."""
OWN_PAUSE_SECONDS = 5.0
"""Delay of the watch thread that indicates a suspended process: Ctrl-Z, or a machine in standby.

If half a step's timeout is shorter, that applies.
"""
END_REASON_FILE = "heartbeats/last-word.json"
"""File with the reason why a rank ended by itself."""
LAUNCHER = os.getppid()
"""Parent process at import time, long before training, because a launcher may die while its processes load."""


class Watch:
    """Monitors a rank from `start` to `close`.

    Args:
        run: the run's folder, for heartbeats and stacks.
        rank: this process's rank. Rank 0 writes heartbeats more often.
        neighbors: process IDs of the other ranks on this machine.
        step_timeout_seconds, first_step_timeout_seconds: maximum time between two beats (every micro-step beats). The
            second one applies until the first step is done.
        held: a file to touch as a sign of life: the run's lock.
        on_end: called with the reason and exit status before a hang, a dead neighbor or a second signal ends this
            process. Gets a few seconds at most.
    """

    def __init__(
        self,
        run: Path,
        rank: int,
        neighbors: Iterable[int],
        *,
        step_timeout_seconds: float,
        first_step_timeout_seconds: float,
        held: Path | None = None,
        on_end: Callable[[str, int], None] = lambda reason, code: None,
    ):
        self.run = run
        self.rank = rank
        self.neighbors = list(neighbors)
        self.step_timeout_seconds = step_timeout_seconds
        self.held = held
        self.on_end = on_end
        self.request = Request.NONE
        """Most urgent of the requests from signals so far."""
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
        """Starts watching, in the main thread. From now on, a signal is a request, and silence counts as a hang."""
        self.heartbeat_path.parent.mkdir(parents=True, exist_ok=True)
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # respects nohup
                signal.signal(number, lambda *_: None)  # Python writes to the socket only for handled signals
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._last_beat = time.monotonic()
        self._thread.start()

    def beat(self, step: int | None = None) -> None:
        """Reports that the loop is alive. After each step, `step` is the number of steps."""
        if step is not None:
            self.step = step
            self._timeout = self.step_timeout_seconds
        self._last_beat = time.monotonic()

    def allow_compiling(self) -> None:
        """Allows the next step as much time as the first, because it compiles for different shapes."""
        self._timeout = self.first_step_timeout_seconds
        self.beat()

    def close(self) -> None:
        """Stops watching before the ranks exit, so that a clean end isn't taken for a crash. Then ignores signals."""
        self._closed.set()
        self._writer.send(b"\0")
        self._thread.join()
        signal.set_wakeup_fd(-1)
        self.heartbeat_path.unlink(missing_ok=True)

    @property
    def heartbeat_path(self) -> Path:
        return heartbeat_path(self.run, self.rank)

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
        """Excludes the time during which this process was suspended, which isn't a hang."""
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
            self._end(f"second signal ({number.name}): quitting now, nothing saved", END_CODES[SIGNALS[number]])

    def _heartbeat(self) -> None:
        now = time.monotonic()
        interval = HEARTBEAT_SECONDS if self.rank == 0 else HEARTBEAT_SECONDS_OF_OTHERS
        if self._last_heartbeat is not None and now - self._last_heartbeat < interval:
            return
        self._last_heartbeat = now
        beat = {"pid": os.getpid(), "host": socket.gethostname(), "step": self.step, "time": time.time()}
        beat["silent_seconds"] = round(now - self._last_beat, 1)
        with suppress(OSError):  # a disk that is briefly full or unreachable must not end a run
            fresh = self.heartbeat_path.with_suffix(".new")
            fresh.write_text(json.dumps(beat))
            fresh.rename(self.heartbeat_path)
            if self.held is not None:
                os.utime(self.held)

    def _check_launcher(self) -> None:
        if self._launcher is not None and os.getppid() != self._launcher:
            self._launcher = None
            hint = ""
            if self.request == Request.INTERRUPT:  # with one process, accelerate launch doesn't wait for it
                hint = "; python -m pretrain.launch waits for the run"
            self.request = max(self.request, Request.PREEMPT)
            self._say(f"launcher exited; saving and stopping{hint}")

    def _check_neighbors(self) -> None:
        now = time.monotonic()
        if dead := [pid for pid in self.neighbors if not is_alive(pid)]:
            self._neighbor_died = self._neighbor_died or now
            # The launcher sends SIGTERM after a death. End now, because a save would wait for the dead process.
            if self._first_signal is not None or now - self._neighbor_died > ORPHAN_SECONDS:
                of_death = f"process {', '.join(map(str, dead))} of this run has died"
                self._end(*(recorded_end_reason(self.run) or (of_death, CRASHED)))
            return
        # Detects a suspended neighbor even while this loop waits for a disk and still beats.
        stopped = [pid for pid in self.neighbors if process_state(pid) == "T"]
        self._stopped_since = {pid: self._stopped_since.get(pid, now) for pid in stopped}
        if stopped and now - min(self._stopped_since.values()) > self._timeout:
            self._end_hang(f"process {', '.join(map(str, stopped))} of this run is stopped")

    def _end_hang(self, cause: str = "no progress") -> None:
        seconds = time.monotonic() - self._last_beat
        path = self.run / f"stacks-rank-{self.rank:05d}.txt"
        reason = f"{cause}, {seconds:.0f} s after step {self.step:,}; stacks written to {path}"
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} rank {self.rank}: {reason}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            reason += f", which could not be written ({error})"
        time.sleep(min(2.0, self.step_timeout_seconds / 16))  # other ranks write their stacks before any of them exits
        for pid in self.neighbors:
            if process_state(pid) == "T":  # a stopped process only reacts to SIGKILL
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        self._end(reason, CRASHED)

    def _end(self, reason: str, code: int) -> None:
        """Ends the process even if its last messages get stuck in disks, pipes or networks."""
        speaker = threading.Thread(target=self._report_end, args=(reason, code), name="report end", daemon=True)
        speaker.start()
        speaker.join(timeout=REPORT_SECONDS)
        # Not sys.exit, because the main thread may never return from a collective.
        os._exit(code)

    def _report_end(self, reason: str, code: int) -> None:
        self._say(reason)
        try:
            self.on_end(reason, code)
        except (OSError, ValueError, RuntimeError) as error:
            self._say(f"could not record the end of the run: {error}")
        with suppress(OSError, ValueError):
            sys.stdout.flush()

    def _say(self, text: str) -> None:
        with suppress(OSError, ValueError):  # stderr may be closed; the watch continues
            # Another process may have drawn its live line here.
            start = CLEAR_LINE if is_terminal(sys.stderr) else ""
            print(f"{start}rank {self.rank}: {text}", file=sys.stderr, flush=True)


def record_end_reason(run: Path, reason: str, code: int) -> None:
    """Records why this rank ends, for the main rank's log."""
    with suppress(OSError):
        write_durably(run / END_REASON_FILE, json.dumps([reason, code]))


def recorded_end_reason(run: Path) -> tuple[str, int] | None:
    """Returns the reason and exit status that a rank has recorded since the start of the run, or None."""
    with suppress(OSError, ValueError):
        reason, code = json.loads((run / END_REASON_FILE).read_bytes())
        return reason, code
    return None
