"""Tests for FlashAttention 3, and for the report on the attention kernel of a GPU run."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from torch.nn import attention as torch_attention
from torch.nn.attention import varlen
from transformers import AutoConfig

from pretrain.config import WindowSpec
from pretrain.model import kernels
from pretrain.model.attention import ATTENTION_NAMES
from pretrain.model.kernels import kernels_used, prefer_flash_3
from pretrain.recipe import read_run_config
from pretrain.training import build
from support.flash_packages import flash_attn_varlen_func

PACKED, UNDIVIDED = WindowSpec(64, True), WindowSpec(64, False)
BF16, FP32 = torch.bfloat16, torch.float32
LLAMA = AutoConfig.for_model("llama", hidden_size=512, num_attention_heads=8)


@pytest.fixture
def gpu(monkeypatch):
    """Mocks an H100 on which only Triton is installed. Returns a dictionary that tests may change.

    The kernels are CPU stand-ins: torch's varlen, and FlashAttention 3 once it is activated.
    """
    here = {"capability": (9, 0), "modules": {"triton"}, "flash 3": None, "active": False}

    def activate(name):
        assert name == "FA3"
        if here["flash 3"] is None:
            raise RuntimeError("no such kernel\nand more")
        here["active"] = True

    def attend(query, key, value, starts, _, longest, __, *, window_size, enable_gqa):
        assert window_size == (-1, 0) and enable_gqa
        out = flash_attn_varlen_func(query, key, value, starts, starts, longest, longest, causal=True)
        return (here["flash 3"](out) if here["active"] else out).to(query.dtype)

    kernels._activate_flash_3.cache_clear()
    check = kernels._activate_flash_3
    monkeypatch.setattr(kernels, "_activate_flash_3", lambda dtype, width, device: check(dtype, width, "cpu"))
    monkeypatch.setattr(torch_attention, "activate_flash_attention_impl", activate)
    monkeypatch.setattr(torch_attention, "restore_flash_attention_impl", lambda _raise_warn: here.update(active=False))
    monkeypatch.setattr(varlen, "varlen_attn", attend)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: here["capability"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: module if module in here["modules"] else None)
    return here


@pytest.mark.parametrize(
    ("attention", "capability", "dtype", "window", "used"),
    [
        ("groundwork_sdpa", (9, 0), BF16, PACKED, "varlen (flash attention for packed documents)"),
        ("groundwork_sdpa", (7, 5), torch.float16, PACKED, "with a dense mask for packed documents"),
        ("groundwork_sdpa", (9, 0), FP32, PACKED, "with a dense mask for packed documents"),
        (
            "groundwork_sdpa",
            (9, 0),
            BF16,
            UNDIVIDED,
            "; not varlen: requires data.document_mask",
        ),
        (ATTENTION_NAMES["flash_attention_2"], (9, 0), BF16, PACKED, "flash_attention_2"),
        ("eager+mask", (9, 0), BF16, PACKED, f"eager+mask in torch {torch.__version__}"),
    ],
)
def test_kernels_in_use_are_reported(gpu, attention, capability, dtype, window, used):
    gpu |= {"capability": capability, "modules": {"flash_attn", "triton"}}
    here = {"dtype": dtype, "window": window, "model_config": LLAMA}
    assert used in kernels_used("auto", attention, **here)


@pytest.mark.parametrize(
    ("values", "capability", "reason"),
    [
        ({"head_dim": 320}, (9, 0), "does not support head dimension 320 on this GPU"),
        ({"head_dim": 256}, (9, 0), None),
        ({"head_dim": 200}, (8, 9), "does not support head dimension 200 on this GPU"),
        ({"hidden_size": 4096, "num_attention_heads": 8}, (9, 0), "does not support head dimension 512 on this GPU"),
        ({"attention_dropout": 0.1}, (9, 0), "does not support attention dropout, which this model uses"),
        (
            {"model_type": "deepseek_v3", "v_head_dim": 256},
            (9, 0),
            "does not support value head dimension 256 with key head dimension 192",
        ),
        ({"model_type": "deepseek_v3"}, (9, 0), None),
    ],
)
def test_models_that_fall_back_to_the_dense_mask_are_named(gpu, values, capability, reason):
    """The fallback of `sdpa` is predicted from the model's config."""
    gpu |= {"capability": capability}
    model_config = AutoConfig.for_model(values.pop("model_type", "llama"), **values)
    here = {"dtype": BF16, "window": PACKED, "model_config": model_config}
    told = kernels_used("auto", "groundwork_sdpa", **here)
    assert ("dense mask" in told) == bool(reason)
    assert (f"; not varlen: {reason}" in told) == bool(reason)


