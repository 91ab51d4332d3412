"""Pretrains a language model. The whole of a run, top to bottom.

    python train.py --config recipes/demo.yaml                               # one process
    python train.py --config recipes/demo.yaml --optim.learning_rate 1e-3    # any setting by its path
    python train.py --config recipes/demo.yaml --check [--verbose]           # every mistake; starts nothing
    python train.py --config recipes/demo.yaml --smoke                       # 100 steps, pass or fail per stage
    python train.py --config recipes/demo.yaml --profile 20                  # why is it slow? goes on training
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 train.py --config recipes/demo.yaml

Run the same command to resume; a finished run is reported as already complete.
"""

import sys

from pretrain.errors import EXIT_DONE, Problems, or_exit, run_script
from pretrain.recipe import CommandLine, explain, naming_preparations, read_command_line
from pretrain.terminal import begin

if __name__ == "__main__":  # before torch is imported: --help and a mistyped setting answer at once
    words = sys.argv[1:]
    if any(word.split("=")[0] == "--text" for word in words):
        from pretrain_tools.planning.own_text import with_own_text

        words = or_exit(lambda: with_own_text(sys.argv[1:]))
    command_line: CommandLine = or_exit(lambda: read_command_line(words, __doc__))
    begin()

import torch

from pretrain.checkpoint.run_state import Request
from pretrain.config import RunConfig
from pretrain.data.batches import key_of
from pretrain.hardware import peak_flops, seed_dropout
from pretrain.parallel.registry import make_strategy, micro_batches_launched, share_shards, strategy_class
from pretrain.parallel.strategy import Strategy
from pretrain.training.attempt import attempt
from pretrain.training.build import build_training
from pretrain.training.continued_plan import next_start_in_words
from pretrain.training.housekeeping import Housekeeping
from pretrain.training.metrics import Metrics
from pretrain.training.prefetch import ReadAhead
from pretrain.training.resume import Continuation
from pretrain.training.run_plan import Cadences, derive, settled
from pretrain.training.run_records import announce, banner
from pretrain.training.supervisor import Supervisor
from pretrain.training.validation import data_problems, open_validation


