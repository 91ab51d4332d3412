"""Tests for models with custom code: training from a folder, copying it with checkpoints, and errors with file and
line."""

import shutil
import subprocess
import sys

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaModel, PretrainedConfig

from pretrain.errors import InputError
from pretrain.model import own_code
from pretrain.model.model_config import fields_of
from pretrain.model.own_code import name_sizes, register_classes, register_folder
from support.own_model import CONFIG, MODELING, write_own_model
from support.project import ROOT, events, launch, losses, run_script

LOADED_ELSEWHERE = """
import sys, torch
from transformers import AutoModelForCausalLM
logits = []
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    logits.append(model(torch.arange(20)[None]).logits)
assert "pretrain" not in sys.modules
torch.save(logits, sys.argv[1])
"""


@pytest.fixture
def own(recipe, tmp_path):
    """Changes the recipe to train a custom-code model from a folder for four steps."""
    values = yaml.safe_load(recipe.read_text())
    values |= {"model": str(write_own_model(tmp_path / "mine", vocab_size=512)), "budget": {"steps": 4}}
    values |= {"checkpoint": {"every_steps": 2}, "validation": {"sequences": 4}, "export": {"dtype": "fp32"}}
    recipe.write_text(yaml.safe_dump(values))
    return recipe


def checked(recipe, *arguments):
    return run_script("train.py", "--config", recipe, "--check", *arguments, check=False)


def logits_elsewhere(tmp_path, *folders):
    """Returns the logits of each model folder, computed in a Python process without Groundwork."""
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LOADED_ELSEWHERE, tmp_path / "logits.pt", *folders]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load(tmp_path / "logits.pt")


def test_it_trains_resumes_with_changed_code_and_loads_anywhere(own, tmp_path):
    run_script("train.py", "--config", own, "--trust_remote_code", "--checkpoint.stop_at_step", "2", check=False)
    path = tmp_path / "mine/modeling_mine.py"
    path.write_text(path.read_text() + "\n# A remark.\n")
    resumed = run_script("train.py", "--config", own, "--trust_remote_code")
    run = tmp_path / "run"
    (said,) = [line for line in resumed.stdout.splitlines() if line.startswith("  code of the model: ")]
    assert said.endswith("from here on")
    assert list(losses(run)) == [1, 2, 3, 4]
    first, last = (run / f"checkpoints/step-{step:08d}/modeling_mine.py" for step in (2, 4))
    assert (first.read_text(), last.read_text()) == (MODELING, path.read_text())
    assert "modeling_mine.py" in (run / "final/MANIFEST.json").read_text()
    assert torch.equal(*logits_elsewhere(tmp_path, run / "checkpoints/step-00000004", run / "final"))
    refused = run_script("evaluate.py", "--model", run, "--prompt", "def", check=False)
    assert refused.returncode == 2 and "--trust_remote_code" in refused.stderr


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_all_strategies_train_it_equally(own, tmp_path, strategy):
    run_script("train.py", "--config", own, "--trust_remote_code", "--checkpoint.save_final", "false")
    told = ("--output", tmp_path / strategy, "--checkpoint.save_final", "false")
    launch(strategy, 2, "train.py", "--config", own, "--trust_remote_code", *told)
    assert losses(tmp_path / strategy) == pytest.approx(losses(tmp_path / "run"), rel=1e-5)
    assert len(events(tmp_path / strategy, "start")) == 1


def test_its_code_runs_only_with_trust_remote_code(own, tmp_path):
    (tmp_path / "mine/configuration_mine.py").write_text("raise SystemExit('executed')")
    refused = checked(own)
    assert refused.returncode == 2 and "allow it with --trust_remote_code" in refused.stderr
    assert "executed" not in refused.stdout + refused.stderr


