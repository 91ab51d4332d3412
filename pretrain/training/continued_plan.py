"""Plans how a run continues from a checkpoint, possibly with a changed recipe.

The checkpoint provides the step, token count, position in each source, and past batch sizes and learning rates. The
recipe determines everything else, so the batch, budget, data and schedule can change at any checkpoint.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from pretrain.checkpoint.checkpoints import NoValidCheckpointError, load_saved
from pretrain.checkpoint.run_state import RunState, recorded_rollbacks
from pretrain.config import Loss, RunConfig
from pretrain.data.batches import DataPosition, moved_past
from pretrain.data.tokenizer import load_decoder
from pretrain.errors import InputError, Problems
from pretrain.files import SEAL_FILE
from pretrain.model.build import shape_changes
from pretrain.model.model_config import config_differences, load_model_config
from pretrain.old_names import current_path
from pretrain.optim.batch_ramp import BatchRamp
from pretrain.optim.learning_rate import Schedule
from pretrain.recipe import CommandLine, is_named
from pretrain.registry import LOSS_TERMS
from pretrain.runs.run_folder import checkpoint_folders, read_state, step_of, trunk_checkpoint
from pretrain.training.run_plan import BUDGET, CLOCK, SHAPE, RunPlan, schedule_of, settings_of, target_sequences
from pretrain.units import counted, duration_text

Contents = Mapping[str, Any]
"""The values in a checkpoint's trainer_state.json."""
DATA = ("data.train", "data.stages", "data.sequence_length")
MIXTURES = ("data.train", "data.stages")
"""A recipe sets one of these."""
ORDER_OF_DATA = ("seed", "data.sampling", "data.sequence_length")
"""Settings that can't change during a run, because this would repeat some data and skip some."""


@dataclass(frozen=True)
class Changes:
    """Differences between the recipe and a run's checkpoint."""

    changed: dict[str, tuple[Any, Any]]
    """{setting: (value in the checkpoint, value in the recipe)}."""
    touched: frozenset[str]
    """Changed settings and, for a branch, all settings overridden on the command line."""
    begins_branch: bool

    @property
    def budget(self) -> bool:
        return not self.touched.isdisjoint(BUDGET)

    @property
    def clock(self) -> bool:
        return not self.touched.isdisjoint(CLOCK)

    @property
    def shape(self) -> bool:
        return not self.touched.isdisjoint(SHAPE)


def changes_since(contents: Contents, asked: RunConfig, overridden: frozenset[str], *, begins_branch: bool) -> Changes:
    """Compares the recipe with a checkpoint's trainer_state.json.

    asked: the recipe, with `auto` unresolved.
    """
    now = settings_of(asked)
    before = {current_path(path): value for path, value in contents.get("settings", now).items()}
    changed = {p: (before[p], now[p]) for p in now if p in before and now[p] != before[p]}
    named = [path for path in now if begins_branch and is_named(path, overridden)]
    return Changes(changed, frozenset([*changed, *named]), begins_branch)


def old_checkpoint_problems(contents: Contents, plan: RunPlan, *, begins_branch: bool) -> list[str]:
    """Lists changes that a checkpoint from an earlier version doesn't support, because it records fewer settings.

    plan: the recipe's plan, as for a new run.
    """
    planned = contents["plan"]
    schedule = planned["schedule"]
    if contents.keys() >= {"settings", "data"} or not (
        begins_branch
        or plan.total_steps not in (planned["total_steps"], schedule["total_steps"])
        or plan.schedule.name != schedule["name"]
        or any(plan.identity.get(path) != contents["identity"].get(path) for path in ("batch.tokens_per_step", *DATA))
    ):
        return []
    return [
        f"the checkpoint at step {contents['state']['step']:,} was written by an earlier version of Groundwork and "
        "lacks the records for branching or for changing the budget, batch, schedule or data; continue the run "
        "unchanged until its next checkpoint, then make the change"
    ]


