"""Context parallelism must have the same loss and gradients as full sequences; invalid settings must be rejected."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from pretrain.errors import InputError
from pretrain.model.build import build_meta_model
from pretrain.model.own_code import register_all
from pretrain.parallel.context_parallel import (
    divides,
    exchange_heads,
    heads_problem,
    mixing_problem,
    part_of_batch,
)
from pretrain.parallel.mesh import MeshStrategy
from pretrain.recipe import read_run_config
from support.context_ranks import CASES
from support.project import launch, run_script
from support.tiny_models import TINY, TINY_LLAMA

register_all()


@pytest.fixture
def launched(monkeypatch):
    """Sets the environment variables that `accelerate launch` sets for cp.yaml."""

    def launched(processes: int, size: str = "0", **more: str):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", size)
        for name, value in more.items():
            monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}", value)

    return launched


def problems(recipe, **overrides) -> str:
    return "\n".join(MeshStrategy.problems(read_run_config(recipe, list(overrides.items())), "cp"))


@pytest.fixture(scope="module")
def differences(tmp_path_factory) -> dict[str, dict[str, float]]:
    """Returns the differences from the unsharded model, measured with four processes."""
    path = tmp_path_factory.mktemp("context") / "differences.json"
    launch("cp", 4, "tests/support/context_ranks.py", path, timeout=300)
    return json.loads(path.read_text())


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_match_full_sequences(differences, case):
    found = differences[case]
    assert set(found) >= {"loss", "gradients", "loss without document_mask", "gradients without document_mask"}
    assert all(value <= 1e-6 for name, value in found.items() if name.startswith("loss")), found
    assert all(value <= 2e-6 for name, value in found.items() if name.startswith("gradients")), found


@pytest.mark.parametrize("case", CASES)
def test_documents_split_across_processes_have_the_same_loss(differences, case):
    """A document split across two, three or four processes must have the same loss as when it is processed alone."""
    assert differences[case]["documents alone"] <= 1e-5


@pytest.mark.parametrize(
    "model_type", ["llama", "gpt2", "qwen3", "deepone", "olmoe", "qwen3_moe", "mistral", "gemma2"]
)
def test_models_that_mix_positions_only_in_attention_run(model_type):
    config = AutoConfig.for_model(**{**TINY.get(model_type, {}), "model_type": model_type})
    assert mixing_problem(config) is None


@pytest.mark.parametrize("model_type", ["mamba", "bloom", "gpt_oss", "lfm2"])
def test_other_models_are_rejected_by_name(model_type):
    convolution = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2} if model_type == "lfm2" else {}
    problem = mixing_problem(AutoConfig.for_model(model_type, **convolution))
    assert f"model: {model_type} does not support cp" in problem


def test_transformers_own_attention_is_rejected():
    model = build_meta_model(AutoConfig.for_model(**TINY_LLAMA), attention="sdpa")
    with pytest.raises(InputError, match="only works with transformers' sdpa attention, which would treat each chunk"):
        exchange_heads(model, 2, "0")


@pytest.mark.parametrize(
    ("heads", "key_heads", "parts", "works"),
    [
        (8, 8, 8, True),
        (8, 4, 8, True),
        (8, 1, 8, True),
        (12, 4, 8, False),
        (32, 8, 3, False),
        (12, 3, 6, True),
        (8, 4, 2, True),
    ],
)
def test_heads_divide(heads, key_heads, parts, works):
    assert divides(heads, key_heads, parts) is works
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=key_heads)
    assert (heads_problem(config, parts) is None) is works


@pytest.mark.parametrize(
    ("heads", "words"), [(None, "num_attention_heads is None"), ([4, 8], "num_attention_heads is [4, 8], must be one")]
)
def test_models_without_one_number_of_heads_are_refused(heads, words):
    problem = heads_problem(SimpleNamespace(model_type="odd", num_attention_heads=heads), 2)
    assert words in problem and "use fsdp2" in problem


def test_refusals_before_the_start(launched, recipe):
    launched(2)
    assert problems(recipe) == ""
    assert "nearest: 32 or 34" in problems(recipe, **{"data.sequence_length": "33"})
    launched(8)
    assert "4 query heads and 2 key-value heads cannot be split across 8 context-parallel processes; " in problems(
        recipe
    )
    assert problems(recipe).endswith("valid values for parallelism_config_cp_size: 2, 4")
    launched(4, "3")
    assert problems(recipe) == (
        "launcher: parallelism_config_cp_size 3 does not fit the number of processes (4); use 0 (all remaining) "
        "or 2, 4, or --num_processes 3"
    )
    launched(1)
    assert (
        "parallelism_config_cp_size: no processes are left for it (out of 1); use another strategy, or --num"
        in problems(recipe)
    )
    launched(4, "2", DP_REPLICATE_SIZE="2")
    assert problems(recipe) == ""


def test_a_rejected_start_ends_with_status_2(recipe):
    launcher = ("-m", "pretrain.launch", "--config_file", "accelerate_configs/cp.yaml", "--num_processes", "2")
    refused = run_script(
        *launcher, "train.py", "--config", recipe, "--data.sequence_length", "33", "--check", check=False
    )
    assert refused.returncode == 2 and "cannot be split into 2 equal chunks" in refused.stderr + refused.stdout
    assert "Traceback" not in refused.stderr


def test_a_part_of_a_batch_keeps_its_original_positions():
    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids_BT": ids, "targets_BT": ids + 1, "cu_seq_lens_q": torch.tensor([0, 12, 24])}
    _, second = part_of_batch(1, 3, None, (), batch)
    assert second["input_ids_BT"].tolist() == [[4, 5, 6, 7], [16, 17, 18, 19]]
    assert torch.equal(second["targets_BT"], second["input_ids_BT"] + 1)
    assert second["position_ids"].tolist() == [[4, 5, 6, 7]] and len(second["cu_seq_lens_q"]) == 3
    _, first = part_of_batch(0, 3, None, (ids, ids), {"position_ids": ids % 5})
    assert torch.equal(first["position_ids"], (ids % 5)[:, :4])