def test_auto_uses_flash_attention_3_if_results_match(gpu):
    here = {"dtype": BF16, "window": PACKED, "model_config": LLAMA}
    gpu["modules"] = {"flash_attn_interface", "triton"}
    gpu["flash 3"] = lambda out: out * 1.004  # within bf16 rounding
    assert "varlen (flash attention for packed documents)" in kernels_used("varlen", "groundwork_sdpa", **here)
    assert not gpu["active"], "an explicit choice must not be replaced"
    assert kernels_used("auto", "groundwork_sdpa", **here).endswith("with FlashAttention 3")
    assert gpu["active"]


def test_flash_attention_3_is_tried_with_the_models_heads(gpu):
    """FlashAttention 3 is tried with the model's head dimension, because a package may be built without support for
    it. 100 is padded to 104."""
    gpu["modules"] = {"flash_attn_interface"}
    tried = []
    gpu["flash 3"] = lambda out: tried.append(out.shape[-1]) or out
    model_config = AutoConfig.for_model("llama", head_dim=100)
    assert prefer_flash_3("auto", "groundwork_sdpa", dtype=BF16, window=PACKED, model_config=model_config) is None
    assert tried == [104]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"modules": {"triton"}}, "requires the package flash_attn_interface"),
        ({"capability": (8, 0)}, "torch only supports it on Hopper"),
        ({"flash 3": None}, "fails here (RuntimeError: no such kernel)"),
        ({"flash 3": lambda out: out.flip(0)}, "its results differ from torch's kernel by"),
    ],
    ids=["not installed", "A100", "another version", "wrong"],
)
def test_auto_keeps_torchs_kernel_if_flash_attention_3_does_not_work(gpu, change, reason):
    gpu |= {"modules": {"flash_attn_interface", "triton"}, "flash 3": lambda out: out} | change
    here = {"dtype": BF16, "window": PACKED, "model_config": LLAMA}
    assert reason in prefer_flash_3("auto", "groundwork_sdpa", **here)
    assert not gpu["active"]
    told = kernels_used("auto", "groundwork_sdpa", **here)
    assert "varlen (flash attention for packed documents)" in told and reason in told


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_every_rank_tries_flash_attention_3_before_it_builds_its_model(monkeypatch, recipe, device_type):
    class Tried(Exception):
        pass

    def tried(requested, attention, **here):
        assert (requested, attention, here["dtype"], here["model_config"]) == ("auto", "groundwork_sdpa", BF16, LLAMA)
        raise Tried

    monkeypatch.setattr(kernels, "prefer_flash_3", tried)
    plan = SimpleNamespace(model_config=LLAMA, attention="groundwork_sdpa+rows(Mixer)")
    strategy = SimpleNamespace(device=torch.device(device_type), precision="bf16")
    monkeypatch.setattr(build, "build_meta_model", lambda *_, **__: SimpleNamespace())
    config = read_run_config(recipe, [("attention", "auto")])
    with pytest.raises(Tried if device_type == "cuda" else AttributeError):
        build.build_training(config, plan, strategy, learning_rate=1e-3)


def test_auto_stays_with_torchs_kernel_if_results_must_be_deterministic(gpu, monkeypatch):
    gpu |= {"modules": {"flash_attn_interface"}, "flash 3": lambda out: out}
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    here = {"dtype": BF16, "window": PACKED, "model_config": LLAMA}
    assert "deterministic is true" in prefer_flash_3("auto", "groundwork_sdpa", **here)
    assert not gpu["active"]
