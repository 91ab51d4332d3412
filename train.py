"""Pretrains a language model. The whole run is in train.py, from top to bottom.

    python train.py --text mine --minutes 10                                 # train on your own text, without a recipe
    python train.py --config recipes/demo.yaml                               # single process
    python train.py --config recipes/demo.yaml --optim.learning_rate 1e-3    # override any setting
    python train.py --config recipes/demo.yaml --check [--verbose]           # list all errors without training
    python train.py --config recipes/demo.yaml --smoke                       # train 100 steps; pass or fail per stage
    python train.py --config recipes/demo.yaml --profile 20                  # profile 20 steps, then continue training
    python train.py --help [SECTION]                                         # show all settings, or one section
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 train.py --config recipes/demo.yaml

--text accepts a folder, a pattern or files, and --exclude a pattern of files to skip. --config accepts a file or a URL
(s3://...), and you can omit the word. --verbose also lists every setting with its value and origin. --smoke trains in
a separate folder.

Run the same command again to resume. If the run is already complete, train.py says so and exits.
"""

import sys

from pretrain.errors import EXIT_DONE, Problems, is_first_on_machine, or_exit, run_script
from pretrain.recipe import CommandLine, explain, read_command_line
from pretrain.terminal import announce_loading

if __name__ == "__main__":  # before importing torch, which is slow
    words = sys.argv[1:]
    if any(word.split("=")[0] == "--text" for word in words):
        announce_loading()
        from pretrain_tools.planning.own_text import with_own_text

        words = or_exit(lambda: with_own_text(sys.argv[1:]))
    command_line: CommandLine = or_exit(lambda: read_command_line(words, __doc__))
    announce_loading()

import torch

from pretrain.checkpoint.run_state import Request
from pretrain.config import RunConfig
from pretrain.data.sampling import key_of
from pretrain.hardware import seed_dropout
from pretrain.parallel.registry import make_strategy, micro_batches_launched, share_shards, strategy_class
from pretrain.parallel.strategy import Strategy
from pretrain.training.between_steps import (
    decay,
    diagnose,
    evaluate,
    log_step,
    report_saves,
    sample,
    save,
    show_progress,
    validate,
)
from pretrain.training.build import build_training
from pretrain.training.ending import end_early, finish
from pretrain.training.metrics import Metrics
from pretrain.training.prefetch import ReadAhead
from pretrain.training.resuming import load_checkpoint, open_run, roll_back
from pretrain.training.run_plan import derive, due_after, resolve_auto
from pretrain.training.run_records import banner
from pretrain.training.starting import with_recorded_end
from pretrain.training.steps import after_step, answer, begin, begin_step, compare_replicas, count_step
from pretrain.training.validation import open_validation


