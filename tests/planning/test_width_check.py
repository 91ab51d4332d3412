"""Tests for the coordinate check: activation changes don't depend on the width with muP, and grow with it
otherwise."""

import pytest

from pretrain.config import Optim
from pretrain.model.model_config import load_model_config
from pretrain_tools.planning.width_check import growth, width_verdict
from support.project import ROOT


@pytest.fixture
def config():
    config = load_model_config(str(ROOT / "model_configs" / "llama_demo.json"))
    config.tie_word_embeddings = False
    return config


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_changes_do_not_grow_with_the_width_under_mup(config, name):
    optim = Optim(name=name, learning_rate=1e-2, parametrization="mup", mup_base_width=64)
    assert width_verdict(optim, config, 1e-2) is None


def test_without_mup_they_grow(config):
    exponents = growth(Optim(learning_rate=1e-2), config, 1e-2)
    assert exponents["logits"] > 0.5
    assert "learning rates won't transfer across widths" in width_verdict(Optim(learning_rate=1e-2), config, 1e-2)
