"""The work between steps, and the end of a run: logs, validation, checkpoints, samples, evaluations, the export."""

import copy
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from pretrain.checkpoint.average_folder import average_folder
from pretrain.checkpoint.export import describe_model, export_final
from pretrain.checkpoint.export_check import ExportCheck, TrainingLosses, verify_export
from pretrain.checkpoint.run_state import Request, RunState
from pretrain.data.shards import ShardReader
from pretrain.errors import EXIT_DONE
from pretrain.hardware import threads_beside
from pretrain.model.positions import use_positions
from pretrain.training.background_jobs import Evaluations, MirrorCopies, evaluate_beside, publish_beside
from pretrain.training.build import Built
from pretrain.training.guard import Finding, SpeedGuard
from pretrain.training.metrics import LiveFigures, Throughput, peak_memory_bytes
from pretrain.training.resume import Continuation
from pretrain.training.run_plan import Cadences, RunPlan, StagePlan
from pretrain.training.samples import sample_texts
from pretrain.training.step_reports import StepReport
from pretrain.training.supervisor import Supervisor
from pretrain.training.validation import perplexity_of, validate


class Housekeeping:
    """What the loop calls between two steps; all ranks together. Long work does not count as training time.

    Args:
        validation_readers: by the name of their source.
        peak_flops: of one process; None if unknown.
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
        self.mirror = MirrorCopies(self.config, self.metrics)
        self.evaluations = Evaluations(self.config.output, self.metrics, threads_beside(self.strategy.device))
        batches = self.plan.batches
        self.tokenizer = batches.readers[batches.folders[0]].manifest.tokenizer_folder
        self.stage = continuation.run.stage(max(self.state.step - 1, 0))
        """Whose windows and positions the model has: that of the last step."""
        use_positions(built.model, self.stage.model_config, built.causal_lm)
        self._steps_begun = 0
        self._tokens_at_log = self._tokens_before = self.state.tokens
        self._flops_at_log = continuation.run.flops_before(self.state.step)
        self._live = LiveFigures(self.state.step, continuation.run.total_steps)
        self._saves_every = Cadences.of(self.config, continuation.run).saves

    @property
    def state(self) -> RunState:
        """The run's current state; a rollback replaces it."""
        return self.continuation.state

    @property
    def describe(self) -> Callable[..., None]:
        """Writes the files of a Hugging Face model folder other than the weights, as the model is now."""
        # A save in the background may write them when the model has entered its next stage.
        described = copy.copy(self.built.causal_lm)
        described.config = copy.deepcopy(described.config)
        return partial(describe_model, described, self.tokenizer)

    def begin_step(self, run: RunPlan) -> int:
        """The number of the step, from 0; where other windows or positions begin with it, the model follows."""
        if self._steps_begun == 1:
            self._settle_in()
        self._steps_begun += 1
        before, self.stage = self.stage, run.stage(self.state.step)
        if self.stage.differs_from(before):
            self._enter_stage(run)
        return self.state.step

    def _enter_stage(self, run: RunPlan) -> None:
        use_positions(self.built.model, self.stage.model_config, self.built.causal_lm)
        self.supervisor.watch.allow_compiling()
        self.speed_guard = SpeedGuard(self.config.guard.speed_drop)
        facts = {"stage": self.stage.number, "sequence_length": self.stage.window.sequence_length}
        facts |= {"max_position_embeddings": getattr(self.stage.model_config, "max_position_embeddings", None)}
        facts |= {"rope_parameters": getattr(self.stage.model_config, "rope_parameters", None)}
        sequences = run.ramp.sequences_at(self.state.step) * run.batches.window.sequence_length
        facts |= {"sequences_per_step": sequences // self.stage.window.sequence_length}
        facts |= {"sequences_per_micro_batch": self.stage.sequences_per_micro_batch}
        self.metrics.write("stage", step=self.state.step, flops_per_token=self.stage.flops_per_token, **facts)
        if self.config.compile != "none":
            self.throughput.expect_compiling()
            self.metrics.expect("First step of the stage, which compiles the model anew")

    def log(self, report: StepReport, learning_rate: float) -> None:
        """Writes the figures since the last log, and warns of lost speed and of dead experts."""
        tokens, self._tokens_at_log = self.state.tokens - self._tokens_at_log, self.state.tokens
        flops_before, self._flops_at_log = self._flops_at_log, self.continuation.run.flops_before(self.state.step)
        figures = {"loss": report.loss, "perplexity": perplexity_of(report.loss), "grad_norm": report.grad_norm}
        figures["learning_rate"] = learning_rate
        flops = self._flops_at_log - flops_before
        figures |= self.throughput.read(tokens, flops, self.peak_flops, self.strategy.ranks.count)
        figures |= self.built.experts.figures() | {"peak_memory_bytes": peak_memory_bytes(self.strategy.device)}
        figures |= self.metrics.energy()
        self.metrics.pace, self.metrics.seconds_left = self.throughput.pace, self.supervisor.time.left
        self.metrics.write("train", step=self.state.step, tokens=self.state.tokens, **figures)
        slow = self.speed_guard.judge(figures["tokens_per_second"])
        idle = self.speed_guard.judge_mfu(figures["mfu"]) if self.strategy.device.type == "cuda" else None
        for warning in filter(None, (slow, idle, self.built.experts.newly_dead())):
            self.metrics.write("warning", step=self.state.step, message=warning)
        self.evaluations.fetch()
        self.mirror.look()

    def keep_up(self, reports: list[StepReport]) -> None:
        """After every step: moves the live line and reports finished saves."""
        self.metrics.stands_at(self.state.step, self.state.tokens)
        if self.metrics.is_live:
            self._show_live(reports)
        self.continuation.report_saves()

    def _show_live(self, reports: list[StepReport]) -> None:
        """From what the host knows anyway: on a GPU the loss is that of the step before."""
        live, step, total_steps = self._live, self.state.step, self.metrics.total_steps
        live.step, live.total_steps, live.seconds_left = step, total_steps, self.supervisor.time.left
        live.losses.extend(report.loss for report in reports)
        tokens, self._tokens_before = self.state.tokens - self._tokens_before, self.state.tokens
        if (seconds := self.throughput.recent_step_seconds) and tokens > 0:  # else those before the pause stay
            live.step_seconds, live.tokens_per_second = seconds, tokens / seconds
            rate = live.tokens_per_second / self.strategy.ranks.count
            live.mfu = self.stage.flops_per_token * rate / self.peak_flops if self.peak_flops else None
        every = self._saves_every or total_steps
        live.next_save = min((step // every + 1) * every, total_steps)
        self.metrics.show(live)

    @contextmanager
    def pausing(self, work: str) -> Iterator[None]:
        """Around work that is not training: its time does not count, and the live line names it."""
        with self.throughput.paused(), self.metrics.doing(work):
            yield

    def _settle_in(self) -> None:
        """After the first step: objects alive now live as long as the run, and later collections skip them."""
        gc.collect()
        gc.freeze()

    def go_back(self, finding: Finding) -> tuple[RunPlan, RunState]:
        """Rolls back to a checkpoint before the finding; returns the plan and the state from there on."""
        with self.pausing("rolling back"):
            self.supervisor.go_back(finding)
        run = self.continuation.run
        self._tokens_at_log, self._flops_at_log = self.state.tokens, run.flops_before(self.state.step)
        self.built.experts.load(self.state.expert_counts)
        return run, self.state

    def measure(self) -> None:
        """Validation loss of every source, of the weights and of their average."""
        began = time.perf_counter()
        with self.supervisor.leaving("validation"):
            sequences = self.config.validation.sequences
            results, averages = self._validate(sequences), {}
            if self.stage.window != self.config.data.window:
                for source, result in self._validate(sequences, self.stage).items():
                    results[source] |= {name: result[name] for name in ("loss_by_position", "tokens_by_position")}
                    results[source] |= {"stage_loss": result["loss"]}
                    results[source] |= {"stage_sequence_length": self.stage.window.sequence_length}
            if self.state.average:
                with self.strategy.averaged():
                    averages = self._validate(sequences)
            for source, result in results.items():
                average = {"average_loss": averages[source]["loss"]} if averages else {}
                self.metrics.write("validation", step=self.state.step, source=source, **result, **average)
            if results:
                self.state.validation_loss = sum(result["loss"] for result in results.values()) / len(results)
        self.supervisor.time.validation_seconds = time.perf_counter() - began

    def _validate(self, sequences: int, stage: StagePlan | None = None) -> dict[str, dict[str, Any]]:
        """stage: on about as many tokens in its windows, of the sources that have one; None: on data.window's."""
        data, rows = self.config.data, self.config.batch.sequences_per_micro_batch
        window, readers = data.window, self.validation_readers
        if stage is not None:
            sequences = -(-sequences * window.sequence_length // stage.window.sequence_length)
            window, rows = stage.window, stage.sequences_per_micro_batch
            readers = {name: reader for name, reader in readers.items() if window.count_in(reader.tokens)}
        with self.pausing("validation"):
            return validate(
                self.built.model,
                readers,
                self.strategy,
                window=window,
                sequences=sequences,
                sequences_per_micro_batch=rows * self.strategy.micro_batches_per_call,
                attention=self.plan.attention,
                after_batch=self.supervisor.listen_or_leave,
            )

    def save(self, *, wait: bool, required: bool = False) -> None:
        """Starts saving a checkpoint. wait: until it is written. required: wait, and raise SaveError if it fails."""
        beat = self.supervisor.watch.beat
        with self.pausing("saving"):
            self.supervisor.compare_copies()  # before the save: a checkpoint must not keep copies that differ
            self.state.expert_counts = self.built.experts.counts()
            if self.supervisor.time.is_limited:
                self.state.seconds = self.supervisor.time.seconds
            self.continuation.save(self.supervisor.guard.state(), self.describe, beat)
            if wait or required:
                self.continuation.finish_saving(beat, required)
                self.supervisor.listen()  # a signal during the save ends the run here, not one step and save later

    def evaluate(self) -> None:
        """Evaluates this step's checkpoint in a separate process, if it was written."""
        if not self.continuation.is_saved:
            return
        with self.pausing("evaluation"), self.supervisor.leaving("evaluation"):
            beat = self.supervisor.listen_or_leave
            newest, ranks = self.continuation.newest, self.strategy.ranks
            evaluate_beside(self.evaluations, ranks, newest, self.config.evaluation, beat)

    def sample(self) -> None:
        """Logs the model's continuations of the recipe's prompts."""
        with self.pausing("samples"), self.supervisor.leaving("samples"):
            model_config, settings, seed = self.stage.model_config, self.config.samples, self.state.step
            beat = self.supervisor.listen_or_leave
            for prompt, text in sample_texts(self.strategy, model_config, self.tokenizer, settings, seed, beat):
                self.metrics.write("sample", step=self.state.step, prompt=prompt, text=text)

    def anneal(self) -> RunPlan:
        """Starts the final decay of the learning rate now, or shortens it; returns the changed plan."""
        run = self.continuation.anneal(shorten=self.supervisor.request == Request.SHORTEN)
        self.metrics.change_total(run.total_steps)
        return run

    def _export(self, weights: str) -> Path:
        """Writes final/ with the weights that the model has, which `weights` names, and checks it."""
        config, beat = self.config, self.supervisor.watch.beat
        with self.metrics.doing("exporting the model"):
            final = export_final(config.output, self.strategy, config.export.dtype, self.describe, beat)
        with self.metrics.doing("checking the export"), self.supervisor.leaving(f"the check of {final}"):
            losses = {source: result["loss"] for source, result in self._validate(sequences=1).items()}
            trained = TrainingLosses(losses, self.validation_readers, config.data.window)
            precisions = {"dtype": config.export.dtype, "precision": self.plan.precision}
            newest = self.continuation.newest

            def verification() -> ExportCheck:
                with average_folder(newest) if weights == "average" else nullcontext(newest) as checkpoint:
                    return verify_export(final, checkpoint, **precisions, trained=trained)

            verdict = self.strategy.ranks.by_main(verification, self.supervisor.listen_or_leave)
            if verdict is not None:
                self.metrics.write("export", step=self.state.step, weights=weights, problems=verdict.problems)
                self.metrics.say(verdict.in_words())
        return final

    def end_early(self) -> int:
        """Ends the run on request or for a pause, after a save unless it is aborted; returns the exit status."""
        if not self.supervisor.ends:
            self.supervisor.request = Request.PAUSE
        if self.supervisor.request != Request.ABORT:
            self.save(wait=True, required=True)
        self.evaluations.stop()
        self.mirror.settle(self.supervisor.watch.beat)
        code = self.supervisor.end()
        self.mirror.close()
        return code

    def finish(self) -> int:
        """Exports the trained model to final/, checks it and publishes it; returns the exit status."""
        final = self._export_and_publish() if self.config.checkpoint.at_end else None
        state = self.state
        self.evaluations.fetch()
        if names := ", ".join(self.evaluations.names):
            self.metrics.say(f"Evaluations still running, with results to come in metrics.jsonl: {names}")
        self.mirror.settle(self.supervisor.watch.beat)
        self.supervisor.watch.close()
        self.metrics.end(EXIT_DONE, "done", step=state.step, tokens=state.tokens, skipped_steps=state.skipped_steps)
        self.mirror.close()
        if final:
            self.strategy.ranks.print(
                f"The model is in {final}. Try: python evaluate.py --model {final} --interactive"
            )
        return EXIT_DONE

    def _export_and_publish(self) -> Path:
        config, state = self.config, self.state
        weights = config.export.weights
        if weights == "average" and not state.average:
            message = "export.weights: average, and the run has ended before there was one: final/ has the raw weights"
            self.metrics.write("warning", step=state.step, message=message)
            weights = "raw"
        with self.strategy.averaged() if weights == "average" else nullcontext():
            final = self._export(weights)
        publish_beside(config, None, self.metrics)
        return final
