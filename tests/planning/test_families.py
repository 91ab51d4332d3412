"""Tests for model families: published shapes, configs that the library reads, and parameter counts."""

import itertools

import pytest

from pretrain.model.build import active_parameters, count_parameters, flops_per_token
from pretrain.model.model_config import load_model_config
from pretrain_tools.planning.families import FAMILIES, Shape


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_counts_match_the_model_built_from_the_json(family, tmp_path):
    for layers, width in (family.rungs[0], family.rungs[2], family.rungs[9]):
        shape = Shape(layers, width, 1024, family)
        path = tmp_path / "model.json"
        path.write_text(shape.json_text)
        config = load_model_config(str(path))
        assert shape.parameters == pytest.approx(count_parameters(config), rel=0.01)
        assert shape.active == pytest.approx(active_parameters(config), rel=0.01)
        assert shape.flops_per_token == pytest.approx(flops_per_token(config, shape.sequence_length), rel=0.01)
        assert config.max_position_embeddings >= shape.sequence_length


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_ladders_rise_by_small_steps_from_ten_million_to_thirteen_billion(family):
    shapes = [Shape(*rung, 32_000, family) for rung in family.rungs]
    sizes = [shape.layer_parameters for shape in shapes]
    assert sizes == sorted(sizes)
    large = [size for size in sizes if size > 1e7]
    assert all(more / less < (1.8 if family.name != "nanochat" else 2.4) for less, more in itertools.pairwise(large))
    assert 1.2e10 < shapes[-1].parameters < 1.35e10
    assert all(shape.width == shape.heads * shape.head_width or family.groups_heads for shape in shapes)


@pytest.mark.parametrize(
    ("name", "rung", "vocabulary", "parameters"),
    [
        ("llama", (40, 5120), 32_000, 13_015_864_320),
        ("qwen3", (28, 1024), 151_936, 596_049_920),
        ("qwen3", (36, 4096), 151_936, 8_190_735_360),
        ("nanochat", (20, 1280), 65_536, 560_988_160),
        ("gpt2", (48, 1600), 50_257, 1_557_611_200),
    ],
)
def test_published_models_are_among_them(name, rung, vocabulary, parameters):
    """Each published model matches one of the family's sizes: Llama 13B (whose MLP is 1% wider), Qwen3 0.6B and 8B,
    nanochat d20, and GPT-2 XL (with 1,024 positions)."""
    assert rung in FAMILIES[name].rungs
    assert Shape(*rung, vocabulary, FAMILIES[name]).parameters == pytest.approx(parameters, rel=0.01)
