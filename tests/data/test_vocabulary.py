"""Tests for the model's vocabulary size, which is determined by the recipe's shards."""

import json

import pytest

from pretrain.data.vocabulary import planned_model_config, vocabulary_of, vocabulary_text
from pretrain.recipe import read_run_config
from pretrain_tools.planning.report import assumed_vocabulary
from support.numbered_shards import write_shards


@pytest.fixture
def config_of(recipe, tmp_path):
    """Returns a function that creates a config for shards with a given number of IDs (None: missing shards)."""

    def config_of(ids, *overrides):
        folder = tmp_path / f"shards{ids}"
        if ids is not None and not folder.exists():
            write_shards(folder, 2_000, vocabulary=ids)
        return read_run_config(recipe, [("data.train.0.shards", str(folder)), *overrides])

    return config_of


def test_the_shards_determine_an_automatic_vocabulary_size(config_of):
    auto = ("model.vocab_size", "auto")
    assert vocabulary_of(config_of(300).data) == 300
    assert planned_model_config(config_of(300)).vocab_size == 512
    assert planned_model_config(config_of(300, auto)).vocab_size == 320
    assert planned_model_config(config_of(700, auto)).vocab_size == 704


def test_a_plan_without_shards_reports_its_assumption(config_of):
    missing, auto = config_of(None), config_of(None, ("model.vocab_size", "auto"))
    assert vocabulary_of(missing.data) is None
    message = "no assumption is needed if the model states its vocabulary size"
    assert assumed_vocabulary(missing, planned_model_config(missing)) == [], message
    (remark,) = assumed_vocabulary(auto, planned_model_config(auto))
    assert "not prepared yet. Planned with 512 rows" in remark
    assert assumed_vocabulary(config_of(300, ("model.vocab_size", "auto")), planned_model_config(missing)) == []


def test_the_vocabulary_is_described():
    assert vocabulary_text(50_304, 50_257) == "50,257 IDs, padded to 50,304"
    assert vocabulary_text(1024, 1024) == "1,024 IDs"
    assert vocabulary_text(32_000, 8_000) == "8,000 IDs, in a model with 32,000 rows"


def test_a_model_without_a_vocabulary_size_uses_the_datas(config_of, recipe, tmp_path):
    path = tmp_path / "tiny_llama.json"
    keys = json.loads(path.read_text())
    del keys["vocab_size"]
    path.write_text(json.dumps(keys))
    assert planned_model_config(config_of(300)).vocab_size == 320