def main(asked: CommandLine, config: RunConfig, strategy: Strategy, steps: int | None, metrics: Metrics) -> int:
    """Trains to the end, or only the first `steps` steps; returns the exit status. All ranks."""
    plan = derive(config, strategy.data_ranks * strategy.micro_batches_per_call)
    validation_readers = open_validation(config.data)
    continuation = Continuation(config, plan, asked, strategy, metrics, steps)  # at its newest intact checkpoint
    run, state = continuation.run, continuation.state
    if continuation.is_done:
        message = f"{config.output} is already complete: {state.step:,} steps, model in {config.output}/final."
        strategy.ranks.print(message)
        return EXIT_DONE
    if asked.profile is not None:
        from pretrain_tools.profiling.step_profile import refuse_profile

        refuse_profile(asked.profile, state.step, run.total_steps)

    # Model and optimizer: from the checkpoint, from a pretrained model, or initialised by the seed.
    built = build_training(
        config,
        run,
        strategy,
        learning_rate=run.peak_learning_rate,
        from_pretrained=config.init == "pretrained" and not continuation.found,
    )
    model, experts = built.model, built.experts
    continuation.load()
    experts.load(state.expert_counts)

    # What feeds the steps, what supervises them, and what is done between them.
    peak = peak_flops(strategy.device, run.precision)
    start_id = announce(continuation, peak)
    supervisor = Supervisor(continuation, start_id)
    housekeeping = Housekeeping(continuation, supervisor, built, validation_readers, peak[0])
    cadences, throughput, read_ahead = Cadences.of(config, run), housekeeping.throughput, ReadAhead(strategy)
    supervisor.watch.start()  # from here on a signal is a request, heard after the step
    begins, has_ended = state.step == 0 and cadences.measures, state.step == run.total_steps
    if state.validation_loss is None and (begins or has_ended):
        housekeeping.measure()

    profile, first_step = None, state.step
    model.train()
    while state.step < run.total_steps:
        # The step: the same function of the step's number in every run of this recipe.
        step = housekeeping.begin_step(run)  # where a stage begins, the model takes its windows and positions
        learning_rate = run.learning_rate(step) * state.learning_rate_factor
        strategy.set_learning_rate(learning_rate)
        micro_steps = run.micro_steps(step)
        experts.begin_step(micro_steps)
        step_loss = torch.zeros((), device=strategy.device)
        for micro_step in range(micro_steps):
            with throughput.loading_data():
                batch = read_ahead.micro_batch(run, step, micro_step)
            seed_dropout(key_of(config.seed, step, micro_step, strategy.dropout_rank) % 2**63, strategy.device)
            with strategy.accumulate(is_last=micro_step == micro_steps - 1):
                loss, cross_entropy = model(**batch)
                strategy.backward(loss / micro_steps)
            experts.count()
            step_loss += cross_entropy / micro_steps
            supervisor.watch.beat()
        grad_norm, skipped = strategy.update(config.optim.max_grad_norm)
        experts.end_step(skipped)
        throughput.step_done()

        # Between steps: all ranks agree on what happened, on what was asked for, and so on what to do.
        continuation.step_taken(run)  # its weights enter their average, if the run keeps one
        due = cadences.after(state.step, run.total_steps)
        outcome = supervisor.after_step(state.step, (step_loss, grad_norm, skipped), run, settle=due.settles)
        state.skipped_steps += outcome.skipped_steps
        if due.logs:
            housekeeping.log(outcome.report, learning_rate)
        housekeeping.keep_up(outcome.reports)
        if outcome.bad is not None:  # to a checkpoint from before it, and on with other data or a lower rate
            run, state = housekeeping.go_back(outcome.bad)
            continue
        if due.measures:
            housekeeping.measure()
        if supervisor.request in (Request.SHORTEN, Request.ANNEAL):  # before the save, so that the checkpoint knows
            run = housekeeping.anneal()
        if due.saves or supervisor.wants_save:
            housekeeping.save(wait=due.evaluates or supervisor.request != Request.NONE, required=due.is_last)
        if due.evaluates:
            housekeeping.evaluate()
        if due.samples:
            housekeeping.sample()
        if due.compares_copies:
            supervisor.compare_copies()
        if supervisor.ends or due.pauses:
            return housekeeping.end_early()
        if profile is None and (asked.profile is not None or supervisor.request == Request.PROFILE):
            profile = open_profile(housekeeping, read_ahead, asked.profile, first_step)
        if profile is not None:
            profile.after_step()
        supervisor.answer()

    return housekeeping.finish()


def open_profile(housekeeping: Housekeeping, read_ahead: ReadAhead, steps: int | None, first_step: int):
    """Returns what takes profiles between steps, as --profile or `runs.py profile` asks for."""
    from pretrain_tools.profiling.step_profile import StepProfile

    return StepProfile(housekeeping, read_ahead, steps, first_step)


def check(asked: CommandLine) -> None:
    """Checks everything that can be checked before the start."""
    from pretrain_tools.planning.judgement import judgement, judgement_without_data, warnings_in_words

    share_shards(asked.config.data)
    problems, config = Problems(), settled(asked.config)
    problems.attempt(strategy_class, config)
    run = problems.attempt(derive, config, ranks=micro_batches_launched())
    standing = problems.attempt(next_start_in_words, config, run, asked) if run else None
    validation = problems.attempt(open_validation, config.data)
    if problems and set(problems) <= set(data_problems(config.data)):
        print(*judgement_without_data(config, sys.argv[1:]), sep="\n", flush=True)
    problems.stop_if_any()
    if asked.verbose:
        print(explain(asked))
    print(banner(config, run, {}))
    if standing:
        print(standing)
    lines = judgement(config, run, asked.overridden, validation, sys.argv[1:])
    print(*lines, sep="\n")
    print(f"{warnings_in_words(lines)}: this run can start.")


def start(asked: CommandLine) -> None:
    share_shards(asked.config.data)
    settled_config = settled(asked.config)
    strategy = make_strategy(settled_config)

    def train(config: RunConfig, steps: int | None = None) -> int:
        return attempt(config, strategy, lambda metrics: main(asked, config, strategy, steps, metrics))

    if asked.smoke:
        from pretrain_tools.planning.smoke import smoke_test

        strategy.ranks.exit(smoke_test(settled_config, strategy, train))
    strategy.ranks.exit(train(settled_config))


def run(asked: CommandLine) -> None:
    with naming_preparations(asked.recipe):
        (check if asked.check else start)(asked)


if __name__ == "__main__":
    run_script(lambda: run(command_line))
