"""Begins a run's training, and each of its steps."""

import gc

from pretrain.data.shards import ShardReader
from pretrain.hardware import peak_flops, threads_beside
from pretrain.optim.averaging import average_after_step
from pretrain.training.background_jobs import Evaluations, MirrorCopies
from pretrain.training.guard import SpeedGuard
from pretrain.training.metrics import LiveFigures, Speed
from pretrain.training.run import Run
from pretrain.training.run_plan import Cadences
from pretrain.training.run_records import announce
from pretrain.training.supervision import watch_over


def begin(run: Run, validation_readers: dict[str, ShardReader]) -> None:
    """Announces the run, and creates what the steps and the work between them need. A collective call."""
    config = run.config
    run.validation_readers = validation_readers
    run.peak_flops, peak_source = peak_flops(run.strategy.device, run.plan.precision)
    start_id = announce(run, peak_source)
    watch_over(run, start_id)
    batches = run.whole_plan.batches
    run.tokenizer = batches.readers[batches.folders[0]].manifest.tokenizer_folder
    run.stage = run.plan.stage(max(run.state.step - 1, 0))
    if config.data.stages:
        _take_positions(run)
    run.mirror = MirrorCopies(config, run.log)
    run.evaluations = Evaluations(config.output, run.log, threads_beside(run.strategy.device))
    run.speed = Speed(
        guard=SpeedGuard(config.guard.speed_drop),
        live=LiveFigures(run.state.step, run.plan.total_steps),
        tokens_at_log=run.state.tokens,
        flops_at_log=run.plan.flops_before(run.state.step),
        tokens_shown=run.state.tokens,
        saves_every=Cadences.of(config, run.plan).saves,
    )
    run.watch.start()  # from here on a signal is a request, handled after the step


def begin_step(run: Run) -> int:
    """Returns the number of the step, from 0; if a stage begins with it, the model follows."""
    if run.steps_begun == 1:
        # Objects alive after the first step live as long as the run: freezing lets later collections skip them.
        gc.collect()
        gc.freeze()
    run.steps_begun += 1
    before = run.stage
    run.stage = run.plan.stage(run.state.step)
    if run.stage.differs_from(before):
        _enter_stage(run)
    return run.state.step


def _take_positions(run: Run) -> None:
    """Gives the model the positions of the stage."""
    from pretrain.model.positions import use_positions

    use_positions(run.built.model, run.stage.model_config, run.built.causal_lm)


def _enter_stage(run: Run) -> None:
    """Gives the model the stage's windows and positions."""
    stage = run.stage
    model_config = stage.model_config
    _take_positions(run)
    run.watch.allow_compiling()
    run.speed.guard = SpeedGuard(run.config.guard.speed_drop)
    tokens = run.plan.ramp.sequences_at(run.state.step) * run.plan.batches.window.sequence_length
    run.log.write(
        "stage",
        step=run.state.step,
        flops_per_token=stage.flops_per_token,
        stage=stage.number,
        sequence_length=stage.window.sequence_length,
        max_position_embeddings=getattr(model_config, "max_position_embeddings", None),
        rope_parameters=getattr(model_config, "rope_parameters", None),
        sequences_per_step=tokens // stage.window.sequence_length,
        sequences_per_micro_batch=stage.sequences_per_micro_batch,
    )
    if run.config.compile != "none":
        run.speed.throughput.expect_compiling()
        run.log.expect("First step of the stage, which compiles the model anew")


def count_step(run: Run) -> None:
    """Counts the step after its update, and adds its weights to their average if the step enters it."""
    state = run.state
    settings = run.config.averaging
    state.step += 1
    state.tokens = run.plan.tokens_before(state.step)
    state.validation_loss = None
    if settings.kind == "none" or state.step % settings.every_steps:
        return
    state.average, share = average_after_step(settings, state.average, state.step, run.plan.total_steps)
    if state.average is None:
        run.strategy.average = None
    else:
        run.strategy.update_average(share)