def main(asked: CommandLine, config: RunConfig, strategy: Strategy, last_step: int | None, log: Metrics) -> int:
    """Trains to the end, or to `last_step`. Returns the exit code."""
    recipe_plan = derive(config, strategy.data_ranks * strategy.micro_batches_per_call)
    validation_readers = open_validation(config.data)
    run = open_run(config, recipe_plan, asked, strategy, log, last_step)  # at its newest valid checkpoint
    if run.is_complete:
        message = f"{config.output} is already complete: {run.state.step:,} steps, model in {config.output}/final."
        if any(name.startswith("export") for name in asked.overridden):
            message += f" To export it again with these settings, remove {config.output}/final first."
        strategy.ranks.print(message)
        return EXIT_DONE
    if asked.profile is not None:
        from pretrain_tools.profiling.step_profile import refuse_profile

        refuse_profile(asked.profile, run.state.step, run.plan.total_steps)

    # Weights come from the checkpoint, a pretrained model, or random initialization.
    run.built = build_training(
        config,
        run.plan,
        strategy,
        learning_rate=run.plan.peak_learning_rate,
        from_checkpoint=run.loaded_from is not None,
    )
    load_checkpoint(run)
    begin(run, validation_readers)
    model = run.built.model
    throughput = run.throughput
    read_ahead = ReadAhead(strategy)
    first_step = run.state.step
    validates_now = first_step == run.plan.total_steps or (first_step == 0 and config.validation.is_set)
    if run.state.validation_loss is None and validates_now:
        validate(run)

    profile = None
    if asked.profile is not None:
        from pretrain_tools.profiling.step_profile import StepProfile

        profile = StepProfile(run, read_ahead, asked.profile)
    model.train()
    while run.state.step < run.plan.total_steps:
        # A step depends only on its number, so resuming is exact.
        step = begin_step(run)  # may switch to a new stage
        plan = run.plan
        learning_rate = plan.learning_rate(step) * run.state.learning_rate_factor
        micro_steps = plan.micro_steps(step)
        strategy.begin_step(learning_rate, micro_steps)
        step_loss = torch.zeros((), device=strategy.device)
        for micro_step in range(micro_steps):
            with throughput.loading_data():
                batch = read_ahead.micro_batch(plan, step, micro_step)
            # Seeded per micro-step and rank, so that a resumed run uses the same dropout masks.
            seed_dropout(key_of(config.seed, step, micro_step, strategy.dropout_rank) % 2**63, strategy.device)
            with strategy.accumulate(is_last=micro_step == micro_steps - 1):
                loss, cross_entropy = model(**batch)
                strategy.backward(loss / micro_steps)  # all micro-batches have the same number of targets
            step_loss += cross_entropy / micro_steps
            run.watch.beat()
        grad_norm, skipped = strategy.update(config.optim.max_grad_norm)
        throughput.step_done()
        count_step(run)  # also updates the weight average

        # All ranks agree on what to do between steps.
        due = due_after(run.state.step, config, plan)
        reports, bad = after_step(run, step_loss, grad_norm, skipped, settle=due.settles)
        if due.logs:
            log_step(run, reports[-1], learning_rate)
        show_progress(run, reports)
        report_saves(run)
        if bad is not None:
            roll_back(run, bad)  # and skip the data or lower the learning rate
            continue
        if due.validates:
            validate(run)
        if run.wants_decay:
            decay(run)  # before the save, which records it
        if due.saves or run.wants_save:  # waits if an evaluation or a user needs the checkpoint
            save(run, wait=due.evaluates or run.request != Request.NONE, required=due.is_last)
        if not run.ends:
            answer(run)  # requests during the work below wait for the next step
        if due.evaluates:
            evaluate(run)
        if due.samples:
            sample(run)
        if due.diagnoses:
            diagnose(run, batch)
        if due.compares_replicas:
            compare_replicas(run)
        if run.ends or due.pauses:
            return end_early(run)
        if profile is not None:
            profile.after_step()

    return finish(run)


def check(asked: CommandLine) -> None:
    """Runs all checks without training, and prints the plan and warnings."""
    from pretrain.training.continued_plan import describe_next_start
    from pretrain_tools.planning.judgement import judgement, warnings_in_words

    share_shards(asked.config.data)
    problems = Problems()
    config = resolve_auto(asked.config)
    problems.attempt(strategy_class, config)
    plan = problems.attempt(derive, config, ranks=micro_batches_launched())
    next_start = problems.attempt(describe_next_start, config, plan, asked) if plan else None
    validation = problems.attempt(open_validation, config.data)
    problems.stop_if_any()
    if not is_first_on_machine():
        return
    if asked.verbose:
        print(explain(asked))
    print(banner(config, plan, {}))
    continuation, is_complete = next_start
    if continuation:
        print(continuation)
    if is_complete:
        return
    lines = judgement(config, plan, asked.overridden, validation, sys.argv[1:])
    print(*lines, sep="\n")
    print(f"{warnings_in_words(lines)}: this run can start.")


def start(asked: CommandLine) -> None:
    share_shards(asked.config.data)
    settled_config = resolve_auto(asked.config)
    strategy = make_strategy(settled_config)

    def train(config: RunConfig, last_step: int | None = None) -> int:
        return with_recorded_end(config, strategy, lambda log: main(asked, config, strategy, last_step, log))

    if asked.smoke:
        from pretrain_tools.planning.smoke import smoke_test

        strategy.ranks.exit(smoke_test(settled_config, strategy, train))
    strategy.ranks.exit(train(settled_config))


if __name__ == "__main__":
    run_script(lambda: (check if command_line.check else start)(command_line))
