"""Tests for the shipped model configs: each one loads, builds and has the parameter count in its name."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from pretrain.model.model_config import load_model_config
from support.project import ROOT

CONFIGS = sorted((ROOT / "model_configs").glob("*.json"))
# Exact parameter counts. If a count changes, the shape has changed too, so give it a new name.
PARAMETERS = {
    "char_0.8m": 816_192,
    "deepone_162m": 162_450_432,
    "deepseek_v3_4m": 3_750_400,
    "deepseek_v3_500m": 494_793_472,
    "deepseek_v3_7b": 6_612_789_248,
    "gpt2_124m": 124_475_904,
    "gpt2_406m": 406_382_592,
    "llama_125m": 125_264_640,
    "llama_13b": 13_015_864_320,
    "llama_1b": 1_100_048_384,
    "llama_30m": 29_990_784,
    "llama_360m": 359_973_888,
    "llama_3b": 3_015_355_392,
    "llama_7b": 6_738_415_616,
    "llama_demo": 2_820_352,
    "mixtral_9b": 8_838_940_672,
    "nanochat_d4": 36_700_160,
    "nanochat_d8": 92_274_688,
    "nanochat_d12": 185_597_952,
    "nanochat_d16": 335_544_320,
    "nanochat_d20": 560_988_160,
    "olmoe_7b": 6_919_161_856,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_125m": 125_266_688,
    "qwen3_moe_500m": 503_343_872,
    "qwen3_moe_5m": 4_991_744,
    "smollm_135m": 134_515_008,
    "smollm_360m": 361_821_120,
    "smollm_1.7b": 1_711_376_384,
}
UNITS = {"m": 10**6, "b": 10**9}


def name_says(name: str, parameters: int) -> bool:
    """Returns True if a name such as llama_1b or qwen3_0.6b matches the parameter count.

    The count is rounded to as many significant digits as the name has, not counting trailing zeros. For example, 1b
    covers 0.95 to 1.5 billion (TinyLlama has 1.1) and 360m covers 355 to 365 million.
    """
    digits, unit = re.search(r"_([\d.]+)([mb])$", name).groups()
    stated = float(digits)
    decimals = len(digits.partition(".")[2])
    step = 10.0**-decimals
    while decimals == 0 and stated % (step * 10) == 0:
        step *= 10
    return abs(parameters / UNITS[unit] - stated) <= step / 2


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_has_the_parameters_that_its_name_says(path):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_model_config(str(path)))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == PARAMETERS[path.stem]
    if re.search(r"\d[mb]$", path.stem):
        assert name_says(path.stem, parameters)


def test_all_configs_are_in_the_table():
    assert {path.stem for path in CONFIGS} == set(PARAMETERS)


def test_the_table_on_the_page_matches_the_files():
    """Sizes, vocabulary, weight tying and positions in the table of docs/shapes.md match the config files."""
    page = (ROOT / "docs/shapes.md").read_text().partition("\n## ")[0]
    rows = {
        cells[1].strip("` "): [cell.strip() for cell in cells[2:-1]] for cells in map(split_row, page.splitlines())
    }
    for name, parameters in PARAMETERS.items():
        config, cells = load_model_config(str(ROOT / f"model_configs/{name}.json")), rows[name]
        assert cells[0] == f"{parameters:,}", name
        assert cells[2] == f"{config.num_hidden_layers} x {config.hidden_size:,}", name
        expected = [f"{config.vocab_size:,}", "yes" if config.tie_word_embeddings else "no"]
        assert cells[-3:] == [*expected, f"{config.max_position_embeddings:,}"], name


def split_row(line: str) -> list[str]:
    return line.split("|") if line.startswith("| `") else ["", "", ""]


def test_the_rule_for_names_refuses_wrong_ones():
    assert name_says("llama_30m", 30_400_000)
    assert not name_says("llama_125m", 126_000_000)
    assert not name_says("llama_7b", 7_600_000_000)
    assert not name_says("qwen3_0.6b", 660_000_000)
    assert not name_says("smollm_360m", 366_000_000)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_special_ids_come_from_the_data_and_not_from_the_config(path):
    assert not [key for key in json.loads(path.read_text()) if key.endswith("_token_id")]
    config = load_model_config(str(path))
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)


def test_smollm2s_published_initialization():
    config = load_model_config(f"{CONFIGS[0].parent}/smollm_135m.json")
    assert config.initializer_range == pytest.approx(config.hidden_size**-0.5)  # 1/24


def test_published_shapes():
    for name, published in {
        "llama_1b": (2048, 5632, 22, 32, 4),  # TinyLlama/TinyLlama_v1.1
        "smollm_135m": (576, 1536, 30, 9, 3),  # HuggingFaceTB/SmolLM2-135M
        "smollm_360m": (960, 2560, 32, 15, 5),  # HuggingFaceTB/SmolLM2-360M
        "smollm_1.7b": (2048, 8192, 24, 32, 32),  # HuggingFaceTB/SmolLM2-1.7B
        "qwen3_0.6b": (1024, 3072, 28, 16, 8),  # Qwen/Qwen3-0.6B-Base
        "qwen3_1.7b": (2048, 6144, 28, 16, 8),  # Qwen/Qwen3-1.7B-Base
        "llama_7b": (4096, 11008, 32, 32, 32),  # meta-llama/Llama-2-7b-hf
        "llama_13b": (5120, 13824, 40, 40, 40),  # meta-llama/Llama-2-13b-hf
    }.items():
        config = load_model_config(f"{CONFIGS[0].parent}/{name}.json")
        shape = (config.hidden_size, config.intermediate_size, config.num_hidden_layers)
        assert (*shape, config.num_attention_heads, config.num_key_value_heads) == published
