"""Ends a run, early or after exporting the model."""

import shlex
from contextlib import nullcontext
from pathlib import Path

from pretrain.checkpoint.export import export_final
from pretrain.checkpoint.export_check import ExportCheck, TrainingLosses, verify_export
from pretrain.checkpoint.run_state import Request
from pretrain.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, one_line
from pretrain.training.between_steps import losses_of_sources, model_describer, save
from pretrain.training.run import Run
from pretrain.training.steps import answer, interruptible

REASONS = {
    Request.PREEMPT: "preempted",
    Request.INTERRUPT: "interrupted",
    Request.PAUSE: "paused at checkpoint.stop_at_step",
    Request.STOP: "stopped",
    Request.ABORT: "aborted",
}
"""{request: reason shown in the log}."""


def end_early(run: Run) -> int:
    """Saves, unless aborted, and ends the run early. Returns the exit code."""
    if not run.ends:
        run.request = Request.PAUSE
    if run.request != Request.ABORT:
        save(run, wait=True, required=True)
    if run.evaluations:
        run.evaluations.stop()
    if run.mirror:
        run.mirror.settle(run.watch.beat)
    request = run.request  # may have become more urgent during the save
    saved = "nothing saved" if request == Request.ABORT else f"saved at step {run.state.step:,}"
    set_later = "to resume, set it to a later step or to null"
    how = set_later if request == Request.PAUSE else "run the same command to resume"
    answer(run)
    run.watch.close()
    code = EXIT_PREEMPTED if request == Request.PREEMPT else EXIT_INTERRUPTED
    run.log.end(code, f"{REASONS[request]}, {saved}; {how}")
    if run.mirror:
        run.mirror.close()
    return code


def finish(run: Run) -> int:
    """Exports the model to final/, verifies it and publishes it. Returns the exit code."""
    final = _export_and_publish(run) if run.config.checkpoint.save_final else None
    state = run.state
    if run.evaluations:
        run.evaluations.fetch()
        if names := ", ".join(run.evaluations.names):
            run.log.say(f"Evaluations still running (results will be in metrics.jsonl): {names}")
    if run.mirror:
        run.mirror.settle(run.watch.beat)
    run.watch.close()  # before any rank exits, which would look like a crash to the others
    run.log.end(EXIT_DONE, "done", step=state.step, tokens=state.tokens, skipped_steps=state.skipped_steps)
    if run.mirror:
        run.mirror.close()
    if final:
        trust = " --trust_remote_code" if run.config.trust_remote_code else ""
        try_it = f"python evaluate.py --model {shlex.quote(str(final))} --interactive{trust}"
        run.strategy.ranks.print(f"The model is in {final}. Try: {try_it}")
    return EXIT_DONE


def _export_and_publish(run: Run) -> Path:
    weights = run.config.export.weights
    if weights == "average" and not run.state.average:
        message = "export.weights: average, but the run ended before averaging began; final/ contains the raw weights"
        run.log.warn(message, step=run.state.step)
        weights = "raw"
    with run.strategy.averaged() if weights == "average" else nullcontext():
        final = _export(run, weights)
    if run.config.hub.repository is not None:
        from pretrain.training.background_jobs import start_publishing

        start_publishing(run.config, None, run.log)
    return final


def _export(run: Run, weights: str) -> Path:
    """Exports the current weights to final/ and verifies it. weights: raw or average."""
    config = run.config
    dtype = config.export.dtype
    with run.log.doing("exporting the model"):
        final = export_final(config.output, run.strategy, dtype, model_describer(run), run.watch.beat)
    with interruptible(run, f"verification of {final}") as beat:
        results = losses_of_sources(run, 1, beat)
        losses = {source: result["loss"] for source, result in results.items()}
        trained = TrainingLosses(losses, run.validation_readers, config.data.window)
        checkpoint = nullcontext(run.newest_checkpoint)
        if weights == "average":
            from pretrain.checkpoint.average_folder import average_folder

            checkpoint = average_folder(run.newest_checkpoint)

        def verification() -> ExportCheck:
            precision = run.whole_plan.precision
            try:
                with checkpoint as folder:
                    return verify_export(final, folder, dtype=dtype, precision=precision, trained=trained)
            except Exception as error:  # libraries may raise anything, and final/ is complete and can be published
                return ExportCheck(final, [f"the check failed ({one_line(error)})"])

        verdict = run.strategy.ranks.by_main(verification, beat)
        if verdict is not None:
            run.log.write("export", step=run.state.step, weights=weights, problems=verdict.problems)
            run.log.say(verdict.in_words())
    return final
