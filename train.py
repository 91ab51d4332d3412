"""Pretrains a language model. The whole of a run, top to bottom.

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 train.py --config recipes/demo.yaml
    python train.py --config recipes/demo.yaml --optim.learning_rate 1e-3     # one process; any setting by its path
    python train.py --config recipes/demo.yaml --check                        # finds every mistake, starts nothing

The same command again continues the run, or says that it is done.
"""

import sys

from pretrain.problems import InputError, or_exit, run_script
from pretrain.recipe import CommandLine, read_command_line

if __name__ == "__main__":  # before torch is imported: --help and a mistyped setting answer at once
    command_line: CommandLine = or_exit(lambda: read_command_line(sys.argv[1:], __doc__))

import gc
import os
import time
from dataclasses import asdict, dataclass
from functools import partial

import torch

import pretrain.architectures  # noqa: F401  (registers the local models)
from pretrain.batches import key_of, model_inputs
from pretrain.checkpoint import (
    EXIT_NO_VALID_CHECKPOINT,
    Checkpoints,
    NoValidCheckpoint,
    Retention,
    SaveFailed,
    load_saved,
)
from pretrain.compilation import checkpoint_activations, compile_model
from pretrain.config import RunConfig
from pretrain.derived import Derived, derive, identity_problems
from pretrain.export import card_facts, describe_model, export_final
from pretrain.hardware import peak_flops
from pretrain.loss import LanguageModelLoss
from pretrain.metrics import Metrics, Throughput, peak_memory_bytes
from pretrain.model import build_meta_model, embedding_parameter_names, load_pretrained
from pretrain.optim import build_optimizer
from pretrain.record import banner, schedule_record, write_record
from pretrain.strategy import Strategy, make_strategy
from pretrain.validation import open_validation, validate
from pretrain.weights import InitialWeights

EXIT_INTERRUPTED = 130


@dataclass
class RunState:
    """What a run knows beyond its tensors; trainer_state.json."""

    step: int = 0
    """Optimizer steps taken."""
    tokens: int = 0
    """Training tokens seen."""
    skipped_steps: int = 0
    """Steps whose gradient was not finite."""
    validation_loss: float | None = None
    """Mean over the sources, if measured at this very step."""


