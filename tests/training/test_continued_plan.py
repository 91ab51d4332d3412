"""After random changes, a run's data position, token count and learning rate must match an independent calculation.

A history simulates what happens to a run: crashes, rollbacks, branches, early decays, and changes of the budget, batch
size, data mixture, stage, schedule or learning rate. At each start, the tested plan is derived from the recipe and the
newest checkpoint, as in train.py. Account is updated step by step: it reads each batch (token IDs encode their
position in the shards) and advances the learning rate.
"""

import json
import math
import os
import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from pretrain.checkpoint.run_state import RunState
from pretrain.errors import InputError
from pretrain.parallel.ranks import Ranks
from pretrain.recipe import read_command_line
from pretrain.training import run_plan
from pretrain.training.between_steps import trainer_state
from pretrain.training.continued_plan import continue_from, rollback_entry
from pretrain.training.resuming import _restore_state
from pretrain.training.run import Run
from support.numbered_shards import write_shards
from support.tiny_models import TINY_LLAMA

LENGTH = 8
WINDOWS = {"a": 700, "b": 431, "c": 97}
PLACES = {"a": 100, "b": 10_000, "c": 20_000}
"""First token ID of each source, so that an ID identifies its source and position."""
FINAL_RATIO = 0.1


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Writes three sources with different numbers of sequences, and a recipe with 40 steps of 64 tokens."""
    folder = tmp_path_factory.mktemp("histories")
    for name, windows in WINDOWS.items():
        write_shards(folder / name, windows * LENGTH + 1, vocabulary=60_000, first=PLACES[name])
    (folder / "model.json").write_text(json.dumps(TINY_LLAMA | {"vocab_size": 60_000}))
    recipe = {
        "model": str(folder / "model.json"),
        "output": str(folder / "run"),
        "seed": 3,
        "precision": "fp32",
        "data": {"train": mixture(folder, a=3, b=1), "sequence_length": LENGTH},
        "budget": {"steps": 40},
        "batch": {"tokens_per_step": 8 * LENGTH, "sequences_per_micro_batch": 1},
        "optim": {"learning_rate": 1.0, "warmup_steps": 3, "min_lr_ratio": FINAL_RATIO, "decay_type": "linear"},
        "compile": "none",
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def mixture(folder: Path, **weights: float) -> list[dict]:
    return [{"shards": str(folder / name), "weight": weight} for name, weight in weights.items()]


@pytest.fixture(autouse=True)
def one_probe_of_the_model(monkeypatch):
    """Probes the model only once, because all histories use the same model and probing is slow."""
    found = []
    probe = run_plan.probe

    def once(*arguments, **settings):
        found[:] = found or [probe(*arguments, **settings)]
        return found[0]

    monkeypatch.setattr(run_plan, "probe", once)


@dataclass
class Account:
    """Expected state of a run, updated step by step."""

    settings: dict[str, object]
    """Current settings, with dotted paths as keys."""
    step: int = 0
    tokens: int = 0
    order: list[tuple[str, int, int]] = field(default_factory=list)
    """(source, first token, number of tokens) per sequence, in training order, including skipped sequences."""
    samples: int = 0
    """Number of tokens in `order`, in units of LENGTH."""
    begins_at: dict[int, tuple[int, int]] = field(default_factory=dict)
    """{step: (sequences, samples) before the step}."""
    first_step: int = 0
    warmup: int = 3
    factor: float = 1.0
    """Factor by which rollbacks have changed the learning rate."""
    progress: float = 0.0
    """Progress of the decay before the step, from 0 to 1."""
    share_before: float = 1.0
    """The last step's learning rate relative to the peak. An early decay starts from it."""
    begins: int | None = None
    """First step of a WSD decay that starts earlier than planned."""
    anneal: tuple[int, int] | None = None
    """(first step, number of steps) of a requested decay."""

    def copy(self) -> "Account":
        return replace(self, order=[*self.order], begins_at={**self.begins_at})

    @property
    def name(self) -> str:
        return self.settings["optim.schedule"]

    @property
    def total(self) -> int:
        return self.settings["budget.steps"]

    @property
    def end(self) -> int:
        return self.anneal[0] + self.anneal[1] if self.anneal else self.total

    def decay_begin(self) -> int:
        if self.begins is not None:
            return self.begins
        if self.name == "wsd":
            return max(self.first_step + self.warmup, self.total - round(0.2 * (self.total - self.first_step)))
        return self.first_step + self.warmup

    def share(self) -> float:
        """Returns the learning rate relative to the peak, ignoring an early decay."""
        warmed = self.step - self.first_step + 1
        if warmed <= self.warmup:
            return warmed / self.warmup
        if self.name == "constant":
            return 1.0
        left = 0.5 + 0.5 * math.cos(math.pi * self.progress) if self.name == "cosine" else 1 - self.progress
        return FINAL_RATIO + (1 - FINAL_RATIO) * left

    def rate(self) -> float:
        peak = self.factor * self.settings["optim.learning_rate"]
        if self.anneal and self.step >= self.anneal[0]:
            first, steps = self.anneal
            floor = min(self.share_before, FINAL_RATIO)
            return peak * (self.share_before + (floor - self.share_before) * (self.step - first) / steps)
        return peak * self.share()

    def advance(self) -> None:
        if self.anneal is None or self.step < self.anneal[0]:
            self.share_before = self.share()
        if self.name != "constant" and self.decay_begin() <= self.step < self.total:
            self.progress += (1 - self.progress) / (self.total - self.step)
        self.step += 1

    def add(self, windows: list[tuple[str, int, int]]) -> None:
        self.order += windows
        self.samples += sum(tokens for *_, tokens in windows) // LENGTH

    def begin_decay(self) -> None:
        steps = max(1, round(min(self.total - self.step, 0.2 * self.step)))
        self.anneal = (self.step, steps)

    def follow(self, settings: dict[str, object]) -> None:
        """Switches to other settings at the current step."""
        changed = {path for path in settings if settings[path] != self.settings.get(path)}
        self.settings = dict(settings)
        if changed & {"optim.schedule", "optim.warmup_steps"}:
            self.first_step, self.progress, self.begins, self.anneal = self.step, 0.0, None, None
            self.warmup = settings["optim.warmup_steps"] if "optim.warmup_steps" in changed else 0
        elif "budget.steps" in changed:
            self.anneal = None
            if self.name == "wsd" and self.progress == 0:
                self.begins = None
                self.begins = self.step if self.decay_begin() < self.step else None


