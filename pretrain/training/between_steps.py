"""Work between two steps: logging, validation, checkpoints, evaluation, samples, early decay.

Functions are collective unless noted. Long-running work doesn't count toward the throughput and is interrupted if the
run is stopping.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from pretrain.checkpoint.checkpoints import SaveError
from pretrain.checkpoint.export import describe_model
from pretrain.checkpoint.run_state import Request, RunState
from pretrain.config import RunConfig
from pretrain.training.metrics import peak_memory_bytes
from pretrain.training.run import Run
from pretrain.training.run_plan import RunPlan, StagePlan, settings_of
from pretrain.training.step_reports import StepReport
from pretrain.training.steps import compare_replicas, interruptible, poll_requests, steps_of_decay, steps_of_decay_left
from pretrain.training.validation import measure, perplexity_of
from pretrain.units import duration_text


def log_step(run: Run, report: StepReport, learning_rate: float) -> None:
    """Logs the metrics since the last log step, finished evaluations and mirror progress."""
    step = run.state.step
    plan = run.plan
    log = run.log
    ranks = run.strategy.ranks.count
    experts = run.built.experts
    tokens = run.state.tokens - plan.tokens_before(run.logged_step)
    flops = plan.flops_before(step) - plan.flops_before(run.logged_step)
    run.logged_step = step
    figures = {
        "loss": report.loss,
        "perplexity": perplexity_of(report.loss),
        "grad_norm": report.grad_norm,
        "learning_rate": learning_rate,
        **run.throughput.read(tokens, flops, run.peak_flops, ranks),
        **(experts.figures() if experts else {}),
        **(run.built.terms.figures(run.strategy) if run.built.terms else {}),
        "peak_memory_bytes": peak_memory_bytes(run.strategy.device),
        **log.energy(),
    }
    log.seconds_left = seconds_left(run)
    log.write("train", step=step, tokens=run.state.tokens, **figures)
    for warning in (run.speed_guard.judge(figures["tokens_per_second"]), experts and experts.newly_dead()):
        if warning:
            log.warn(warning, step=step)
    if run.evaluations:
        run.evaluations.fetch()
    if run.mirror:
        run.mirror.look()


def seconds_left(run: Run) -> float | None:
    """Returns the expected time to the end of training, or None if it is unknown."""
    pace = run.throughput.pace
    return pace and min((run.plan.total_steps - run.state.step) * pace, run.clock.left)


def show_progress(run: Run, reports: list[StepReport]) -> None:
    """Updates the progress line without waiting for the device. On a GPU, the loss lags one step behind."""
    step = run.state.step
    run.log.set_position(step, run.state.tokens)
    if not run.log.draws:
        return
    plan = run.plan
    parts = [f"step {step:,}/{plan.total_steps:,}"]
    parts += [f"loss {report.loss:.4f}" for report in reports[-1:]]
    if seconds := run.throughput.pace:
        rate = plan.tokens_in(step - 1) / seconds
        parts += [f"{rate:,.0f} tok/s", f"{duration_text(seconds_left(run))} left"]
        if run.peak_flops:
            mfu = run.stage.flops_per_token * rate / (run.peak_flops * run.strategy.ranks.count)
            parts.append(f"MFU {mfu:.1%}")
    run.log.show(" · ".join(parts))


def validate(run: Run) -> None:
    """Measures and logs the validation loss per source, for the raw and the averaged weights."""
    began = time.perf_counter()
    with interruptible(run, "validation") as beat:
        sequences = run.config.validation.sequences
        results = losses_of_sources(run, sequences, beat)
        averages = {}
        if run.stage.window != run.config.data.window:
            for source, result in losses_of_sources(run, sequences, beat, run.stage).items():
                results[source] |= {
                    "loss_by_position": result["loss_by_position"],
                    "tokens_by_position": result["tokens_by_position"],
                    "stage_loss": result["loss"],
                    "stage_sequence_length": run.stage.window.sequence_length,
                }
        if results and run.state.average:
            with run.strategy.averaged():
                averages = losses_of_sources(run, sequences, beat)
        for source, result in results.items():
            average = {"average_loss": averages[source]["loss"]} if averages else {}
            run.log.write("validation", step=run.state.step, source=source, **result, **average)
        if results:
            run.state.validation_loss = sum(result["loss"] for result in results.values()) / len(results)
    run.clock.validation_seconds = time.perf_counter() - began


def losses_of_sources(
    run: Run, sequences: int, beat: Callable[[], None], stage: StagePlan | None = None
) -> dict[str, dict[str, Any]]:
    """Measures the loss on `sequences` windows per source.

    Args:
        stage: measure about the same number of tokens in this stage's windows instead of data.window. Skips sources
            that are too short for such a window.
    """
    window = run.config.data.window
    rows = run.config.batch.sequences_per_micro_batch
    readers = run.validation_readers
    if stage is not None:
        sequences = -(-sequences * window.sequence_length // stage.window.sequence_length)
        window = stage.window
        rows = stage.sequences_per_micro_batch
        readers = {name: reader for name, reader in readers.items() if window.count_in(reader.tokens)}
    return measure(
        run.built.model,
        readers,
        run.strategy,
        window=window,
        sequences=sequences,
        sequences_per_micro_batch=rows * run.strategy.micro_batches_per_call,
        attention=run.plan.attention,
        after_batch=beat,
    )


def save(run: Run, *, wait: bool, required: bool = False) -> None:
    """Starts saving a checkpoint of this step, unless one exists. A collective call.

    Args:
        wait: wait until the checkpoint is written.
        required: also raise SaveError on all ranks if the save fails.
    """
    with run.pausing("saving"):
        compare_replicas(run)  # before the save, so that diverged replicas are never saved
        if run.built.experts:
            run.state.expert_counts = run.built.experts.counts()
        if run.clock.is_limited:
            run.state.seconds = run.clock.seconds
        if run.checkpoints.begun_step != run.state.step:
            _begin_save(run)
        if wait or required:
            run.checkpoints.wait()
            report_saves(run)
            if required and not run.is_saved:
                raise SaveError(f"the checkpoint at step {run.state.step:,} could not be written; see train.log")
            poll_requests(run)  # so that a signal during the save ends the run before another step


def _begin_save(run: Run) -> None:
    strategy = run.strategy
    state = run.state
    groups = {"model": strategy.model_tensors(), "optimizer": strategy.optimizer_tensors()}
    if state.average is not None:
        groups["average"] = strategy.model_tensors(averaged=True)
    if next(strategy.loss_terms.parameters(), None) is not None:
        groups["loss_terms"] = strategy.term_tensors()
        if state.average is not None:
            groups["average_loss_terms"] = strategy.term_tensors(averaged=True)
    contents = {
        **trainer_state(run.command_line.config, run.whole_plan, run.plan, state),
        "strategy": strategy.state(),
        "guard": run.guard.state(),
        "validation_loss": state.validation_loss,
    }
    run.checkpoints.save(state.step, contents, groups, model_describer(run))
    report_saves(run)


def trainer_state(asked: RunConfig, whole: RunPlan, plan: RunPlan, state: RunState) -> dict[str, Any]:
    """Returns the entries of trainer_state.json that `continue_from` reads.

    Args:
        asked: the recipe, with `auto` unresolved.
        whole: the plan for the whole run.
        plan: the plan in effect, without skipped data and with any requested decay.
    """
    return {
        "state": asdict(state),
        "identity": whole.identity,
        "plan": plan.planned(),
        "settings": settings_of(asked),
        "data": asdict(plan.batches.position(state.step)),
    }


def model_describer(run: Run) -> Callable[..., None]:
    """Returns a function that writes a model folder for the current model, without the weights."""
    # Copied, because a background save may run after the config has changed in the next stage.
    described = copy.copy(run.strategy.causal_lm)
    described.config = copy.deepcopy(described.config)
    return partial(describe_model, described, run.tokenizer)


def report_saves(run: Run) -> None:
    """Logs finished saves. Not collective, because a save may finish at different steps on different ranks."""
    while (save := run.checkpoints.finished()) is not None:
        if save.problem is not None:
            message = (
                f"the checkpoint at step {save.step:,} was not saved: {save.problem}; training continues, and "
                "earlier checkpoints are unaffected"
            )
            run.log.warn(message, step=save.step)
            continue
        figures = {"bytes": save.bytes, "seconds": save.seconds, "stall_seconds": save.stall_seconds}
        run.log.write("checkpoint", step=save.step, path=save.folder.name, **figures)
        hub = run.config.hub
        milestones = run.config.checkpoint.keep_every
        if hub.repository is not None and hub.every == "milestones" and milestones and save.step % milestones == 0:
            from pretrain.training.background_jobs import start_publishing

            start_publishing(run.config, save.step, run.log)


def evaluate(run: Run) -> None:
    """Evaluates this step's checkpoint in a separate process. A collective call.

    With `where: blocking`, all ranks wait for the process. With `where: in_loop`, the training ranks evaluate the
    current model instead.
    """
    if run.benchmarks is not None:
        _measure_benchmarks(run)
        return
    if not run.is_saved:
        return
    settings = run.config.benchmarks
    ranks = run.strategy.ranks
    with interruptible(run, "evaluation") as beat:
        process = run.evaluations.start(run.newest_checkpoint, settings) if ranks.is_main else None
        # Only the main rank can poll the process, but all ranks must leave the loop together.
        while settings.where == "blocking" and ranks.gather(process is not None and process.poll() is None)[0]:
            time.sleep(0.5)
            beat()
    if settings.where == "blocking" and ranks.is_main:
        run.evaluations.fetch()


def _measure_benchmarks(run: Run) -> None:
    from pretrain.training.background_jobs import numbers_of

    step = run.state.step
    settings = run.config.benchmarks
    log = run.log
    with interruptible(run, "evaluation") as beat:
        found = run.benchmarks.measure(
            run.built.model,
            run.strategy,
            window=run.config.data.window,
            sequences=run.config.batch.sequences_per_micro_batch * run.strategy.micro_batches_per_call,
            attention=run.plan.attention,
            beat=beat,
        )
        if isinstance(found, str):
            log.warn(f"benchmarks could not run: {found}")
            return
        scores, shortened = found
        if shortened:
            log.warn(f"benchmarks: {shortened:,} prompts are longer than a window and were truncated at the start")
        tasks = {}
        for task, measures in scores.items():
            about = {"task": task.name, **measures, "few_shots": task.few_shots, "samples": task.count}
            log.write(
                "evaluation",
                step=step,
                tokens=run.state.tokens,
                model=f"{run.config.output}@{step}",
                **about,
                is_part=task.is_part,
                limit=settings.limit,
            )
            log.say_scores(step, task.name, measures)
            tasks[task.name] = measures | {"is_part": task.is_part}
        log.track(numbers_of({"step": step, "sources": {}, "tasks": tasks}))


def sample(run: Run) -> None:
    """Generates and logs a sample for each of the recipe's prompts. A collective call."""
    from pretrain.training.samples import sample_texts

    step = run.state.step
    with interruptible(run, "samples") as beat:
        texts = sample_texts(
            run.strategy, run.stage.model_config, run.tokenizer, run.config.samples, seed=step, beat=beat
        )
        for prompt, text in texts:
            run.log.write("sample", step=step, prompt=prompt, text=text)


def diagnose(run: Run, batch: dict[str, Any]) -> None:
    """Logs per-layer statistics for this step. A collective call.

    batch: the step's last micro-batch, used for another forward pass.
    """
    with run.pausing("diagnostics"):
        figures = run.diagnostics.measure(run.built.model, batch)
        run.log.write("diagnostics", step=run.state.step, **figures)
        names = figures.pop("layers")
        curves = {
            f"diagnostics/{measure}/{name}": value
            for measure, values in figures.items()
            for name, value in zip(names, values, strict=True)
            if value is not None
        }
        run.log.track(curves)


def decay(run: Run) -> None:
    """Handles a decay request: starts the final decay, or halves its remaining steps."""
    state = run.state
    left = steps_of_decay_left(run)
    if run.request == Request.SHORTEN and left > 1:
        state.anneal_steps = state.step + left // 2 - state.anneal_from
    elif run.request == Request.ANNEAL and state.anneal_from is None:
        state.anneal_steps = round(steps_of_decay(run))
        state.anneal_from = state.step
    run.replan()