def rewind_step(plan: RunPlan, contents: Contents, changes: Changes) -> int | None:
    """Returns the last step before the final decay if an extended run must rewind to it, otherwise None.

    A run whose schedule changes continues from the decayed model instead.

    Args:
        plan: see `continued`.
    """
    planned = contents["plan"]
    step = contents["state"]["step"]
    if changes.begins_branch or changes.clock or not changes.budget:
        return None
    must_rewind = plan.total_steps > planned["total_steps"] and step > planned["stable_until"]
    return planned["stable_until"] if must_rewind else None


def continued(
    config: RunConfig,
    plan: RunPlan,
    contents: Contents,
    state: RunState,
    changes: Changes,
    *,
    is_finished: bool,
) -> RunPlan:
    """Plans all steps of a run that continues from a checkpoint.

    Raises InputError if the budget is already exceeded.

    Args:
        plan: the recipe's plan, as for a new run.
        contents: the checkpoint's trainer_state.json.
        state: the run's state, including rollbacks newer than the checkpoint.
        is_finished: True if the final model exists. The budget may then be smaller than the steps already taken.
    """
    planned = contents["plan"]
    identity = contents["identity"]
    length = config.data.sequence_length
    future = plan.ramp
    ramp_steps = plan.ramp_steps
    if plan.identity["batch.ramp"] == identity.get("batch.ramp"):
        ramp_steps = tuple(planned.get("ramp_steps", ramp_steps))
        future = BatchRamp(plan.ramp.sequences_per_level, ramp_steps, 0)
    past = TypeAdapter(BatchRamp).validate_python(planned.get("ramp", plan.ramp))  # not in old checkpoints
    ramp = future.after(past, state.step, state.tokens // length)
    sequences = target_sequences(config.budget, length, plan.active_parameters)
    total_steps = config.budget.steps or ramp.steps_to_reach(sequences)
    if total_steps < state.step:
        if not is_finished and not (changes.begins_branch and not changes.budget):
            raise InputError(
                f"budget: ends after step {total_steps:,}, but the run is at step {state.step:,}; raise it, or "
                "start the final decay while the run is training (python runs.py anneal)"
            )
        total_steps = state.step
    ramp = replace(ramp, total_steps=total_steps)

    # Sample indices in a checkpoint include skipped samples. Those in `ramp` don't.
    sample = moved_past(state.left_out, ramp.sequences_before(state.step))
    origin = planned.get("origin")
    if any(plan.identity.get(path) != identity.get(path) for path in DATA):
        origin = contents["data"]
    position = TypeAdapter(DataPosition | None).validate_python(origin)
    # A branch's decay may end after the budget, and its data must last until then.
    last_step = max(total_steps, (state.anneal_from or 0) + (state.anneal_steps or 0))
    of_data = replace(ramp, total_steps=last_step)
    batches = plan.batches.changed(ramp=of_data, skipped=state.left_out, origin=position)
    if len(plan.stages) > 1:
        stage_starts = planned.get("stage_starts", plan.batches.stage_starts)
        batches = batches.passing(stage_starts, sample)
    # `Run.replan` adds the skipped ranges.
    batches = batches.changed(skipped=())
    schedule = _continued_schedule(config, total_steps, contents, state, changes)
    return replace(plan, ramp=ramp, ramp_steps=ramp_steps, batches=batches, schedule=schedule)


def data_digest(plan: RunPlan) -> str:
    """Hashes the data and its order. Plans with the same digest have the same sample indices.

    plan: plan for the whole run, without skipped ranges.
    """
    values = {path: plan.identity.get(path) for path in DATA} | {"stage_starts": plan.batches.stage_starts}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def rollback_entry(
    whole: RunPlan, plan: RunPlan, state: RunState, steps: tuple[int, int], *, skips: bool
) -> dict[str, Any]:
    """Returns the record of a rollback.

    Args:
        whole: plan for the whole run.
        plan: the same plan without the data skipped by earlier rollbacks.
        steps: first and last bad step, counted from 1.
        skips: True to skip these steps' data, False to halve the learning rate.
    """
    first, last = steps
    return {
        "first_step": first,
        "last_step": last,
        "samples": plan.batches.samples_of(first - 1, last - 1) if skips else None,
        "data": data_digest(whole),
        "learning_rate_factor": 1.0 if skips else 0.5,
        "anneal_from": state.anneal_from,
        "anneal_steps": state.anneal_steps,
    }


def without_ranges_ahead(state: RunState, plan: RunPlan) -> RunState:
    """Drops upcoming skip ranges that no longer refer to the same data.

    plan: plan for the whole run, from the checkpoint on.
    """
    here = moved_past(state.left_out, state.tokens // plan.batches.window.sequence_length)
    digest = data_digest(plan)

    def holds(rollback: Mapping[str, Any]) -> bool:
        samples = rollback["samples"]
        return samples is None or samples[0] < here or rollback.get("data", digest) == digest

    rollbacks = [entry if holds(entry) else {**entry, "samples": None} for entry in state.rollbacks]
    return replace(state, rollbacks=rollbacks)


def _continued_schedule(
    config: RunConfig, total_steps: int, contents: Contents, state: RunState, changes: Changes
) -> Schedule:
    before = TypeAdapter(Schedule).validate_python(contents["plan"]["schedule"])
    step = state.step
    optim = config.optim
    per_step = config.batch.tokens_per_step
    if changes.clock:
        warmup = None if "optim.warmup_steps" in changes.touched else 0
        return schedule_of(optim, per_step, total_steps, first_step=step, warmup_steps=warmup)
    planned = schedule_of(optim, per_step, total_steps, first_step=before.first_step, warmup_steps=before.warmup_steps)
    if total_steps != before.total_steps:
        return before.moved_to(total_steps, step, planned)
    return replace(planned, decayed=before.decayed) if changes.shape else before


def continued_state(config: RunConfig, contents: Contents, changes: Changes, trunk: str | None) -> RunState:
    """Returns the initial state of a run that continues from a checkpoint.

    A branch decays right away unless it has its own budget or schedule.

    Args:
        trunk: the parent run, if this run branches.
    """
    state = RunState(**contents["state"])
    if trunk is not None:
        origin = {"run": trunk, "step": state.step, "tokens": state.tokens}
        state = replace(state, lineage=[*state.lineage, origin], validation_loss=None, seconds=0.0)
    if changes.clock or changes.budget:
        return replace(state, anneal_from=None, anneal_steps=None)
    if trunk is None:
        return state
    steps = max(1, round(config.optim.decay_fraction * state.step))
    return replace(state, anneal_from=state.step, anneal_steps=steps)


def decay_problems(plan: RunPlan, contents: Contents, changes: Changes, trunk: str | None) -> list[str]:
    """Lists requested changes that aren't possible during the final decay.

    Args:
        plan: see `continued`.
        trunk: the branch_from setting.
    """
    planned = contents["plan"]
    saved = contents["state"]
    if changes.begins_branch and not changes.clock and saved["step"] > planned["stable_until"]:
        return [
            f"branch_from: {trunk} is already decaying its learning rate; use a checkpoint from step "
            f"{planned['stable_until']:,} or earlier, or set a schedule for the branch, such as "
            "--optim.schedule constant"
        ]
    is_shorter = plan.total_steps <= planned["total_steps"]
    if not changes.begins_branch and saved.get("anneal_from") is not None and changes.budget and is_shorter:
        return [
            f"budget: the run's final decay began at step {saved['anneal_from']:,} and ends at step "
            f"{planned['total_steps']:,}; keep the old budget, or raise it beyond that step"
        ]
    return []


def time_problems(config: RunConfig, plan: RunPlan, state: RunState) -> list[str]:
    """Checks that the time budget isn't used up before the final decay. Returns a list of problems."""
    minutes = config.budget.minutes
    if minutes is None or state.seconds < 60 * minutes or state.anneal_from is not None:
        return []
    if state.step >= min(plan.schedule.decays_from, plan.total_steps):
        return []
    return [
        f"budget.minutes: {minutes:g}, but the run has used {state.seconds / 60:.1f} minutes up to step "
        f"{state.step:,}; raise it, or set it to null"
    ]


def no_stable_checkpoint(planned: Mapping[str, Any]) -> InputError:
    """Returns the error for extending a run that has no checkpoint from before its final decay."""
    return InputError(
        f"budget: the run of {planned['total_steps']:,} steps has been decaying its learning rate since step "
        f"{planned['stable_until']:,}, but no earlier checkpoint is left; continue from the "
        "decayed model with a different schedule, such as --optim.schedule constant. For future runs, set "
        "checkpoint.keep_every"
    )


def describe_continuation(plan: RunPlan, state: RunState, changes: Changes, found: Path) -> str:
    """Describes how the run continues: steps, tokens, learning rate and changed settings."""
    step = state.step
    total = plan.total_steps
    begins = "branches" if changes.begins_branch else "continues"
    lines = [f"{begins} from {found} at step {step:,}, after {state.tokens:,} tokens"]
    if step < total:
        factor = state.learning_rate_factor
        first = plan.learning_rate(step) * factor
        last = plan.learning_rate(total - 1) * factor
        lines += [
            f"  to step {total:,}: {counted(total - step, 'step')}, {plan.total_tokens - state.tokens:,} tokens, "
            f"{plan.tokens_in(step):,} tokens per step",
            f"  learning rate {first:.3g} at the first step, {last:.3g} at the last ({plan.schedule.name})",
        ]
        if first == last and isinstance(plan.schedule, Schedule) and plan.schedule.progress(step) >= 1.0:
            lines.append(
                f"  warning: this is the minimum, because the {plan.schedule.name} schedule has ended; to restart at "
                "the peak, change the schedule or warmup, for example with --optim.schedule constant"
            )
    if state.seconds:
        lines.append(f"  {duration_text(state.seconds)} of budget.minutes used")
    origin = plan.batches.origin
    if origin is not None and origin.step == step:
        lines.append("  data: a different mixture from here on; each source continues where it stopped")
    lines += [f"  {path}: {before} until now, {now} from here on" for path, (before, now) in changes.changed.items()]
    return "\n".join(lines)


@dataclass(frozen=True)
class Continuation:
    """Plan and state of a run that continues from a checkpoint."""

    plan: RunPlan
    """Plan for the whole run, without skipped data or a requested decay."""
    state: RunState
    changes: Changes
    stable_until: int | None
    """See `rewind_step`."""


def continue_from(
    config: RunConfig,
    plan: RunPlan,
    asked: CommandLine,
    found: Path,
    contents: Contents,
    *,
    rollbacks: list[dict[str, Any]],
    begins_branch: bool,
    is_finished: bool,
) -> Continuation:
    """Plans how the run continues from a checkpoint.

    Raises InputError for impossible changes, and for changes that need confirmation on the command line.

    Args:
        plan: the recipe's plan, as for a new run.
        found: the checkpoint folder.
        contents: its trainer_state.json.
        rollbacks: rollbacks recorded in the run folder, possibly newer than the checkpoint.
        begins_branch: True if the checkpoint belongs to the run in branch_from.
        is_finished: True if the final model exists.
    """
    identity = contents["identity"]
    if not begins_branch and config.branch_from is not None:
        refuse_other_branch(config, contents["state"].get("lineage", []))
    problems = Problems(
        continuation_problems(found, identity, plan, asked.overridden, begins_branch=begins_branch)
        or old_checkpoint_problems(contents, plan, begins_branch=begins_branch)
        or tokenizer_problems(found, identity, plan, begins_branch=begins_branch)
    )
    problems += term_problems(found, config.loss, begins_branch=begins_branch)
    problems.stop_if_any()
    changes = changes_since(contents, asked.config, asked.overridden, begins_branch=begins_branch)
    trunk = config.branch_from.rpartition("@")[0] if begins_branch else None
    state = continued_state(config, contents, changes, trunk).after_rollbacks(rollbacks)
    whole = continued(config, plan, contents, state, changes, is_finished=is_finished)
    state = without_ranges_ahead(state, whole)
    problems += decay_problems(whole, contents, changes, config.branch_from)
    problems += time_problems(config, whole, state)
    if begins_branch and state.anneal_from is None and whole.total_steps <= state.step:
        problems.append(f"budget: ends at step {whole.total_steps:,}, where the branch begins; raise it")
    rewinds_to = rewind_step(whole, contents, changes)
    is_complete = is_finished and state.step >= whole.in_effect(state).total_steps
    stop_at_step = config.checkpoint.stop_at_step
    if stop_at_step is not None and state.step >= stop_at_step and rewinds_to is None and not is_complete:
        problems.append(
            f"checkpoint.stop_at_step: {stop_at_step:,}, but the run is at step {state.step:,}; set a later step, or "
            "null, to continue"
        )
    problems.stop_if_any()
    return Continuation(whole, state, changes, rewinds_to)


def describe_next_start(config: RunConfig, plan: RunPlan, asked: CommandLine) -> tuple[str, bool]:
    """Returns how the next start would continue the run (see `describe_continuation`), and whether it is complete.

    The description is "" without a checkpoint. Doesn't verify the checkpoint's files. Raises the same InputErrors as a
    start.
    """
    folders = list(checkpoint_folders(config.output).values())
    begins_branch = not folders and config.branch_from is not None
    if begins_branch:
        folders = [trunk_checkpoint(config.branch_from)]
    if not folders or not (contents := read_state(folders[-1])):
        return "", False
    rollbacks = recorded_rollbacks(config.output)
    is_finished = (config.output / "final" / SEAL_FILE).exists()
    how = {"rollbacks": rollbacks, "begins_branch": begins_branch, "is_finished": is_finished}
    found = folders[-1]
    continuation = continue_from(config, plan, asked, found, contents, **how)
    if continuation.stable_until is not None:
        stable = [folder for folder in folders if step_of(folder) <= continuation.stable_until]
        if not stable:
            raise no_stable_checkpoint(contents["plan"])
        found = stable[-1]
        continuation = continue_from(config, plan, asked, found, read_state(found), **how)
    state = continuation.state
    effective = continuation.plan.in_effect(state)
    if is_finished and state.step >= effective.total_steps:
        return f"{config.output} is already complete: {state.step:,} steps, model in {config.output}/final.", True
    return describe_continuation(effective, state, continuation.changes, found), False


def refuse_other_branch(config: RunConfig, lineage: Sequence[Mapping[str, Any]]) -> None:
    """Raises InputError if the run in `output` didn't branch from the recipe's branch_from."""
    run, _, step = config.branch_from.rpartition("@")
    run = Path(run)
    step = int(step) if step.isdecimal() else None
    began = lineage[-1] if lineage else None
    if began and began["step"] == step and Path(began["run"]).resolve() == run.resolve():
        return
    how = f"branched from {began['run']}@{began['step']}" if began else "not branched from another run"
    raise InputError(
        f"branch_from: {config.branch_from}, but {config.output} contains a run that was {how}; use another "
        "--output for the branch, or omit branch_from to continue that run"
    )


def term_problems(found: Path, settings: Loss, *, begins_branch: bool) -> list[str]:
    """Lists loss terms with trained parameters that were added or removed since the checkpoint."""
    now = {name for name in settings.terms if LOSS_TERMS[name].has_parameters()}
    try:
        saved = {name.split(".")[1] for name in load_saved(found).loss_terms.shapes()}
    except NoValidCheckpointError:  # with --check, which doesn't verify the files
        return []
    if now == saved:
        return []
    return [
        f"loss.terms: with trained parameters, the recipe has {', '.join(sorted(now)) or 'none'}, but {found} has "
        f"{', '.join(sorted(saved)) or 'none'}. Loss terms with trained parameters cannot change during a run; "
        f"restore them, or {_instead(begins_branch=begins_branch)}"
    ]


def refuse_other_terms(shapes: dict[str, tuple[int, ...]], saved: dict[str, tuple[int, ...]]) -> None:
    """Raises InputError if the loss terms' parameters differ from the checkpoint's in name or shape."""
    if differing := sorted(name for name in shapes | saved if shapes.get(name) != saved.get(name)):
        first = differing[0]
        raise InputError(
            f"loss.terms: {len(differing)} trained parameters differ from the checkpoint's, starting with {first} "
            f"({shapes.get(first, 'none')} now, {saved.get(first, 'none')} in the checkpoint). Loss terms with "
            "trained parameters cannot change during a run; restore them, or use another --output."
        )


def continuation_problems(
    found: Path, saved: Mapping[str, Any], plan: RunPlan, overridden: frozenset[str], *, begins_branch: bool
) -> list[str]:
    """Lists the reasons why a run can't continue from a checkpoint with this identity, with the differing model keys.

    Different shapes are always an error, because a model with fewer layers would load silently.
    """
    problems = identity_problems(saved, plan.identity, overridden, begins_branch=begins_branch)
    if saved.get("model") == plan.identity["model"]:
        return problems
    earlier = load_model_config(str(found))
    changes = config_differences(earlier, plan.model_config)
    others = [problem for problem in problems if not problem.startswith("model: ")]
    instead = _instead(begins_branch=begins_branch)
    if shape_changes(earlier, plan.model_config):
        what_now = f", so the checkpoint's weights do not match the model; restore the model config, or {instead}"
    elif len(others) < len(problems):
        what_now = f"; restore it, {instead}, or accept the change by setting it on the command line"
    else:
        return others
    return [f"model: {found} was trained with {changes}{what_now}", *others]


def identity_problems(
    saved: dict[str, Any], now: dict[str, Any], overridden: frozenset[str], *, begins_branch: bool = False
) -> list[str]:
    """Lists changes since the checkpoint that are impossible or that need confirmation on the command line.

    begins_branch: True for a new branch, whose recipe may differ from the parent run's.
    """
    problems = []
    instead = _instead(begins_branch=begins_branch)
    for path in sorted(saved.keys() | now.keys()):
        if saved.get(path) == now.get(path):
            continue
        if path in MIXTURES and now.get(path) is None:  # the recipe uses the other setting, which is also compared
            continue
        paths = MIXTURES if path in MIXTURES else (path,)
        before = next((saved[each] for each in paths if saved.get(each) is not None), None)
        found = f"{path}: the run was started with {json.dumps(before)}, "
        named = any(is_named(each, overridden) for each in paths)
        if path == "optim.name":  # can't be confirmed, because the optimizer state doesn't fit
            problems.append(
                f"{found}whose optimizer state is incompatible with {json.dumps(now.get(path))}; restore it, or "
                f"{instead} (add --init pretrained --model RUN/final to start from this run's weights)"
            )
        elif path in ORDER_OF_DATA:
            problems.append(
                f"{found}and {json.dumps(now.get(path))} would change the data order, so that some data is read twice "
                f"and some never; restore it, or {instead}"
            )
        elif not (named or (begins_branch and path != "model")):
            problems.append(
                f"{found}but the recipe now has {json.dumps(now.get(path))}; restore it, use another --output, or "
                f"accept it with --{path} on the command line, which applies it from the checkpoint's step on"
            )
    return problems


def tokenizer_problems(
    found: Path, saved: Mapping[str, Any], plan: RunPlan, *, begins_branch: bool = False
) -> list[str]:
    """Lists differences between the checkpoint's tokenizer and that of changed data.

    A vocabulary of the same size would otherwise load silently.
    """
    manifest = plan.batches.manifest
    kept = found / "tokenizer.json"
    given = manifest.tokenizer_folder / "tokenizer.json"
    if all(saved.get(path) == plan.identity.get(path) for path in MIXTURES):
        return []
    if not (kept.is_file() and given.is_file()):  # the second may be missing with dispatched batches
        return []
    if hashlib.sha256(kept.read_bytes()).hexdigest() == manifest.tokenizer_sha256:
        return []
    from pretrain.data.new_tokens import differing_tokens

    differing = differing_tokens(load_decoder(found), load_decoder(manifest.tokenizer_folder), may_extend=True)
    if not differing:
        return []
    return [
        f"data: its tokenizer {manifest.tokenizer_name} is not the one in {found}: {differing}; prepare the data with "
        f"the run's tokenizer (--tokenizer {found}), or {_instead(begins_branch=begins_branch)}"
    ]


def _instead(*, begins_branch: bool) -> str:
    """Returns the advice for a change that a checkpoint doesn't allow. Another --output doesn't help a branch."""
    return "omit branch_from to start a new run" if begins_branch else "use another --output"
