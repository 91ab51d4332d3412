"""Tests for extensions: recipes can use names registered in a user's file, and runs validate and record them."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import PreTrainedConfig

from pretrain import errors
from pretrain.config import Loss
from pretrain.errors import InputError
from pretrain.mesh_sizes import Sizes
from pretrain.model import loss_terms
from pretrain.recipe import read_run_config
from pretrain.registry import LOADED_CODE, LOSS_TERMS, load_extensions
from support.project import events, launch, losses, run_script

EXTENSION = '''
import torch
from pretrain.config import Section
from pretrain.model.loss_terms import LossTerm, TermOptions
from pretrain.optim.optimizers import OptimizerSpec
from pretrain.registry import LOSS_TERMS, OPTIMIZERS, SCHEDULES


@OPTIMIZERS.register("my_sgd")
class MySGD(OptimizerSpec):
    takes = ("whole", "sharded", "pieces")

    class Options(Section):
        momentum: float = 0.9

    def make(self, parameters, settings, learning_rate, seed, device_type):
        momentum = self.options(settings).momentum
        return torch.optim.SGD(self.groups(parameters, settings.weight_decay), lr=learning_rate, momentum=momentum)

    def state_shapes(self, name):
        return {"momentum_buffer": self.model.shapes[name]}


@SCHEDULES.register("stairs")
def stairs(schedule, step):
    return 0.5**step


@LOSS_TERMS.register("some_tokens")
class SomeTokens(LossTerm):
    """Shrinks the logits of some tokens, more at later steps: how many there are differs between windows."""

    by_token = True

    class Options(TermOptions):
        power: int = 2

    def __call__(self, seen):
        hidden_ND = seen.hidden_BTD[seen.targets_BT % 3 == 0]
        return (1 + seen.step) * seen.logits(hidden_ND).abs().pow(self.options.power).mean(-1).sum()
'''


AVERAGED_SGD = """
class AveragedSGD(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"age": 0, "sum": torch.zeros_like(parameter)}
                state["age"] += 1
                state["sum"] += parameter.grad
                parameter -= group["lr"] * state["sum"] / state["age"]


@OPTIMIZERS.register("averaged_sgd")
class AveragedSGDSpec(MySGD):
    def make(self, parameters, settings, learning_rate, seed, device_type):
        return AveragedSGD(self.groups(parameters, settings.weight_decay), {"lr": learning_rate})

    def state_shapes(self, name):
        return {"age": (), "sum": self.model.shapes[name]}
