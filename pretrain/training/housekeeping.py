"""The work between steps, and the end of a run: logs, validation, checkpoints, samples, evaluations, the export."""

from collections.abc import Callable
from functools import partial

from pretrain.checkpoint.export import describe_model, export_final
from pretrain.checkpoint.export_check import TrainingLosses, verify_export
from pretrain.checkpoint.run_state import Request, RunState
from pretrain.data.shards import ShardReader
from pretrain.errors import EXIT_DONE
from pretrain.training.background_jobs import Companions, evaluate_beside, publish_beside
from pretrain.training.build import Built
from pretrain.training.guard import Finding, SpeedGuard
from pretrain.training.metrics import Throughput, peak_memory_bytes
from pretrain.training.resume import Continuation
from pretrain.training.run_plan import RunPlan
from pretrain.training.samples import sample_texts
from pretrain.training.step_reports import StepReport
from pretrain.training.supervisor import Supervisor
from pretrain.training.validation import validate


class Housekeeping:
    """What the loop calls between two steps; all ranks together. What takes long does not count as training time.

    Args:
        validation_readers: by the name of their source.
        peak_flops: of one process; None where it is not known.
    """

    def __init__(
        self,
        continuation: Continuation,
        supervisor: Supervisor,
        built: Built,
        validation_readers: dict[str, ShardReader],
        peak_flops: float | None,
    ):
        self.continuation, self.supervisor, self.built = continuation, supervisor, built
        self.config, self.plan = continuation.config, continuation.plan
        self.strategy, self.metrics = continuation.strategy, continuation.metrics
        self.validation_readers, self.peak_flops = validation_readers, peak_flops
        self.throughput, self.speed_guard = Throughput(), SpeedGuard(self.config.guard.speed_drop)
        self.companions = Companions(self.config.output, self.metrics)
        batches = self.plan.batches
        self.tokenizer = batches.readers[batches.folders[0]].manifest.tokenizer_folder
        self._tokens_at_log = self.state.tokens

    @property
    def state(self) -> RunState:
        """Where the run stands now."""
        return self.continuation.state

    @property
    def describe(self) -> Callable[..., None]:
        """Writes what a Hugging Face model folder holds beside the weights."""
        return partial(describe_model, self.built.causal_lm, self.tokenizer)

    def log(self, report: StepReport, learning_rate: float) -> None:
        """Writes the figures since the last log, and warns of lost speed and of dead experts."""
        tokens, self._tokens_at_log = self.state.tokens - self._tokens_at_log, self.state.tokens
        figures = self.throughput.read(tokens, self.plan.flops_per_token, self.peak_flops, self.strategy.ranks.count)
        self.metrics.write(
            "train",
            step=self.state.step,
            tokens=self.state.tokens,
            loss=report.loss,
            grad_norm=report.grad_norm,
            learning_rate=learning_rate,
            **figures,
            **self.built.experts.figures(),
            peak_memory_bytes=peak_memory_bytes(self.strategy.device),
        )
        slow = self.speed_guard.judge(figures["tokens_per_second"])
        for warning in filter(None, (slow, self.built.experts.newly_dead())):
            self.metrics.write("warning", step=self.state.step, message=warning)
        self.companions.fetch()

    def keep_up(self) -> None:
        """After every step: the progress bar, and the saves that have ended meanwhile."""
        self.metrics.stands_at(self.state.step, self.state.tokens)
        self.continuation.report_saves()

    def go_back(self, finding: Finding) -> tuple[RunPlan, RunState]:
        """Back to a checkpoint from before what was found; returns the run and its state as they are from there on."""
        with self.throughput.paused():
            self.supervisor.go_back(finding)
        self._tokens_at_log = self.state.tokens
        self.built.experts.load(self.state.expert_counts)
        return self.continuation.run, self.state

    def measure(self) -> None:
        """Validation loss of every source."""
        with self.supervisor.leaving("validation"):
            results = self._validate(self.config.validation.sequences)
            for source, result in results.items():
                self.metrics.write("validation", step=self.state.step, source=source, **result)
            if results:
                self.state.validation_loss = sum(result["loss"] for result in results.values()) / len(results)

    def _validate(self, sequences: int) -> dict[str, dict[str, float]]:
        config = self.config
        with self.throughput.paused():
            return validate(
                self.built.model,
                self.validation_readers,
                self.strategy,
                window=config.data.window,
                sequences=sequences,
                sequences_per_micro_batch=config.batch.sequences_per_micro_batch
                * self.strategy.micro_batches_per_call,
                attention=self.plan.attention,
                after_batch=self.supervisor.listen_or_leave,
            )

    def save(self, *, wait: bool, required: bool = False) -> None:
        """Begins to save a checkpoint; wait: until it is written. required: raises SaveError where it cannot be."""
        beat = self.supervisor.watch.beat
        with self.throughput.paused():
            self.supervisor.compare_copies()  # before, not after: a checkpoint must not keep what differs
            self.state.expert_counts = self.built.experts.counts()
            self.continuation.save(self.supervisor.guard.state(), self.describe, beat)
            if wait or required:
                self.continuation.finish_saving(beat, required)
                self.supervisor.listen()  # a signal meanwhile ends the run here, not a step and another save later

    def evaluate(self) -> None:
        """Evaluates this step's checkpoint in a process of its own, if it could be written."""
        if not self.continuation.is_saved:
            return
        with self.throughput.paused(), self.supervisor.leaving("evaluation"):
            beat = self.supervisor.listen_or_leave
            evaluate_beside(
                self.companions, self.strategy.ranks, self.continuation.newest, self.config.evaluation, beat
            )

    def sample(self) -> None:
        """Text that the model continues."""
        with self.throughput.paused(), self.supervisor.leaving("samples"):
            texts = sample_texts(
                self.strategy,
                self.plan.model_config,
                self.tokenizer,
                self.config.samples,
                self.state.step,
                self.supervisor.listen_or_leave,
            )
            for prompt, text in texts:
                self.metrics.write("sample", step=self.state.step, prompt=prompt, text=text)

    def anneal(self) -> RunPlan:
        """The final decay of the learning rate begins now; returns the run as it is from here on."""
        run = self.continuation.anneal()
        self.metrics.change_total(run.total_steps)
        return run

    def end_early(self) -> int:
        """Ends the run because somebody asked for it, saved unless it is to be aborted; returns the exit status."""
        if self.supervisor.request != Request.ABORT:
            self.save(wait=True, required=True)
        self.companions.stop()
        return self.supervisor.end()

    def finish(self) -> int:
        """Exports the trained model to final/, checks it and publishes it; returns the exit status."""
        config, state = self.config, self.state
        final = export_final(
            config.output, self.strategy, config.export.dtype, self.describe, self.supervisor.watch.beat
        )
        with self.supervisor.leaving(f"the check of {final}"):
            losses = {source: result["loss"] for source, result in self._validate(sequences=1).items()}
            trained = TrainingLosses(losses, self.validation_readers, config.data.window)
            precisions = {"dtype": config.export.dtype, "precision": self.plan.precision}
            verification = partial(verify_export, final, self.continuation.newest, **precisions, trained=trained)
            verdict = self.strategy.ranks.by_main(verification, self.supervisor.listen_or_leave)
            if verdict is not None:
                self.metrics.write("export", step=state.step, problems=verdict.problems)
                self.metrics.say(verdict.in_words())
        publish_beside(config, None, self.metrics)
        self.companions.fetch()
        if self.companions.names:
            names = ", ".join(self.companions.names)
            self.metrics.say(f"Still running, with results to come in metrics.jsonl: {names}")
        self.supervisor.watch.close()
        self.metrics.end(EXIT_DONE, "done", step=state.step, tokens=state.tokens, skipped_steps=state.skipped_steps)
        self.strategy.ranks.print(f"The model is in {final}. Try: python evaluate.py --model {final} --prompt 'Once'")
        return EXIT_DONE
