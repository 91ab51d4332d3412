"""Tests for the actions due between two steps, and for the batch size."""

from types import SimpleNamespace

import pytest

from pretrain.config import Benchmarks, Cadence, Checkpoint, Diagnostics, Guard, Samples, Validation
from pretrain.errors import InputError
from pretrain.recipe import read_run_config
from pretrain.training.run_plan import Due, derive, due_after, steps_between


def found(step: int, total_steps: int, factor: float = 1.0, **sections: Cadence) -> Due:
    """Returns the actions due in a run that has only these sections and logs every third step of 4 x 64 tokens."""
    never = {"validation": Validation(), "benchmarks": Benchmarks(), "samples": Samples(), "checkpoint": Checkpoint()}
    never["diagnostics"] = Diagnostics()
    settings = {"logging": SimpleNamespace(every_steps=3), "guard": Guard(), "interval_scale": factor}
    plan = SimpleNamespace(tokens_per_step=4 * 64, total_steps=total_steps)
    return due_after(step, SimpleNamespace(**settings, **never | sections), plan)


def due(**names: bool) -> Due:
    return Due(**dict.fromkeys(Due.__dataclass_fields__, False) | names)


def test_due_actions_depend_on_the_step():
    sections = {"validation": Validation(every_steps=4), "samples": Samples(every_steps=6)}
    of_steps = [found(step, 100, **sections) for step in (1, 3, 4, 6)]
    assert of_steps == [due(), due(logs=True), due(validates=True), due(logs=True, samples=True)]
    assert [each.settles for each in of_steps] == [False, True, True, True]


def test_the_last_step_is_logged_validated_and_saved():
    assert found(7, 7) == due(logs=True, validates=True, saves=True, is_last=True)
    unsaved = Checkpoint(every_steps=4, save_final=False)
    assert found(7, 7, checkpoint=unsaved) == due(logs=True, validates=True, is_last=True)
    assert found(4, 7, checkpoint=unsaved) == due(saves=True)
    assert found(7, 7, samples=Samples(every_tokens=10**6)).samples, "the last step must have a sample"


def test_an_evaluated_step_is_saved():
    assert found(5, 7, benchmarks=Benchmarks(every_steps=5)) == due(saves=True, evaluates=True)


def test_an_interval_in_tokens_assumes_the_full_batch():
    plan = SimpleNamespace(tokens_per_step=4 * 64)
    every = [steps_between(Checkpoint(every_tokens=2 * 4 * 64), plan, factor) for factor in (1.0, 0.1, 2.0)]
    assert every == [2, 1, 4] and steps_between(Checkpoint(), plan, 1.0) is None
    assert found(6, 9, factor=2.0).logs and not found(3, 9, factor=2.0).logs


def test_a_pause_before_the_end_is_logged_and_validated():
    pausing = Checkpoint(stop_at_step=5)
    assert found(5, 7, checkpoint=pausing) == due(logs=True, validates=True, pauses=True)
    assert not found(5, 5, checkpoint=pausing).pauses and not found(10, 20, checkpoint=pausing).pauses


@pytest.mark.parametrize(
    ("tokens", "sequences", "ranks", "advice"),
    [
        (256, 4, 2, "nearest: 512, or use batch.sequences_per_micro_batch 2"),
        (320, 2, 4, "nearest: 512"),
    ],
)
def test_a_batch_that_does_not_divide_is_rejected_with_what_works(recipe, tokens, sequences, ranks, advice):
    batch = {"batch.tokens_per_step": tokens, "batch.sequences_per_micro_batch": sequences}
    config = read_run_config(recipe, [(name, str(value)) for name, value in batch.items()])
    with pytest.raises(InputError) as caught:
        derive(config, ranks)
    assert caught.value.problems[0].endswith(advice)
