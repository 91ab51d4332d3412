"""State shared by the loop's functions."""

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
from pretrain.training.metrics import LiveFigures, Metrics, Throughput
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
    """A run from its start in this process to its end. Every rank has one, created by `open_run`.

    `open_run`, `build_training` and `begin` set the fields below `plan`, in this order.
    """

    config: RunConfig
    """Recipe with `auto` resolved."""
    command_line: CommandLine
    strategy: Strategy
    log: Metrics
    checkpoints: Checkpoints
    recipe_plan: RunPlan
    """Plan of the recipe only, as for a new run."""
    last_step: int | None = None
    """Step at which a shortened run ends, as in the smoke test; None to train to the end."""

    state: RunState = field(default_factory=RunState)
    whole_plan: RunPlan = field(init=False)
    """Plan of all steps from the checkpoint on. It ignores skipped data and a requested decay."""
    plan: RunPlan = field(init=False)
    """Plan in effect, without skipped data and with the requested end. `replan` updates it."""
    loaded_from: Path | None = None
    """Checkpoint from which the run resumed or branched, or to which it rolled back."""
    saved: SavedRun | None = None
    """Contents of that checkpoint."""
    is_new: bool = True
    """True if nothing was trained in this folder before."""
    is_complete: bool = False
    """True if all steps are trained and final/ is written."""
    continues: str = ""
    """Describes how the run continues from its checkpoint."""

    built: Built = field(init=False)

    validation_readers: dict[str, ShardReader] = field(init=False)
    """{name of the source: its held-out tokens}."""
    peak_flops: float | None = field(init=False)
    """Peak FLOP/s of one process; None if unknown."""
    tokenizer: Path = field(init=False)
    stage: StagePlan = field(init=False)
    """Stage of the last step. The model uses its windows and positions."""
    diagnostics: "Diagnostics | None" = None
    """Measurements within the model, if the recipe asks for them."""
    steps_begun: int = 0
    throughput: Throughput = field(init=False)
    speed_guard: SpeedGuard = field(init=False)
    live: LiveFigures = field(init=False)
    logged_step: int = field(init=False)
    """Last step for which speed and load were logged. They are measured from there."""
    mirror: "MirrorCopies | None" = None
    """Copies to the mirror in the background, if the recipe names a mirror."""
    evaluations: "Evaluations | None" = None
    """Evaluations in separate processes, if the recipe asks for them."""
    benchmarks: "Benchmarks | None" = None
    """Benchmarks on the training processes, if the recipe asks for them there."""

    request: Request = Request.NONE
    """Pending request, the same on all ranks."""
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
        # In this order, because a requested decay ends the run without the skipped data, and `last_step` ends any run.
        plan = self.whole_plan.leaving_out(self.state.left_out)
        self.plan = plan.annealing(self.state.anneal_from, self.state.anneal_steps).cut(self.last_step)
        self.log.total_steps = self.plan.total_steps

    @property
    def newest_checkpoint(self) -> Path:
        """Folder of the newest checkpoint."""
        return self.checkpoints.folder / checkpoint_name(self.checkpoints.last_step)

    @property
    def is_saved(self) -> bool:
        """True if this step's checkpoint is written. Equal on all ranks after `save(run, wait=True)`."""
        return self.checkpoints.last_step == self.state.step

    @property
    def ends(self) -> bool:
        """True if the run was asked to end."""
        return self.request > Request.ANNEAL

    @property
    def wants_save(self) -> bool:
        """True if the run was asked to save a checkpoint and continue."""
        return self.request in (Request.SAVE, Request.SHORTEN, Request.ANNEAL)

    @property
    def wants_decay(self) -> bool:
        """True if the run was asked to begin its final decay, or to shorten it."""
        return self.request in (Request.SHORTEN, Request.ANNEAL)

    def warn(self, message: str) -> None:
        """Writes a warning event."""
        self.log.write("warning", message=message)

    @contextmanager
    def pausing(self, work: str) -> Iterator[None]:
        """Names the work between steps in the live line, and excludes its time from training."""
        with self.throughput.paused(), self.log.doing(work):
            yield
