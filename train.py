"""Pretrains a language model. The whole of a run, top to bottom.

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 train.py --config recipes/demo.yaml
    python train.py --config recipes/demo.yaml --optim.learning_rate 1e-3     # one process; any setting by its path
    python train.py --config recipes/demo.yaml --check [--verbose]            # finds every mistake, starts nothing
    python train.py --config recipes/demo.yaml --smoke                        # 100 steps, and a verdict on each part

The same command again continues the run, or says that it is done.
"""

import sys

from pretrain.errors import or_exit, run_script
from pretrain.recipe import CommandLine, explain, read_command_line

if __name__ == "__main__":  # before torch is imported: --help and a mistyped setting answer at once
    command_line: CommandLine = or_exit(lambda: read_command_line(sys.argv[1:], __doc__))

import gc
import os
import uuid
from functools import partial

import torch

import pretrain.model.architectures  # noqa: F401  (registers the local models)
from pretrain.checkpoint.export import describe_model, export_final
from pretrain.checkpoint.export_check import verify_export
from pretrain.config import RunConfig
from pretrain.data.batches import key_of
from pretrain.errors import EXIT_DONE
from pretrain.hardware import peak_flops
from pretrain.model.build import build_meta_model
from pretrain.model.compile import checkpoint_activations, compile_model
from pretrain.model.initial_weights import InitialWeights
from pretrain.model.loss import LanguageModelLoss, choose_loss
from pretrain.model.pretrained import open_pretrained
from pretrain.optim.optimizers import optimizer_builder, parameter_dtype
from pretrain.parallel.strategy import Strategy, device_type, make_strategy
from pretrain.planning.smoke import smoke_test
from pretrain.training.attempt import attempt
from pretrain.training.background_jobs import Companions, evaluate_beside, publish_beside, publish_cut_short
from pretrain.training.cautions import cautions
from pretrain.training.experts import Experts
from pretrain.training.guard import SpeedGuard
from pretrain.training.metrics import Metrics, Throughput, peak_memory_bytes
from pretrain.training.prefetch import ReadAhead
from pretrain.training.resume import Continuation
from pretrain.training.run_plan import derive
from pretrain.training.run_records import banner, schedule_record, write_record
from pretrain.training.samples import sample_texts
from pretrain.training.step_reports import Request
from pretrain.training.supervisor import Supervisor
from pretrain.training.validation import open_validation, validate