def main(config: RunConfig, overridden: frozenset[str]) -> None:
    started = time.perf_counter()
    strategy = make_strategy(config)
    run = derive(config, strategy.data_ranks * strategy.micro_batches_per_call)
    validation_readers = open_validation(config.data)

    checkpoints = Checkpoints(
        config.output,
        strategy,
        Retention(config.checkpoint.keep_last, config.checkpoint.keep_best, config.checkpoint.milestones_every),
    )
    found = checkpoints.newest_valid(log=strategy.print)
    state = RunState()
    if found is not None:
        saved_model, saved_optimizer, saved = load_saved(found)
        if problems := identity_problems(saved["identity"], run.identity, overridden):
            raise InputError(*problems)
        state = RunState(**saved["state"])
        if state.step >= run.total_steps and (config.output / "final" / "MANIFEST.json").exists():
            strategy.print(f"{config.output} is done: {state.step:,} steps. The model is in {config.output}/final.")
            strategy.exit(0)

    # Model and optimizer, the same under every strategy, which gives the model its weights piece by piece.
    causal_lm = build_meta_model(run.model_config, attention=run.attention)
    checkpoint_activations(causal_lm, config.activation_checkpointing)
    model = LanguageModelLoss(
        causal_lm,
        z_loss=config.loss.z_loss,
        backend="chunked" if config.loss.backend == "auto" else config.loss.backend,
    )
    weights = InitialWeights(
        seed=config.seed,
        pretrained=load_pretrained(config.model) if config.init == "pretrained" and found is None else None,
        dtype=torch.bfloat16 if config.optim.stochastic_rounding else torch.float32,
    )
    optimizer_of = partial(
        build_optimizer,
        full_shapes={name: tuple(parameter.shape) for name, parameter in causal_lm.named_parameters()},
        no_decay=embedding_parameter_names(causal_lm),
        name=config.optim.name,
        learning_rate=run.peak_learning_rate,
        betas=config.optim.betas,
        eps=config.optim.eps,
        weight_decay=config.optim.weight_decay,
        seed=config.seed,
        device_type=strategy.device.type,
    )
    model = strategy.prepare(model, weights, optimizer_of)
    if found is not None:
        strategy.load(saved_model, saved_optimizer)
        strategy.load_state(saved["strategy"])
    compile_model(model, causal_lm, config.compile)

    # Where everything goes.
    if strategy.is_main and found is None:
        write_record(config, run, strategy)
    metrics = Metrics(
        config.output, is_main=strategy.is_main, total_steps=run.total_steps, first_step=state.step, config=config
    )
    peak, peak_source = peak_flops(strategy.device, run.precision)
    built = {
        "strategy": f"{strategy.name}, {strategy.ranks} processes on {strategy.device.type}",
        "optimizer": strategy.optimizer_built,
        "peak for MFU": f"{peak / 1e12:.3g} TFLOP/s per process ({peak_source})" if peak else peak_source,
    }
    metrics.say(banner(config, run, built))
    metrics.write("start", step=state.step, parameters=run.parameters, ranks=strategy.ranks, **schedule_record(run))
    if found is not None:
        metrics.write("resume", step=state.step, path=found.name)

    describe = partial(
        describe_model, causal_lm, run.batches.readers[run.batches.folders[0]].manifest.tokenizer_folder
    )
    validate_now = partial(
        validate,
        model,
        validation_readers,
        strategy,
        sequence_length=config.data.sequence_length,
        sequences=config.validation.sequences,
        sequences_per_micro_batch=config.batch.sequences_per_micro_batch * strategy.micro_batches_per_call,
        document_mask=config.data.document_mask,
        attention=run.attention,
    )
    log_every = max(1, round(config.logging.every_steps * config.cadence))
    validate_every = run.interval(config.validation, config.cadence)
    save_every = run.interval(config.checkpoint, config.cadence)
    throughput = Throughput()

    def measure() -> dict[str, dict[str, float]]:
        with throughput.paused():
            results = validate_now() if validation_readers else {}
        for source, result in results.items():
            metrics.write("validation", step=state.step, source=source, **result)
        if results:
            state.validation_loss = sum(result["loss"] for result in results.values()) / len(results)
        return results

    def save() -> None:
        with throughput.paused():
            start = time.perf_counter()
            groups = {"model": strategy.model_tensors(), "optimizer": strategy.optimizer_tensors()}
            contents = {"state": asdict(state), "identity": run.identity, "strategy": strategy.state()}
            contents["validation_loss"] = state.validation_loss
            path = checkpoints.save(state.step, contents, groups, describe)
            size = sum(file.stat().st_size for file in path.iterdir())
        seconds = time.perf_counter() - start
        metrics.write("checkpoint", step=state.step, path=path.name, bytes=size, seconds=seconds)

    results = measure() if state.step == 0 and validate_every else {}
    skipped_since_log: list[torch.Tensor] = []
    model.train()
    for step in range(state.step, run.total_steps):
        learning_rate = run.learning_rate(step)
        strategy.set_learning_rate(learning_rate)
        micro_steps = run.micro_steps(step)
        step_loss = torch.zeros((), device=strategy.device)
        for micro_step in range(micro_steps):
            with throughput.loading_data():
                batch = load_batch(run, strategy, step, micro_step, config.data.document_mask)
            torch.manual_seed(key_of(config.seed, step, micro_step, strategy.data_rank) % 2**63)  # dropout
            with strategy.accumulate(is_last=micro_step == micro_steps - 1):
                loss, cross_entropy = model(**batch)
                strategy.backward(loss / micro_steps)
            step_loss += cross_entropy / micro_steps
        grad_norm, skipped = strategy.update(config.optim.max_grad_norm)

        state.step, state.tokens, state.validation_loss = step + 1, run.tokens_before(step + 1), None
        skipped_since_log.append(skipped)
        throughput.step_done()
        is_last = state.step == run.total_steps
        if state.step % log_every == 0 or is_last:
            tokens = state.tokens - run.tokens_before(state.step - len(skipped_since_log))
            figures = throughput.read(tokens, run.flops_per_token, peak, strategy.ranks)
            metrics.write(
                "train",
                step=state.step,
                tokens=state.tokens,
                loss=strategy.mean(step_loss).item(),
                grad_norm=grad_norm.item(),
                learning_rate=learning_rate,
                **figures,
                peak_memory_bytes=peak_memory_bytes(strategy.device),
            )
            if skipped_steps := int(sum(skipped_since_log).item()):
                state.skipped_steps += skipped_steps
                metrics.write("skip", step=state.step, steps=skipped_steps)
            skipped_since_log = []
        metrics.step_done(step)
        if is_last or (validate_every and state.step % validate_every == 0):
            results = measure()
        if is_last or (save_every and state.step % save_every == 0):
            save()
        if step == 0:
            gc.collect()  # what lives after the first step lives for the run: the collector need not walk it again
            gc.freeze()

    final = export_final(config.output, strategy, config.export.dtype, describe, card_facts(config, run, results))
    metrics.write(
        "end",
        reason="done",
        code=0,
        step=state.step,
        steps=state.step,
        tokens=state.tokens,
        seconds=time.perf_counter() - started,
        skipped_steps=state.skipped_steps,
    )
    metrics.say(f"The model is in {final}. Try: python evaluate.py --model {final} --prompt 'Once'")
    metrics.close()
    strategy.exit(0)


def load_batch(
    run: Derived, strategy: Strategy, step: int, micro_step: int, document_mask: bool
) -> dict[str, torch.Tensor]:
    """This rank's micro-batch on its device."""
    sequences = run.sequences_per_micro_batch * strategy.micro_batches_per_call
    ids = run.batches.read(step, micro_step, strategy.data_rank, ranks=strategy.data_ranks, sequences=sequences)
    return model_inputs(
        ids,
        device=strategy.device,
        attention=run.attention,
        end_of_document_id=run.batches.end_of_document_id if document_mask else None,
    )


def check(config: RunConfig) -> int:
    """Everything that can be known before a process starts."""
    run = derive(config, ranks=int(os.environ.get("WORLD_SIZE", "1")))
    open_validation(config.data)
    print(banner(config, run, {}))
    print("The recipe can run.")
    return 0


def start(config: RunConfig, overridden: frozenset[str]) -> int:
    try:
        main(config, overridden)
    except NoValidCheckpoint as error:
        print(error, file=sys.stderr)
        return EXIT_NO_VALID_CHECKPOINT
    except SaveFailed as error:
        print(f"the checkpoint could not be saved: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues from the newest checkpoint", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    if command_line.check:
        run_script(lambda: check(command_line.config))
    run_script(lambda: start(command_line.config, command_line.overridden))