"""


@pytest.fixture
def extended(recipe, tmp_path):
    """A four-step recipe with an optimizer, a schedule and a loss term from a file."""
    (tmp_path / "ideas.py").write_text(EXTENSION)
    values = yaml.safe_load(recipe.read_text())
    values |= {"extensions": [str(tmp_path / "ideas.py")], "budget": {"steps": 4}, "validation": {"sequences": 4}}
    values |= {"checkpoint": {"every_steps": 2}, "loss": {"terms": {"some_tokens": {"coefficient": 3.0}}}}
    values["optim"] |= {"name": "my_sgd", "options": {"momentum": 0.5}, "schedule": "stairs", "learning_rate": 0.1}
    recipe.write_text(yaml.safe_dump(values))
    return recipe


def curve(run):
    """Returns {step: [loss, term, gradient norm]}."""
    return {e["step"]: [e["loss"], e["loss_some_tokens"], e["grad_norm"]] for e in events(run, "train")}


def test_a_run_uses_logs_and_records_them(extended, tmp_path):
    run_script("train.py", "--config", extended)
    run = tmp_path / "run"
    assert "SGD" in (run / "train.log").read_text()
    assert [event["learning_rate"] for event in events(run, "train")[2:]] == [0.1 / 4, 0.1 / 8]
    with_term = curve(run)
    assert with_term[4][1] > 2 * with_term[1][1] > 0, "the term must depend on the step"
    (copy,) = (run / "extensions").iterdir()
    assert copy.read_text() == EXTENSION
    assert copy.stem == f"ideas-{json.loads((run / 'environment.json').read_text())['code']['extension ideas.py']}"
    state = json.loads((run / "checkpoints/step-00000004/trainer_state.json").read_text())
    assert state["settings"]["loss.terms"] == {"some_tokens": {"coefficient": 3.0}}
    # The gradient is a sum over tokens, so it doesn't depend on the micro-batch size.
    run_script(
        "train.py", "--config", extended, "--batch.sequences_per_micro_batch", "4", "--output", tmp_path / "whole"
    )
    whole = curve(tmp_path / "whole")
    for step, figures in with_term.items():
        assert figures == pytest.approx(whole[step], rel=2e-5)
    run_script("train.py", "--config", extended, "--loss.terms", "{}", "--output", tmp_path / "without")
    assert losses(tmp_path / "without")[1] == with_term[1][0] and losses(tmp_path / "without")[4] != with_term[4][0]


def test_a_recorded_run_is_read_without_running_its_code(extended, tmp_path):
    path = tmp_path / "ideas.py"
    path.write_text("raise SystemExit('executed')")
    config = read_run_config(extended, loads_extensions=False)
    assert config.data.sequence_length == 64 and config.loss.terms == {} and config.optim.name == "adamw"
    with pytest.raises(InputError, match="line 1: SystemExit: executed"):
        read_run_config(extended)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3", "cp"])
def test_strategies_train_alike(extended, tmp_path, strategy):
    alone = ("--checkpoint.save_final", "false", "--budget.steps", "3")
    run_script("train.py", "--config", extended, *alone)
    launch(strategy, 2, "train.py", "--config", extended, *alone, "--output", tmp_path / strategy)
    expected = curve(tmp_path / "run")
    for step, figures in curve(tmp_path / strategy).items():
        assert figures == pytest.approx(expected[step], rel=5e-5)


def test_an_optimizer_with_its_own_step_count_resumes_with_zero(extended, tmp_path):
    (tmp_path / "ideas.py").write_text(EXTENSION + AVERAGED_SGD)
    words = ("train.py", "--config", extended, "--optim.name", "averaged_sgd", "--checkpoint.save_final", "false")
    run_script(*words, "--output", tmp_path / "whole")
    launch("zero1", 2, *words, "--checkpoint.stop_at_step", "2", check=False)
    launch("zero3", 2, *words)
    expected = curve(tmp_path / "whole")
    assert [*curve(tmp_path / "run")] == [*expected]
    for step, figures in curve(tmp_path / "run").items():
        assert figures == pytest.approx(expected[step], rel=5e-5)


def test_zero_rejects_scalars_that_differ_between_parameters(extended, tmp_path):
    changed = AVERAGED_SGD.replace('"age": 0', '"age": parameter.shape[0]')
    (tmp_path / "ideas.py").write_text(EXTENSION + changed)
    words = ("train.py", "--config", extended, "--optim.name", "averaged_sgd", "--checkpoint.save_final", "false")
    run_script(*words, "--checkpoint.stop_at_step", "2", check=False)
    result = launch("zero2", 2, *words, check=False)
    assert "averaged_sgd saved a different age for each parameter (" in result.stdout + result.stderr
    assert "exitcode  : 2" in result.stderr and len(curve(tmp_path / "run")) == 2


def test_resuming_with_a_changed_file_gives_a_warning(extended, tmp_path):
    run_script("train.py", "--config", extended, "--checkpoint.stop_at_step", "2", check=False)
    (tmp_path / "ideas.py").write_text(EXTENSION.replace("(1 + seen.step)", "(2 + seen.step)"))
    changed = ("--loss.terms.some_tokens.coefficient", "1", "--optim.max_grad_norm", "0.5")
    changed += ("--checkpoint.keep_best", "1")
    told = run_script("train.py", "--config", extended, *changed).stdout
    assert "  optim.max_grad_norm: 1.0 until now, 0.5 from here on" in told
    assert "  checkpoint.keep_best: 0 until now, 1 from here on" in told, "keeping fewer deletes checkpoints"
    assert "  extension ideas.py: " in told and "  loss.terms: {'some_tokens': {'coefficient': 3.0}} until now" in told
    assert len(list((tmp_path / "run/extensions").iterdir())) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--optim.name", "my_sg"),
            "--optim.name: 'my_sg' is not an optimizer, and no extension adds it; did you mean my_sgd?",
        ),
        (("--optim.options.momentun", "1"), "my_sgd has no option momentun; did you mean momentum?"),
        (("--optim.options.momentum", "much"), "momentum: Input should be a valid number, unable to parse"),
        (("--optim.name", "adamw"), "adamw takes no options (got momentum)"),
        (("--optim.schedule", "stair"), "'stair' is not a schedule, and no extension adds it; did you mean stairs?"),
        (("--loss.terms.some_token.coefficient", "1"), "did you mean some_tokens?"),
        (("--loss.terms.some_tokens.powr", "1"), "terms.some_tokens has no option powr; did you mean power?"),
        (("--extensions", "nowhere.py"), "extensions: nowhere.py: no such Python file"),
        (("--compile", "full"), "loss.terms: not supported with compile: full"),
    ],
)
def test_mistakes_in_the_recipe_are_named(extended, arguments, said):
    refused = run_script("train.py", "--config", extended, "--check", *arguments, check=False)
    assert refused.returncode == 2 and said in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("there", "instead", "said"),
    [
        ("import torch\n", "import torch as\n", "ideas.py, line 2: SyntaxError"),
        ("return 0.5**step\n", "return 0.5**step\n\n\nnowhere()\n", "line 29: NameError: name 'nowhere'"),
        ('"my_sgd"', '"adamw"', "ideas.py: an optimizer adamw already exists"),
        (
            "return 0.5**step\n",
            "return 2.0 - step\n",
            "optim.schedule: stairs returned -1.0 at step 3; it must return",
        ),
        ("return 0.5**step\n", "0.5**step\n", "optim.schedule: stairs returned None at step 2; it must return"),
        (
            "class MySGD(OptimizerSpec)",
            "class MySGD",
            "line 9: TypeError: MySGD is an optimizer and must be a subclass",
        ),
        (
            "class Options(TermOptions)",
            "class Options(Section)",
            "line 29: TypeError: SomeTokens.Options must be a subclass of TermOptions",
        ),
        ("def state_shapes", "def shapes", "line 9: TypeError: MySGD is an optimizer and must define state_shapes"),
        ("class Options(Section)", "class Options", "line 9: TypeError: MySGD.Options must be a subclass of Section"),
        ("(schedule, step)", "(step)", "line 24: TypeError: stairs must accept 2 arguments (too many positional"),
        ("(self, seen)", "(self)", "line 29: TypeError: SomeTokens.__call__ must accept 2 arguments (too many"),
        (
            "(self, parameters, settings, learning_rate, seed, device_type)",
            "(self, parameters, settings)",
            "line 9: TypeError: MySGD.make must accept 6 arguments (too many positional arguments)",
        ),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_line(extended, tmp_path, there, instead, said):
    assert there in EXTENSION
    (tmp_path / "ideas.py").write_text(EXTENSION.replace(there, instead))
    refused = run_script("train.py", "--config", extended, "--check", check=False)
    assert refused.returncode == 2 and said in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("there", "instead", "said"),
    [
        ('"momentum_buffer": self', '"momentum": self', "returns {'momentum': (64, 64)}, but after the first step"),
        ("shapes[name]}", "shapes[name][:1]}", "the parameter's state is {'momentum_buffer': (64, 64)}"),
        (
            "return torch.optim.SGD",
            "torch.optim.SGD",
            "make must return a torch.optim.Optimizer, got NoneType",
        ),
        ("settings.weight_decay), lr", "1.0)[:1], lr", "my_sgd: make left out 6 of 20 parameters"),
        (
            "return torch.optim.SGD(",
            "torch.optim.SGD.eval = print; return torch.optim.SGD(",
            "my_sgd: SGD has eval(), but optimizers with separate weights for evaluation are not supported",
        ),
        (
            "return torch.optim.SGD(",
            "torch.optim.SGD.step = lambda self: self.param_groups[1].update(age=1); return torch.optim.SGD(",
            "my_sgd: a step changes age in the parameter groups, which checkpoints don't contain",
        ),
        ("by_token = True\n", "module = lambda self: None\n", "some_tokens: module must return a torch.nn.Module"),
        (
            "return 0.5**step\n",
            "return 1 / schedule.nothing\n",
            "ideas.py, line 26: AttributeError: 'Schedule' object has no",
        ),
        (
            "return (1 + seen.step)",
            "return seen.nothing",
            "ideas.py, line 40: AttributeError: 'Seen' object has no attribute",
        ),
        (
            "by_token = True\n",
            "def __init__(self, *given):\n        {}['x']\n",
            "ideas.py, line 34: KeyError: 'x', in: {}['x']",
        ),
    ],
)
def test_a_mistake_that_the_start_shows_is_named(extended, tmp_path, there, instead, said):
    assert there in EXTENSION
    (tmp_path / "ideas.py").write_text(EXTENSION.replace(there, instead))
    refused = run_script("train.py", "--config", extended, check=False)
    assert refused.returncode == 2 and said in refused.stdout + refused.stderr
    assert "Traceback" not in refused.stderr


def test_an_error_of_the_script_next_to_an_extension_is_not_the_users(monkeypatch, tmp_path):
    monkeypatch.setattr(errors, "OWN_FOLDERS", {tmp_path})
    for name, expected in (("train.py", KeyError), ("mine.py", InputError)):
        monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
        with pytest.raises(expected), errors.errors_in_own_code():
            exec(compile("{}['x']", tmp_path / name, "exec"))


@pytest.mark.parametrize(
    ("reader", "said"),
    [
        ("def read(stream, reading): ...", "line 3: TypeError: read is a document format and must have @file_format("),
        (
            '@file_format(".stars", place="record")\ndef read(stream, reading): yield stream.nothing',
            "mine.py, line 5: AttributeError: 'ByteStream' object has no attribute 'nothing', in: def read(",
        ),
        (
            '@file_format(".stars", place="record")\ndef read(stream, reading): yield "text"',
            "format stars: must yield Records, got str",
        ),
    ],
)
def test_a_mistake_in_a_document_format_is_named(shards, tmp_path, reader, said):
    lines = [
        "from pretrain.registry import FORMATS",
        "from pretrain_tools.preparation.documents.formats import file_format",
        '@FORMATS.register("stars")',
        reader,
    ]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    (tmp_path / "a.stars").write_text("a*b")
    words = ("--input", tmp_path / "a.stars", "--tokenizer", shards / "tokenizer", "--output", tmp_path / "prepared")
    given = ("--workers", "2", "--extensions", tmp_path / "mine.py")
    refused = run_script("prepare_data.py", *words, *given, check=False)
    assert refused.returncode == 2 and said in refused.stderr and "Traceback" not in refused.stderr


class Plain(loss_terms.LossTerm):
    """A loss term that needs entire sequences."""

    def __call__(self, seen):
        return seen.hidden_BTD.sum(-1)


def test_terms_that_need_whole_sequences_are_rejected_under_cp(monkeypatch):
    monkeypatch.setitem(LOSS_TERMS, "plain", Plain)
    monkeypatch.setattr(loss_terms, "launched_sizes", lambda: Sizes(cp=2))
    (problem,) = loss_terms.term_problems(Loss(terms={"plain": None}), "auto")
    assert "cp" in problem and "fsdp2" in problem


def test_an_undeclared_use_of_the_embedding_is_rejected():
    nothing = torch.zeros(1, 3)
    seen = loss_terms.Seen(nothing, nothing, nothing, nothing, 0, torch.nn.Linear(1, 1), None, {})
    with pytest.raises(InputError, match="embeds = True"):
        seen.embedding(nothing)


@pytest.fixture
def loss_of_term(monkeypatch):
    """Returns a function that computes the loss of a term with this value."""
    monkeypatch.setitem(LOSS_TERMS, "plain", Plain)

    def loss_of_term(value, **options):
        monkeypatch.setattr(Plain, "__call__", lambda self, seen: value)
        terms = loss_terms.LossTerms(Loss(terms={"plain": options}), PreTrainedConfig(), seed=0, dtype=torch.float32)
        ids = torch.zeros(2, 3, dtype=torch.long)
        model = SimpleNamespace(get_output_embeddings=int, get_input_embeddings=int)
        return terms.add(ids, ids, torch.zeros(2, 3, 4), model, None, {})

    return loss_of_term


@pytest.mark.parametrize("value", [torch.zeros(2, 3, 4), torch.zeros(3), 1.0])
def test_a_term_that_is_not_one_value_for_each_token_is_refused(value, loss_of_term):
    with pytest.raises(
        InputError, match=r"loss.terms.plain: must return .* of shape \(2, 3\) with one value per token"
    ):
        loss_of_term(value)


def test_a_term_without_a_gradient_is_refused(loss_of_term):
    with pytest.raises(InputError, match="the result has no gradient, so it doesn't affect training"):
        loss_of_term(torch.ones(2, 3))
    assert loss_of_term(torch.zeros(2, 3)) == 0, "as for a micro-batch without matching tokens"
    assert loss_of_term(torch.ones(2, 3), coefficient=0) == 0, "only logged"


def test_a_terms_logits_are_capped_like_the_models():
    head = torch.nn.Linear(4, 8, bias=False)
    nothing = torch.zeros(1, 3)
    hidden = 50 * torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))
    seen = loss_terms.Seen(nothing, nothing, hidden, nothing, 0, head, nothing, {}, cap=15.0)
    assert torch.allclose(seen.logits(hidden), 15 * torch.tanh(head(hidden) / 15)) and head(hidden).abs().max() > 15


def test_extensions_with_the_same_name_are_all_recorded(tmp_path):
    files = [tmp_path / folder / "same_name.py" for folder in ("a", "b")]
    recorded = set()
    for changed in (None, *files):
        for file in files:
            file.parent.mkdir(exist_ok=True)
            file.write_text("x = 1" if file == changed else "")
        load_extensions(map(str, files))
        recorded.add(LOADED_CODE["extension same_name.py"])
    assert len(recorded) == 3
