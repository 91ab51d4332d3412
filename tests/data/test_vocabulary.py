"""The model that a recipe's shards give their vocabulary."""

import json

import pytest

from pretrain.data.vocabulary import assumed_vocabulary, planned_model_config, vocabulary_of, vocabulary_text
from pretrain.recipe import read_run_config
from support.numbered_shards import write_shards


@pytest.fixture
def config_of(recipe, tmp_path):
    """The recipe on shards of that many ids (None: shards that do not exist)."""

    def config_of(ids, *overrides):
        folder = tmp_path / f"shards{ids}"
        if ids is not None and not folder.exists():
            write_shards(folder, 2_000, vocabulary=ids)
        return read_run_config(recipe, [("data.train.0.shards", str(folder)), *overrides])

    return config_of


def planned(config):
    return planned_model_config(config.model, config.data)


def assumed(config, model_config):
    return assumed_vocabulary(config.model, config.data, model_config)


def test_the_shards_size_the_model_where_it_lets_them(config_of):
    auto = ("model.vocab_size", "auto")
    assert vocabulary_of(config_of(300).data) == 300
    assert planned(config_of(300)).vocab_size == 512
    assert planned(config_of(300, auto)).vocab_size == 320
    assert planned(config_of(700, auto)).vocab_size == 704


def test_a_plan_without_shards_says_what_it_assumes(config_of):
    missing, auto = config_of(None), config_of(None, ("model.vocab_size", "auto"))
    assert vocabulary_of(missing.data) is None
    assert assumed(missing, planned(missing)) == [], "stated"
    (remark,) = assumed(auto, planned(auto))
    assert "not prepared yet. Planned with 512 rows" in remark
    assert assumed(config_of(300, ("model.vocab_size", "auto")), planned(missing)) == []


def test_the_vocabulary_in_words():
    assert vocabulary_text(50_304, 50_257) == "50,257 IDs, padded to 50,304"
    assert vocabulary_text(1024, 1024) == "1,024 IDs"
    assert vocabulary_text(32_000, 8_000) == "8,000 IDs, in a model with 32,000 rows"


def test_a_json_that_leaves_it_out_takes_the_datas(config_of, recipe, tmp_path):
    path = tmp_path / "tiny_llama.json"
    keys = json.loads(path.read_text())
    del keys["vocab_size"]
    path.write_text(json.dumps(keys))
    assert planned(config_of(300)).vocab_size == 320