SLIPS = {
    "a syntax error": (
        "modeling_mine.py",
        "def forward(self, x, att",
        "def forward(self, x att",
        "line 31: SyntaxError",
    ),
    "an import": ("modeling_mine.py", "from torch import nn\n", "from torch import nnn\n", "line 2: ImportError"),
    "a size": (
        "modeling_mine.py",
        "self.up = nn.Linear(config.n_embd",
        "self.up = nn.Linear(config.n_emb",
        "line 27: A",
    ),
    "the forward pass": ("modeling_mine.py", "self.act(self.gate", "self.act(self.gat", "line 39: AttributeError"),
    "a name": ("modeling_mine.py", "MineForCausalLM", "MineForLM", "does not define MineForCausalLM, the"),
    "sizes": ("configuration_mine.py", "n_layer", "floors", 'attribute_map = {"num_hidden_layers": "YOUR_NAME"}'),
    "no defaults": ("configuration_mine.py", "n_head=4, ", "n_head, ", "MineConfig() must work"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_an_error_in_the_code_is_reported_with_its_line(own, tmp_path, slip):
    file, there, instead, said = SLIPS[slip]
    path = tmp_path / "mine" / file
    text = path.read_text().replace("vocab_size=256, n_layer=2, n_head=4, ", "n_head=4, vocab_size=256, n_layer=2, ")
    assert there in text
    path.write_text(text.replace(there, instead))
    refused = checked(own, "--trust_remote_code")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    (line,) = [line for line in refused.stderr.splitlines() if file in line]
    assert said in line


def test_a_model_type_of_transformers_is_not_taken_over(own, tmp_path):
    for file in ("configuration_mine.py", "config.json"):
        path = tmp_path / "mine" / file
        path.write_text(path.read_text().replace("mine_gated", "llama"))
    refused = checked(own, "--trust_remote_code")
    assert refused.returncode == 2 and "model_type 'llama' is already taken" in refused.stderr


def test_keys_are_those_of_the_signature(own, tmp_path):
    refused = checked(own, "--trust_remote_code", "--model.n_heads", "2", "--model.n_embd", "64")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].endswith("n_heads is not a key of MineConfig; did you mean n_head?")
    assert "num_hidden_layers" in fields_of(LlamaConfig) and fields_of(LlamaConfig)["vocab_size"].default == 32000


def test_flops_and_memory_use_its_sizes(own):
    planned = run_script("plan.py", "--config", own, "--trust_remote_code", "--gpus", "1", "--gpu", "h100").stdout
    # Token and position embeddings; head and 2 layers of 4 x 48^2 + 3 x 48 x 96; norms.
    assert "30,720 in embeddings" in planned and "single" in planned


def test_code_may_be_in_a_repository_with_a_dot_in_its_name(tmp_path, monkeypatch):
    code = write_own_model(tmp_path / "mine-1.5")
    made = []
    monkeypatch.setattr(own_code, "register_classes", lambda file, *classes: made.extend(classes))
    monkeypatch.setattr(own_code, "register_all", lambda: None)
    monkeypatch.setattr(own_code, "LOADED_CODE", {})
    auto_map = {kind: f"{code}--{name}" for kind, name in CONFIG["auto_map"].items()}
    register_folder(str(tmp_path), {"auto_map": auto_map})
    assert [each.__name__ for each in made] == ["MineConfig", "MineForCausalLM", "MineModel"]


def test_files_of_a_hub_repository_may_import_each_other(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("from .b import B\n")
    (tmp_path / "b.py").write_text("def f():\n    from .a import A\n    from .c import C\n")
    (tmp_path / "c.py").write_text("")
    found = []
    monkeypatch.setattr(own_code, "cached_file", lambda repository, name: found.append(name) or tmp_path / name)
    assert own_code.fetched("me/mine", "a.py") == tmp_path / "a.py"
    assert found == ["a.py", "b.py", "c.py"]


class Odd(PretrainedConfig):
    """A config with two common names for its depth."""

    model_type = "odd"

    def __init__(self, n_layer=2, depth=3, d_model=8, vocab_size=4, **kwargs):
        self.n_layer = n_layer
        self.depth = depth
        self.d_model = d_model
        self.vocab_size = vocab_size
        super().__init__(**kwargs)


def test_an_ambiguous_size_is_an_error():
    with pytest.raises(InputError, match=r'attribute_map = \{"num_hidden_layers": "n_layer"\}'):
        name_sizes("odd.py", Odd)
    Odd.attribute_map = {"num_hidden_layers": "depth"}
    name_sizes("odd.py", Odd)
    assert (Odd().num_hidden_layers, Odd().hidden_size) == (3, 8)


def test_a_configuration_that_cannot_be_saved_is_an_error():
    class Sparse(Odd):
        def __init__(self, top_k=2, **kwargs):
            self.top_k = top_k
            super().__init__(**kwargs)

    with pytest.raises(InputError, match=r"odd.py: transformers can't save Sparse: .*'top_k': 2.*declare it in"):
        name_sizes("odd.py", Sparse)


class OddModel(LlamaModel):
    """A Llama model that reuses Llama's config class."""


def test_a_class_with_the_configuration_of_another_is_named():
    with pytest.raises(InputError, match=r"odd.py: OddModel must set config_class = Odd"):
        register_classes("odd.py", type("Odd", (LlamaConfig,), {"model_type": "odd"}), OddModel, None)


def test_an_error_in_an_architecture_affects_only_its_users(recipe, tmp_path):
    copy = tmp_path / "project"
    shutil.copytree(ROOT / "pretrain", copy / "pretrain", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "pretrain/model/architectures/slip.py").write_text("class SlipForCausalLM:\n    x = nowhere\n")
    (tmp_path / "slip.json").write_text('{"model_type": "slip"}')
    code = (
        "import sys\nfrom pretrain.errors import run_script\n"
        "from pretrain.model.model_config import load_model_config\n"
        "run_script(lambda: print(load_model_config(sys.argv[1]).model_type))"
    )
    (copy / "type_of.py").write_text(code)
    slip = "slip.py, line 2: NameError: name 'nowhere'"
    for model, status, said in (("tiny_llama", 0, "llama\n"), ("slip", 2, slip)):
        command = (ROOT / "tests/support/in_copy.py", copy / "type_of.py", tmp_path / f"{model}.json")
        done = run_script(*command, cwd=tmp_path, check=False)
        assert done.returncode == status and said in done.stdout + done.stderr and "Traceback" not in done.stderr
