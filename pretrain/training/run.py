"""State shared by the training functions."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.checkpoint.checkpoints import Checkpoints, SavedRun
from pretrain.checkpoint.run_state import Request, RunState
from pretrain.config import RunConfig
from pretrain.data.shards import ShardReader
from pretrain.parallel.strategy import Strategy
from pretrain.recipe import CommandLine
from pretrain.runs.control import Control
from pretrain.runs.run_folder import checkpoint_name
from pretrain.training.build import Built
from pretrain.training.guard import SpeedGuard, StepGuard
from pretrain.training.metrics import Metrics, Throughput
from pretrain.training.run_plan import RunPlan, StagePlan
from pretrain.training.step_reports import Consensus
from pretrain.training.time_budget import TimeBudget
from pretrain.training.watchdog import Watch

if TYPE_CHECKING:
    from pretrain.training.background_jobs import Evaluations, MirrorCopies
    from pretrain.training.benchmarks import Benchmarks
    from pretrain.training.diagnostics import Diagnostics


@dataclass
class Run:
    """State of a run on this rank, created by `open_run` and completed by `begin`."""

    config: RunConfig
    """The recipe, with `auto` resolved."""
    command_line: CommandLine
    strategy: Strategy
    log: Metrics
    checkpoints: Checkpoints
    recipe_plan: RunPlan
    """The recipe's plan, as for a new run."""
    last_step: int | None = None
    """Step to stop at, as in the smoke test; None for the whole run."""

    state: RunState = field(default_factory=RunState)
    whole_plan: RunPlan = field(init=False)
    """Plan for the whole run, without skipped data or a requested decay."""
    plan: RunPlan = field(init=False)
    """Plan in effect, updated by `replan`."""
    loaded_from: Path | None = None
    """Checkpoint that the run resumed from, branched from or rolled back to."""
    saved: SavedRun | None = None
    """Contents of `loaded_from`."""
    is_new: bool = True
    """True if the folder had no checkpoint at the start."""
    is_complete: bool = False
    """True if training is finished and final/ exists."""
    continues: str = ""
    """Description of how the run continues; see `describe_continuation`."""

    built: Built = field(init=False)

    validation_readers: dict[str, ShardReader] = field(init=False)
    """{source name: reader for its validation split}."""
    peak_flops: float | None = field(init=False)
    """Peak FLOP/s per process; None if unknown."""
    tokenizer: Path = field(init=False)
    stage: StagePlan = field(init=False)
    """Current stage, whose windows and positions the model uses."""
    diagnostics: "Diagnostics | None" = None
    """Per-layer statistics, if enabled."""
    steps_begun: int = 0
    throughput: Throughput = field(init=False)
    speed_guard: SpeedGuard = field(init=False)
    logged_step: int = field(init=False)
    """Last step with a train event."""
    mirror: "MirrorCopies | None" = None
    """Background copies to the mirror, if enabled. None on other ranks than the main one."""
    evaluations: "Evaluations | None" = None
    """Evaluations in separate processes, if enabled."""
    benchmarks: "Benchmarks | None" = None
    """Benchmarks on the training ranks, if enabled."""

    request: Request = Request.NONE
    """Pending request, identical on all ranks."""
    consensus: Consensus = field(init=False)
    guard: StepGuard = field(init=False)
    control: Control = field(init=False)
    clock: TimeBudget = field(init=False)
    watch: Watch = field(init=False)

    def __post_init__(self):
        self.whole_plan = self.recipe_plan
        self.replan()

    def replan(self) -> None:
        """Updates the plan in effect from the whole plan and the state."""
        # In this order: a requested decay changes the end of the run, and `last_step` truncates any run.
        self.plan = self.whole_plan.in_effect(self.state).cut(self.last_step)
        self.log.total_steps = self.plan.total_steps

    @property
    def newest_checkpoint(self) -> Path:
        """Path of the newest checkpoint."""
        return self.checkpoints.folder / checkpoint_name(self.checkpoints.last_step)

    @property
    def is_saved(self) -> bool:
        """True if this step's checkpoint was written. Identical on all ranks only after `save(run, wait=True)`."""
        return self.checkpoints.last_step == self.state.step

    @property
    def ends(self) -> bool:
        """True if there is a request to end the run."""
        return self.request > Request.ANNEAL

    @property
    def wants_save(self) -> bool:
        """True if there is a request that saves a checkpoint and continues."""
        return self.request in (Request.SAVE, Request.SHORTEN, Request.ANNEAL)

    @property
    def wants_decay(self) -> bool:
        """True if there is a request to start or shorten the final decay."""
        return self.request in (Request.SHORTEN, Request.ANNEAL)

    @contextmanager
    def pausing(self, work: str) -> Iterator[None]:
        """Shows `work` in the progress line and excludes its time from the throughput."""
        with self.throughput.paused(), self.log.doing(work):
            yield