def main(
    config: RunConfig, overridden: frozenset[str], strategy: Strategy, steps: int | None, metrics: Metrics
) -> int:
    """Trains, to the end or for so many steps; returns the exit status. All ranks."""
    plan = derive(config, strategy.data_ranks * strategy.micro_batches_per_call).cut(steps)
    validation_readers = open_validation(config.data)
    continuation = Continuation(config, plan, overridden, strategy, metrics)  # at its newest intact checkpoint
    run, state = continuation.run, continuation.state
    publish_cut_short(config, metrics)
    if continuation.is_done:
        strategy.print(f"{config.output} is done: {state.step:,} steps. The model is in {config.output}/final.")
        return EXIT_DONE

    # Model and optimizer, the same under every strategy, which gives the model its weights piece by piece.
    causal_lm = build_meta_model(run.model_config, attention=run.attention)
    checkpoint_activations(causal_lm, config.activation_checkpointing)
    model = LanguageModelLoss(
        causal_lm,
        z_loss=config.loss.z_loss,
        backend=choose_loss(config.loss.backend, device_type=strategy.device.type, compile_mode=config.compile),
        from_hidden_states=run.from_hidden_states,
    )
    starts_from_pretrained = config.init == "pretrained" and not continuation.found
    weights = InitialWeights(
        seed=config.seed,
        pretrained=open_pretrained(config.model) if starts_from_pretrained else None,
        dtype=parameter_dtype(config.optim),
    )
    build_optimizer = optimizer_builder(
        config.optim, causal_lm, run.peak_learning_rate, seed=config.seed, device_type=strategy.device.type
    )
    model = strategy.prepare(model, weights, build_optimizer)
    continuation.load()
    experts = Experts(causal_lm, strategy, run.router_losses)
    experts.load(state.expert_counts)
    compile_model(model, causal_lm, config.compile)

    # Where everything goes, and what looks after it.
    if strategy.is_main and (continuation.is_new or not (config.output / "config.yaml").exists()):
        write_record(config, run, strategy)
    metrics.begin(config, total_steps=run.total_steps, first_step=state.step)
    peak, peak_source = peak_flops(strategy.device, run.precision)
    built = {
        "strategy": f"{strategy.name}, {strategy.ranks} processes on {strategy.device.type}",
        "optimizer": strategy.optimizer_built,
        "peak for MFU": f"{peak / 1e12:.3g} TFLOP/s per process ({peak_source})" if peak else peak_source,
    }
    metrics.say(banner(config, run, built))
    for caution in cautions(config, run, overridden, strategy.device) if strategy.is_main else ():
        metrics.write("warning", step=state.step, message=caution)
    start_id = uuid.uuid4().hex
    facts = {"start_id": start_id, "parameters": run.parameters, "ranks": strategy.ranks, **schedule_record(run)}
    facts |= {"active_parameters": run.active_parameters, "flops_per_token": run.flops_per_token}
    metrics.write("start", step=state.step, **facts)
    if continuation.found:
        event = "branch" if continuation.is_new else "resume"
        metrics.write(event, step=state.step, path=continuation.found.name, run=str(continuation.found.parents[1]))
    supervisor = Supervisor(
        config, strategy, metrics, start_id, continuation.guard_state, scales_loss=run.precision == "fp16"
    )
    watch, speed_guard, throughput = supervisor.watch, SpeedGuard(config.guard.speed_drop), Throughput()
    tokenizer = run.batches.readers[run.batches.folders[0]].manifest.tokenizer_folder
    describe = partial(describe_model, causal_lm, tokenizer)
    log_every = max(1, round(config.logging.every_steps * config.cadence))
    validate_every = run.interval(config.validation, config.cadence)
    save_every = run.interval(config.checkpoint, config.cadence)
    sample_every = run.interval(config.samples, config.cadence)
    evaluate_every = run.interval(config.evaluation, config.cadence)
    companions, read_ahead = Companions(config.output, metrics), ReadAhead(strategy)

    @throughput.paused()
    def measure(sequences: int) -> dict[str, dict[str, float]]:
        return validate(
            model,
            validation_readers,
            strategy,
            sequence_length=config.data.sequence_length,
            sequences=sequences,
            sequences_per_micro_batch=config.batch.sequences_per_micro_batch * strategy.micro_batches_per_call,
            document_mask=config.data.document_mask,
            attention=run.attention,
            after_batch=supervisor.listen_or_leave,
        )

    def measure_all() -> None:
        with supervisor.leaving("validation"):
            results = measure(config.validation.sequences)
            for source, result in results.items():
                metrics.write("validation", step=state.step, source=source, **result)
            if results:
                state.validation_loss = sum(result["loss"] for result in results.values()) / len(results)

    @throughput.paused()
    def save(wait: bool, required: bool = False) -> None:
        supervisor.compare_copies()  # before, not after: a checkpoint must not keep what differs
        state.expert_counts = experts.counts()
        continuation.save(supervisor.guard.state(), describe, watch.beat)
        if wait or required:
            continuation.finish_saving(watch.beat, required)
            supervisor.listen()  # a signal meanwhile ends the run here, not a step and another save later

    @throughput.paused()
    def sample() -> None:
        with supervisor.leaving("samples"):
            beat = supervisor.listen_or_leave
            for prompt, text in sample_texts(strategy, run.model_config, tokenizer, config.samples, state.step, beat):
                metrics.write("sample", step=state.step, prompt=prompt, text=text)

    watch.start()
    if state.validation_loss is None and (state.step == run.total_steps or (state.step == 0 and validate_every)):
        measure_all()
    first_step, tokens_at_log = state.step, state.tokens
    model.train()
    while state.step < run.total_steps:
        step = state.step
        learning_rate = run.learning_rate(step) * state.learning_rate_factor
        strategy.set_learning_rate(learning_rate)
        micro_steps = run.micro_steps(step)
        experts.begin_step(micro_steps)
        step_loss = torch.zeros((), device=strategy.device)
        for micro_step in range(micro_steps):
            with throughput.loading_data():
                batch = read_ahead.micro_batch(run, step, micro_step)
            torch.manual_seed(key_of(config.seed, step, micro_step, strategy.data_rank) % 2**63)  # dropout
            with strategy.accumulate(is_last=micro_step == micro_steps - 1):
                loss, cross_entropy = model(**batch)
                strategy.backward(loss / micro_steps)
            experts.count()
            step_loss += cross_entropy / micro_steps
        grad_norm, skipped = strategy.update(config.optim.max_grad_norm)
        experts.end_step()

        state.step, state.tokens, state.validation_loss = step + 1, run.tokens_before(step + 1), None
        throughput.step_done()
        is_last = state.step == run.total_steps
        logs = is_last or state.step % log_every == 0
        measures = is_last or (validate_every and state.step % validate_every == 0)
        evaluates = evaluate_every and state.step % evaluate_every == 0
        saves = is_last or evaluates or (save_every and state.step % save_every == 0)
        outcome = supervisor.after_step(
            state.step, (step_loss, grad_norm, skipped), run, settle=logs or measures or saves
        )
        state.skipped_steps += outcome.skipped_steps
        if logs:
            figures = throughput.read(state.tokens - tokens_at_log, run.flops_per_token, peak, strategy.ranks)
            tokens_at_log = state.tokens
            metrics.write(
                "train",
                step=state.step,
                tokens=state.tokens,
                loss=outcome.report.loss,
                grad_norm=outcome.report.grad_norm,
                learning_rate=learning_rate,
                **figures,
                **experts.figures(),
                peak_memory_bytes=peak_memory_bytes(strategy.device),
            )
            for warning in filter(None, (speed_guard.judge(figures["tokens_per_second"]), experts.newly_dead())):
                metrics.write("warning", step=state.step, message=warning)
            companions.fetch()
        metrics.stands_at(state.step, state.tokens)
        continuation.report_saves()

        if outcome.bad is not None:
            with throughput.paused():
                continuation.go_back(outcome.bad, watch.beat)
                supervisor.go_back(continuation.guard_state)
            run, state, tokens_at_log = continuation.run, continuation.state, continuation.state.tokens
            experts.load(state.expert_counts)
            continue
        if measures:
            measure_all()
        if saves or supervisor.request in (Request.SAVE, Request.ANNEAL):
            save(wait=evaluates or supervisor.request != Request.NONE, required=is_last)
        if evaluates and continuation.is_saved:
            with throughput.paused(), supervisor.leaving("evaluation"):
                beat = supervisor.listen_or_leave
                evaluate_beside(companions, strategy, continuation.newest, config.evaluation, beat)
        if sample_every and state.step % sample_every == 0:
            sample()
        if state.step % config.guard.compare_copies_every_steps == 0:
            supervisor.compare_copies()
        if supervisor.request == Request.ANNEAL:
            run = continuation.anneal()
            metrics.change_total(run.total_steps)
        if supervisor.ends:
            if supervisor.request != Request.ABORT:
                save(wait=True, required=True)
            companions.stop()
            return supervisor.end(state.step, run.total_steps)
        supervisor.answer(state.step, run.total_steps, supervisor.request != Request.SAVE or continuation.is_saved)
        if step == first_step:
            gc.collect()  # what lives after the first step lives for the run: the collector need not walk it again
            gc.freeze()

    final = export_final(config.output, strategy, config.export.dtype, describe, watch.beat)
    with supervisor.leaving(f"the check of {final}"):
        verification = partial(
            verify_export,
            final,
            continuation.newest,
            dtype=config.export.dtype,
            precision=run.precision,
            training_losses={source: result["loss"] for source, result in measure(sequences=1).items()},
            readers=validation_readers,
            sequence_length=config.data.sequence_length,
            document_mask=config.data.document_mask,
        )
        if (verdict := strategy.by_main(verification, supervisor.listen_or_leave)) is not None:
            metrics.write("export", step=state.step, problems=verdict.problems)
            metrics.say(verdict.in_words())
    publish_beside(config, None, metrics)
    companions.fetch()
    if companions.names:
        metrics.say(f"Still running, with results to come in metrics.jsonl: {', '.join(companions.names)}")
    watch.close()
    metrics.end(EXIT_DONE, "done", step=state.step, tokens=state.tokens, skipped_steps=state.skipped_steps)
    strategy.print(f"The model is in {final}. Try: python evaluate.py --model {final} --prompt 'Once'")
    return EXIT_DONE


def check(asked: CommandLine) -> None:
    """Everything that can be known before a process starts."""
    run = derive(asked.config, ranks=int(os.environ.get("WORLD_SIZE", "1")))
    open_validation(asked.config.data)
    if asked.verbose:
        print(explain(asked))
    print(banner(asked.config, run, {}))
    for caution in cautions(asked.config, run, asked.overridden, torch.device(device_type())):
        print(f"warning: {caution}")
    print("The recipe can run.")


def start(asked: CommandLine) -> None:
    strategy = make_strategy(asked.config)

    def train(config: RunConfig, steps: int | None = None) -> int:
        return attempt(config, strategy, partial(main, config, asked.overridden, strategy, steps))

    strategy.exit(smoke_test(asked.config, strategy, train) if asked.smoke else train(asked.config))


if __name__ == "__main__":
    run_script(lambda: (check if command_line.check else start)(command_line))
