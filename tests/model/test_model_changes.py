"""Tests for model config changes in a recipe, and for vocabulary sizes taken from the data."""

import json
from pathlib import Path

import pytest
from transformers import GPT2Config

from pretrain.config import ModelSource
from pretrain.errors import InputError
from pretrain.model.build import shape_changes
from pretrain.model.model_config import (
    SHIPPED_CONFIGS,
    config_differences,
    load_model_config,
    load_recipe_model_config,
    padded_vocabulary,
)

DEMO = str(SHIPPED_CONFIGS / "llama_demo.json")


def written(folder: Path, **keys) -> str:
    path = folder / "model.json"
    path.write_text(json.dumps(keys))
    return str(path)


def test_a_key_is_changed_and_the_others_stay():
    own, changed = load_model_config(DEMO), load_model_config(DEMO, changes={"num_hidden_layers": 8})
    assert changed.num_hidden_layers == 8
    assert config_differences(own, changed) == f"num_hidden_layers {own.num_hidden_layers}, now 8"


def test_a_standard_name_replaces_the_classes_own(tmp_path):
    path = written(tmp_path, model_type="gpt2", n_embd=36, n_head=4, n_layer=1, vocab_size=64)
    assert load_model_config(path, changes={"hidden_size": 48}).n_embd == 48
    path = written(tmp_path, model_type="gpt2", hidden_size=36, n_head=4, n_layer=1, vocab_size=64)
    assert load_model_config(path, changes={"n_embd": 48}).hidden_size == 48


@pytest.mark.parametrize("changes", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}}])
def test_the_rope_base_is_set_where_the_model_reads_it(changes):
    assert "rope_parameters" in json.loads(Path(DEMO).read_text()), (
        "the demo config must have rope_parameters, which override a flat rope_theta"
    )
    assert load_model_config(DEMO, changes=changes).rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hiden_layers": 8}, "num_hiden_layers is not a key of LlamaConfig; did you mean num_hidden_layers?"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers: must be int, got 'many' (str)"),
        ({"num_attention_heads": 5}, "num_attention_heads 5; nearest: 255 or 260"),
        ({"num_hidden_layers": 5000}, "allowed: at most 1,024 layers"),
        ({"model_type": "lama"}, "unknown model_type 'lama'; did you mean llama?"),
    ],
)
def test_changes_are_validated_like_the_json(changes, message):
    with pytest.raises(InputError) as caught:
        load_model_config(DEMO, changes=changes)
    (key, value), *_ = changes.items()
    assert any(message in problem for problem in caught.value.problems)
    assert all(problem.startswith(f"{DEMO} with {key} {json.dumps(value)}: ") for problem in caught.value.problems)


def test_changes_to_a_saved_folder_are_validated(tmp_path):
    GPT2Config(n_embd=48, n_head=4, n_layer=2, vocab_size=80).save_pretrained(tmp_path)
    changed = load_model_config(
        str(tmp_path), changes={"num_hidden_layers": 3, "vocab_size": "auto"}, vocabulary_size=70
    )
    assert (changed.n_layer, changed.n_embd, changed.vocab_size) == (3, 48, 128)
    with pytest.raises(InputError, match="n_layers is not a key of GPT2Config; did you mean n_layer"):
        load_model_config(str(tmp_path), changes={"n_layers": 3})
    assert load_model_config(str(tmp_path), vocabulary_size=70).vocab_size == 80, (
        "the vocabulary size in a saved config must be kept"
    )


@pytest.mark.parametrize(("ids", "rows"), [(64, 64), (300, 320), (8000, 8000), (32_000, 32_000), (50_257, 50_304)])
def test_an_auto_vocabulary_is_the_datas_padded(tmp_path, ids, rows):
    assert padded_vocabulary(ids) == rows
    shape = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    assert load_model_config(written(tmp_path, **shape), vocabulary_size=ids).vocab_size == rows
    assert load_model_config(written(tmp_path, **shape, vocab_size="auto"), vocabulary_size=ids).vocab_size == rows
    assert load_model_config(written(tmp_path, **shape, vocab_size=7), vocabulary_size=ids).vocab_size == 7, (
        "an explicit vocabulary size must be kept"
    )
    assert load_model_config(DEMO, changes={"vocab_size": "auto"}, vocabulary_size=ids).vocab_size == rows


def test_an_auto_vocabulary_without_data_is_the_files_or_the_classs(tmp_path):
    assert load_model_config(DEMO, changes={"vocab_size": "auto"}).vocab_size == 1024
    shape = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    assert load_model_config(written(tmp_path, **shape)).vocab_size == 32_000
    assert load_model_config(written(tmp_path, **shape, vocab_size="auto")).vocab_size == 32_000


def test_large_vocabularies_are_padded_to_128():
    assert [padded_vocabulary(ids) for ids in (16_383, 16_384, 16_385, 49_152)] == [16_384, 16_384, 16_512, 49_152]


def test_shape_changes_are_distinguished_from_other_changes():
    own = load_model_config(DEMO)
    assert shape_changes(own, load_model_config(DEMO, changes={"attention_dropout": 0.1, "rope_theta": 5e5})) is None
    fewer = shape_changes(own, load_model_config(DEMO, changes={"num_hidden_layers": 3}))
    assert fewer.startswith("9 tensors differ, starting with model.layers.3.") and fewer.endswith(", none")
    wider = shape_changes(own, load_model_config(DEMO, changes={"intermediate_size": 640}))
    assert "(576, 256), (640, 256)" in wider


def test_a_model_of_text_and_images_is_refused():
    with pytest.raises(InputError, match="is multimodal"):
        load_recipe_model_config(ModelSource(config=DEMO, model_type="gemma3"), None)
