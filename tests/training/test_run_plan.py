"""What is due between two steps."""

from types import SimpleNamespace

from pretrain.config import Cadence, Checkpoint, Guard
from pretrain.training.run_plan import Cadences, Due

RUN = SimpleNamespace(tokens_per_step=4 * 64)


def cadences(factor: float = 1.0, **settings: Cadence) -> Cadences:
    """Those of a recipe that names these alone, and logs every third step."""
    never = {name: Cadence() for name in ("validation", "evaluation", "samples")} | {"checkpoint": Checkpoint()}
    config = SimpleNamespace(logging=SimpleNamespace(every_steps=3), guard=Guard(), cadence=factor)
    config.__dict__.update(never | settings)
    return Cadences.of(config, RUN)


def due(**names: bool) -> Due:
    return Due(**dict.fromkeys(Due.__dataclass_fields__, False) | names)


def test_what_is_due_follows_from_the_step():
    found = cadences(validation=Cadence(every_steps=4), samples=Cadence(every_steps=6))
    assert [found.after(step, 100) for step in (1, 3, 4, 6)] == [
        due(),
        due(logs=True),
        due(validates=True),
        due(logs=True, samples=True),
    ]
    assert not found.after(1, 100).settles and found.after(3, 100).settles and found.after(4, 100).settles


def test_the_last_step_is_logged_measured_and_saved_and_no_more():
    assert cadences().after(7, 7) == due(logs=True, validates=True, saves=True, is_last=True)
    unsaved = cadences(checkpoint=Checkpoint(every_steps=4, at_end=False))
    assert unsaved.after(7, 7) == due(logs=True, validates=True, is_last=True)
    assert unsaved.after(4, 7).saves and not unsaved.after(4, 7).is_last


def test_what_is_evaluated_is_saved():
    assert cadences(evaluation=Cadence(every_steps=5)).after(5, 7) == due(saves=True, evaluates=True)


def test_a_cadence_in_tokens_counts_those_of_the_full_batch():
    found = cadences(checkpoint=Checkpoint(every_tokens=2 * 4 * 64), factor=1.0)
    assert (found.saves, found.validates) == (2, None)
    assert cadences(checkpoint=Checkpoint(every_tokens=2 * 4 * 64), factor=0.1).saves == 1
    assert cadences(factor=2.0).logs == 6


def test_a_pause_is_logged_and_measured_before_the_end_alone():
    found = cadences(checkpoint=Checkpoint(pause_at=5))
    assert found.after(5, 7) == due(logs=True, validates=True, pauses=True)
    assert not found.after(5, 5).pauses and not found.after(10, 20).pauses
