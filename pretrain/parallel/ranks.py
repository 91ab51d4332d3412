"""The launched processes and their communication on the CPU."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

from pretrain.errors import end_now
from pretrain.parallel.launcher import processes_launched
from pretrain.terminal import say

_Value = TypeVar("Value")


def slow_host_group() -> dist.ProcessGroup:
    """Creates a gloo group with a long timeout, for one background thread (a collective call)."""
    return dist.new_group(backend="gloo", timeout=timedelta(hours=12))


@dataclass(frozen=True)
class Ranks:
    """This process's rank and the number of ranks. Methods that communicate must be called on all ranks."""

    rank: int = 0
    """Global rank of this process."""
    count: int = 1
    host_group: dist.ProcessGroup | None = None
    """Gloo group of all ranks, for the training loop."""
    background_group: dist.ProcessGroup | None = None
    """Second gloo group of all ranks, for a background thread.

    Its timeout is long because writing a checkpoint to a slow disk can take hours.
    """

    @classmethod
    def of_launch(cls) -> "Ranks":
        """Builds the ranks after torch.distributed has started.

        Raises RuntimeError if accelerate isn't running all launched processes.
        """
        running = dist.get_world_size() if dist.is_initialized() else 1
        if running != processes_launched():  # accelerate silently falls back to fewer processes
            raise RuntimeError(f"{processes_launched()} processes were launched, but accelerate started {running}")
        if not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(), running, dist.new_group(backend="gloo"), slow_host_group())

    @property
    def is_main(self) -> bool:
        """True on the rank that prints and writes files."""
        return self.rank == 0

    def gather(self, value: Any, in_background: bool = False) -> list[Any]:
        """Gathers a small object from each rank, and returns the list on every rank.

        in_background: True if called from the background thread.
        """
        if self.count == 1:
            return [value]
        values = [None] * self.count
        dist.all_gather_object(values, value, group=self.background_group if in_background else self.host_group)
        return values

    @contextmanager
    def together(self, error: type[Exception]) -> Iterator[None]:
        """Raises `error` on all ranks if the block raises OSError or SafetensorError on any rank."""
        problem = None
        try:
            yield
        except (OSError, SafetensorError) as cause:
            problem = f"{type(cause).__name__}: {cause}"
        if problems := [text for text in self.gather(problem) if text]:
            raise error("; ".join(problems))

    def by_main(self, work: Callable[[], _Value], beat: Callable[[], None]) -> _Value | None:
        """Runs `work` in a thread on the main rank while all ranks call `beat`. Returns None on the other ranks.

        If `beat` raises, it must do so on all ranks in the same call. `work` then continues in the background.
        """
        executor = ThreadPoolExecutor(max_workers=1)
        future = executor.submit(work) if self.is_main else None
        executor.shutdown(wait=False)
        while not self.gather(future is not None and future.done())[0]:
            beat()
            time.sleep(0.05)
        return future.result() if self.is_main else None

    def print(self, text: str) -> None:
        """Prints text on the main rank only."""
        if self.is_main:
            say(text)

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.gather(None)

    def exit(self, code: int) -> NoReturn:
        """Exits every process at the end of a script, without Python's normal shutdown.

        With gloo, torch's and DeepSpeed's destructors sometimes hang or abort. Python would also wait for abandoned
        threads.
        """
        self.barrier()
        end_now(code)