class History:
    """A run, simulated with both the tested plan and the account."""

    def __init__(self, folder: Path, tmp_path: Path, seed: int):
        self.folder, self.random = folder, random.Random(seed)
        self.output = tmp_path / "run"
        self.settings = {
            "optim.schedule": self.random.choice(["cosine", "linear", "wsd", "constant"]),
            "optim.warmup_steps": 3,
            "optim.learning_rate": 1.0,
            "budget.steps": 40,
            "batch.tokens_per_step": 8 * LENGTH,
            "data.train": mixture(folder, a=3, b=1),
        }
        self.is_ramped = self.random.random() < 0.4
        if self.is_ramped:
            self.settings["batch.ramp"] = {"from": 0.25, "over": 0.4}
        self.account = Account(dict(self.settings))
        self.saved: list[tuple[dict, Account]] = []
        self.rollbacks: list[dict] = []
        self.decay_before_rollback: tuple[int, int] | None = None
        self.skipped: dict[int, list[tuple[str, int, int]]] = {}
        """{number of samples before: sequences skipped by a rollback}."""
        self.data_of_skip: dict[int, object] = {}
        self.log: list[str] = []
        self.start(None)
        self.levels = self.run.ramp.first_steps
        assert len(self.levels) == (4 if self.is_ramped else 1)

    def start(self, contents: dict | None, *, begins_branch: bool = False) -> None:
        """Derives the plan from the recipe, the command line and the newest checkpoint, as train.py does."""
        words = ["--config", str(self.folder / "recipe.yaml"), "--output", str(self.output)]
        for path, value in self.settings.items():
            words += [f"--{path}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
        self.asked = read_command_line(words, "")
        if begins_branch:  # a branch has its own recipe, so only the output is overridden
            self.asked = replace(self.asked, overridden=frozenset({"output"}))
        self.plan, self.state = run_plan.derive(self.asked.config, ranks=1), RunState()
        if contents is not None:
            continuation = continue_from(
                self.asked.config,
                self.plan,
                self.asked,
                Path("nowhere"),
                json.loads(json.dumps(contents)),
                rollbacks=self.rollbacks,
                begins_branch=begins_branch,
                is_finished=False,
            )
            assert continuation.stable_until is None, "no history may raise the budget during the final decay"
            self.plan, self.state = continuation.plan, continuation.state
        self.read_plan()

    def read_plan(self) -> None:
        self.run = self.plan.in_effect(self.state)

    def sequences(self, step: int) -> int:
        """Returns the batch size of a step: one to four quarters of the full batch."""
        full = self.settings["batch.tokens_per_step"] // LENGTH
        return full * sum(step >= first for first in self.levels) // len(self.levels)

    def windows(self, step: int) -> list[tuple[str, int, int]]:
        """Returns (source, first token, number of tokens) for each sequence in a step, in order."""
        found, run = [], self.run
        for micro_step in range(run.micro_steps(step)):
            rows = run.stage(step).sequences_per_micro_batch
            ids = run.batches.read(step, micro_step, 0, ranks=1, sequences=rows).astype(np.int64)
            assert (np.diff(ids, axis=1) == 1).all(), "a sequence must be contiguous text"
            found += ids[:, 0].tolist()
        length = ids.shape[1] - 1
        places = [(start, max(PLACES, key=lambda name: (PLACES[name] <= start, PLACES[name]))) for start in found]
        return [(name, start - PLACES[name], length) for start, name in places]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            run, account = self.run, self.account
            context = (account.step, self.log)
            assert self.state.step == account.step and run.total_steps == account.end, context
            if account.step >= account.end:
                return
            rate = run.learning_rate(account.step) * self.state.learning_rate_factor
            assert rate == pytest.approx(account.rate(), rel=1e-9), context
            windows = self.windows(account.step)
            assert sum(tokens for *_, tokens in windows) == self.sequences(account.step) * LENGTH, context
            account.begins_at[account.step] = len(account.order), account.samples
            for window in windows:
                while account.samples in self.skipped:
                    account.add(self.skipped[account.samples])
                account.add([window])
            account.tokens += self.sequences(account.step) * LENGTH
            account.advance()
            self.state.step += 1
            self.state.tokens = run.tokens_before(self.state.step)
            assert self.state.tokens == account.tokens, context
            if self.random.random() < 0.3:
                self.save()

    def save(self) -> None:
        if self.saved and self.saved[-1][1].step == self.state.step:
            return
        contents = trainer_state(self.asked.config, self.plan, self.run, self.state)
        self.saved.append((json.loads(json.dumps(contents)), self.account.copy()))

    def resume(self, number: int = -1) -> None:
        contents, account = self.saved[number]
        self.account = account.copy()
        self.account.follow(self.settings)
        for first in [first for first in self.skipped if first >= account.samples]:
            if self.data_of_skip[first] != self.data():  # the data changed, so nothing is skipped
                del self.skipped[first]
        if len(self.rollbacks) > len(
            contents["state"]["rollbacks"]
        ):  # restore the decay requested before the rollback
            self.account.anneal = self.decay_before_rollback
        self.start(contents)

    def change(self, **settings: object) -> None:
        """Saves a checkpoint, changes settings and resumes."""
        self.save()
        other = {"data__train": "data.stages", "data__stages": "data.train"}
        for path, value in settings.items():
            self.settings[path.replace("__", ".")] = value
            self.settings.pop(other.get(path), None)
        self.resume()

    # Events in a history.

    def data(self) -> object:
        return self.settings.get("data.train") or self.settings["data.stages"]

    def crash(self) -> None:
        if self.saved:
            self.resume()

    def change_budget(self) -> None:
        decays = self.account.name == "wsd" and self.account.step > self.account.decay_begin()
        if self.account.anneal is None and not decays:
            self.change(budget__steps=self.account.step + self.random.randint(4, 30))

    def change_batch(self) -> None:
        self.change(batch__tokens_per_step=self.random.choice([4, 8, 16]) * LENGTH)

    def change_mixture(self) -> None:
        names = self.random.sample(list(WINDOWS), self.random.randint(1, 3))
        self.change(data__train=mixture(self.folder, **{name: self.random.choice([1, 2, 5]) for name in names}))

    def add_a_stage(self) -> None:
        """Changes the second half of the run to longer sequences from different sources."""
        if self.is_ramped or self.account.total - self.account.step < 6:
            return
        long = {"train": mixture(self.folder, a=1, c=1), "sequence_length": 2 * LENGTH}
        stages = [{"until": 0.5, "train": mixture(self.folder, a=1, b=1)}, long]
        self.change(data__stages=stages)

    def branch(self) -> None:
        """Starts a branch with its own budget from a checkpoint of this run."""
        if self.account.anneal or self.account.name == "wsd" or self.account.end - self.account.step < 2:
            return
        self.save()
        contents, account = self.saved[-1]
        trunk = self.output
        folder = trunk / "checkpoints" / f"step-{account.step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        (trunk / "config.yaml").write_text("")
        self.output = trunk.with_name(f"{trunk.name}b")
        self.settings |= {"branch_from": f"{trunk}@{account.step}", "budget.steps": account.total + 1}
        self.rollbacks = []
        self.account = account.copy()
        self.account.follow(self.settings)
        self.start(contents, begins_branch=True)
        self.saved = []
        self.save()

    def change_rate(self) -> None:
        self.change(optim__learning_rate=self.random.choice([0.5, 2.0, 3.0]))

    def change_schedule(self) -> None:
        name = self.random.choice(["cosine", "linear", "wsd", "constant"])
        if self.account.total - self.account.step > 8:
            self.change(optim__schedule=name, optim__warmup_steps=self.random.choice([1, 2, 3, 4]))

    def anneal(self) -> None:
        if self.account.anneal is None and 5 <= self.account.step < self.account.total:
            steps = max(1, round(min(self.run.total_steps - self.state.step, 0.2 * self.state.step)))
            self.state.anneal_from, self.state.anneal_steps = self.state.step, steps
            self.account.begin_decay()
            self.read_plan()
            if not self.saved or self.saved[-1][1].step < self.state.step:
                self.save()
            else:  # the training loop starts the decay before saving the checkpoint
                self.saved.pop()
                self.save()

    def roll_back(self) -> None:
        """Goes back to an earlier checkpoint, and then skips the data of the bad steps or halves the learning rate."""
        first = self.state.step - self.random.randint(1, 3)
        # A change may move the stage boundary, and then the samples to skip contain different text.
        skips = self.random.random() < 0.6 and "data.stages" not in self.settings
        oldest = self.plan.batches.origin.step if skips and self.plan.batches.origin else 0
        usable = [n for n, (_, account) in enumerate(self.saved) if oldest <= account.step <= first]
        if not usable or first < 0:
            return
        failed = self.account
        entry = rollback_entry(self.plan, self.run, self.state, (first + 1, self.state.step), skips=skips)
        self.rollbacks = json.loads(json.dumps([*self.state.rollbacks, entry]))
        number = self.random.choice(usable)
        del self.saved[number + 1 :]
        # Earlier checkpoints don't contain the rollback, which is recorded separately.
        self.saved[:] = [(contents, account.copy()) for contents, account in self.saved]
        for _, account in self.saved:
            account.factor = failed.factor * entry["learning_rate_factor"]
        if skips:
            windows, samples = failed.begins_at[first]
            self.skipped[samples] = failed.order[windows:]
            self.data_of_skip[samples] = self.data()
        self.decay_before_rollback = failed.anneal
        self.resume(number)


EVENTS = {
    "crash": 3,
    "change_budget": 2,
    "change_batch": 2,
    "change_mixture": 2,
    "change_rate": 1,
    "change_schedule": 1,
    "anneal": 1,
    "roll_back": 2,
    "add_a_stage": 1,
    "branch": 1,
}


@pytest.mark.parametrize("seed", range(int(os.environ.get("HISTORIES", "12"))))
def test_tokens_samples_and_learning_rates_match_after_any_history(folder, tmp_path, seed):
    history = History(folder, tmp_path, seed)
    for _ in range(12):
        history.train(history.random.randint(1, 9))
        event = history.random.choices(list(EVENTS), list(EVENTS.values()))[0]
        history.log.append(f"step {history.state.step}: {event}")
        getattr(history, event)()
    history.train(200)
    starts_of = defaultdict(list)
    for source, start, tokens in history.account.order:
        starts_of[source, tokens].append(start)
    for (source, tokens), starts in starts_of.items():
        windows = WINDOWS[source] * LENGTH // tokens
        for begin in range(0, len(starts), windows):
            epoch = starts[begin : begin + windows]
            assert len(set(epoch)) == len(epoch), f"{source}: a sequence is repeated within an epoch: {history.log}"


def test_a_branch_that_decays_beyond_the_budget_keeps_to_max_epochs(folder, tmp_path):
    trunk = tmp_path / "run"
    (trunk / "checkpoints" / "step-00000012").mkdir(parents=True)
    data = json.dumps([{"shards": str(folder / "c"), "max_epochs": 1}])
    words = ["--config", str(folder / "recipe.yaml"), "--data.train", data, "--budget.steps", "12"]
    words += ["--optim.schedule", "constant", "--branch_from", f"{trunk}@12", "--output", str(tmp_path / "branch")]
    asked = replace(read_command_line(words, ""), overridden=frozenset({"output"}))
    plan = run_plan.derive(asked.config, ranks=1)
    state = RunState(step=12, tokens=plan.tokens_before(12))
    contents = json.loads(json.dumps(trainer_state(asked.config, plan, plan, state)))
    given = asked.config, plan, asked, Path("nowhere"), contents
    with pytest.raises(InputError, match=r"used up .*c after 1 epochs\) after 776 of 896 tokens"):
        continue_from(*given, rollbacks=[], begins_branch=True, is_finished=False)


def test_a_run_rolls_back_to_before_a_change_that_an_earlier_start_accepted(folder, tmp_path):
    """The change was named on that start's command line, and then written to the recipe."""
    history = History(folder, tmp_path, seed=0)
    history.train(5)
    history.change(batch__tokens_per_step=16 * LENGTH)
    run = object.__new__(Run)
    run.config, run.whole_plan = history.asked.config, history.plan
    run.recipe_plan = run_plan.derive(run.config, ranks=1)
    run.command_line = replace(history.asked, overridden=frozenset())
    run.strategy, run.last_step, run.log = SimpleNamespace(ranks=Ranks()), None, SimpleNamespace()
    run.loaded_from, run.is_new = Path("nowhere"), False
    run.saved = SimpleNamespace(contents=history.saved[-1][0])
    with pytest.raises(InputError, match=r"batch.tokens_per_step: the run was started with"):
        _restore_state(run)
    _restore_state(run, rolls_back=True)
    assert run.state.step == history.saved[-1][1].step and run.plan.tokens_per_step == 16 * LENGTH
