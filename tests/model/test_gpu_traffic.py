"""Tests for a compiled layer's memory traffic and the bytes it saves for backward, compared with the theoretical
minimum.

Traffic excludes matmuls and attention. No GPU is needed; see support/traffic_on_fake_cuda.py. PLANS=all tests every
plan, and TRAFFIC=1 prints every kernel.
"""

import importlib.util
import itertools
import os
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoConfig

from pretrain.config import WindowSpec
from pretrain_tools.planning.activations import ForwardPass, trace_activations
from pretrain_tools.planning.memory import sliced
from support.fake_cuda import outcomes_of
from support.project import ROOT
from support.traffic_setups import SETUPS, TP_RANKS, Setup

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@dataclass(frozen=True)
class Bar:
    """Upper limits for a setup, relative to the minimum."""

    traffic: float
    kept: float
    graphs: int = 1
    """Number of graphs that two layers are compiled into, per direction."""


BARS = {
    "gpt2_124m single": Bar(1.52, 1.01),
    "gpt2_124m ddp": Bar(1.52, 1.01),
    "gpt2_124m fsdp2": Bar(1.52, 1.00),
    "llama_125m single": Bar(1.20, 1.02),
    "llama_125m ddp": Bar(1.20, 1.02),
    "llama_125m fsdp2": Bar(1.19, 1.00),
    "llama_125m tp": Bar(1.29, 1.01),
    "llama_1b single": Bar(1.24, 1.09),
    "llama_1b ddp": Bar(1.24, 1.09),
    "llama_1b fsdp2": Bar(1.18, 1.00),
    "llama_1b tp": Bar(1.27, 1.04),
    "qwen3_0.6b single": Bar(1.39, 1.04),
    "qwen3_0.6b ddp": Bar(1.39, 1.04),
    "qwen3_0.6b fsdp2": Bar(1.26, 1.00),
    "qwen3_0.6b tp": Bar(1.33, 1.02),
    "qwen3_moe_500m single": Bar(1.34, 1.08),
    "qwen3_moe_500m ddp": Bar(1.34, 1.08),
    "qwen3_moe_500m fsdp2": Bar(1.19, 1.01),
    "qwen3_moe_500m tp": Bar(1.22, 1.04, graphs=2),
    "nanochat_d12 single": Bar(1.13, 1.02),
    "nanochat_d12 ddp": Bar(1.13, 1.02),
    "nanochat_d12 fsdp2": Bar(1.12, 1.00),
}
"""{model strategy: measured}. If a layer improves, lower the limit here and on the page that shows it."""
SLACK = 0.01


def least(setup: Setup) -> tuple[float, float]:
    """Returns the minimum (bytes moved, bytes saved) for a micro-batch, with a bf16 residual stream.

    There is one kernel between two matmuls, or between a matmul and attention. It reads its inputs once and writes its
    outputs once, in bf16. Each matmul's input is saved for the weight gradient. fp32 values per row (norm statistics,
    logsumexp) are ignored.
    """
    size = sizes(setup)
    d, q, k, m, rows, kind, is_gated = size.d, size.q, size.k, size.m, size.rows, size.kind, size.is_gated

    # Forward: norm (x; out), norm of x + attention's output (x, o; h, out), x + MLP's output (h, mlp; out).
    # Backward, per norm: gradients of its outputs, its input and the stream's gradient; the stream's new gradient.
    readers_of_attention_input = 1 if kind == "gpt2" else 3
    readers_of_mlp_input = 2 if kind in ("llama", "qwen3") else 1
    moved = 2 * d * (2 + 4 + 3) + 2 * d * (readers_of_attention_input + 3 + readers_of_mlp_input + 3)
    kept = 2 * d * 4  # x, norm(x), h, norm(h)
    # Activation function of gate and up, or of one input. Backward reads and writes the same tensors and the gradient.
    moved += rows * 2 * m * ((3 + 5) if is_gated else (2 + 3))
    kept += rows * 2 * m * (3 if is_gated else 2)
    # Rotation of query and key, forward and backward. With QK norms, their inputs are read once more.
    if kind != "gpt2":
        moved += 2 * (q + k) * (2 + 2)
    if kind in ("qwen3", "qwen3_moe", "nanochat"):
        moved += 2 * (q + k)
        kept += 2 * (q + k)
    kept += 2 * (2 * q + 2 * k) + 4 * q // size.head_width
    if rows > 1:
        # Forward: tokens copied to expert rows (h; rows), expert outputs summed (rows instead of the MLP's output).
        # Backward: gradients of the rows and their weights (rows), and of the input (rows instead of one gradient).
        moved += 2 * d * (1 + rows) + 2 * d * (rows - 1) + 2 * d * (1 + 2 * rows) + 2 * d * (rows - 1)
        kept += 2 * d * 2 * rows
    copied = 0 if setup.strategy in ("fsdp2", "tp") else 6 * size.elements
    return setup.tokens * moved + copied, setup.tokens * kept


def causes(setup: Setup) -> dict[str, float]:
    """Returns {row on the page: bytes per token that a layer moves in addition to the minimum}."""
    size = sizes(setup)
    d, q, k, kind = size.d, size.q, size.k, size.kind
    in_fp32, is_tp, is_moe = setup.strategy in ("single", "ddp"), setup.strategy == "tp", size.rows > 1
    # x + attention's output isn't written, but both are read twice instead.
    found = {"residual stream": 2 * d}
    # Inputs of the norms, and all gradients of their outputs.
    tensors = {"gpt2": 4, "nanochat": 0}.get(kind, (3 if is_moe else 2) if is_tp else 7)
    found["norm weights"] = 2 * d * tensors
    if kind == "gpt2":
        found |= {"biases": 2 * size.m + 2 * d * 4, "concatenation": 2 * 6 * d}
    else:
        found["RoPE tables"] = (2 if kind == "nanochat" else 4) * 2 * 2 * size.head_width
    if kind == "nanochat":
        found["Q and K"] = 2 * (q + k) * 2
    elif kind.startswith("qwen3"):
        # Inductor computes the norm's weight gradient in the same kernel only for at least 5 Mi elements.
        found["Q and K"] = sum(
            width * (2 * (4 if in_fp32 else 2) + (0 if setup.tokens * width >= 5 * 2**20 else 2)) for width in (q, k)
        )
    if is_moe:
        found |= {"experts": 2 * d * 3, "routing": 26 * size.experts + 92 * size.rows}
    if is_tp:
        found["sums"] = 2 * d * 4
    if in_fp32:
        found["weight gradients"] = 6 * size.elements / setup.tokens
        if is_moe:
            # The experts' input gradient is in fp32, the norm is computed twice, and weights are written transposed.
            found["expert copies"] = 2 * d * 4 + 2 * 3 * d * size.m * size.experts / setup.tokens
    return {cause: moved for cause, moved in found.items() if moved}


@dataclass(frozen=True)
class Sizes:
    """Sizes of one rank's share of a layer."""

    kind: str
    """The model type."""
    d: int
    """Hidden size."""
    head_width: int
    q: int
    """Width of all queries."""
    k: int
    """Width of all keys."""
    m: int
    """Width of the MLP, or of an expert."""
    rows: int
    """Number of experts per token."""
    experts: int

    @property
    def is_gated(self) -> bool:
        return self.kind not in ("gpt2", "nanochat")

    @property
    def elements(self) -> int:
        """Returns the number of elements in the layer's matrices, which autocast converts from fp32 to bf16."""
        return 2 * self.d * (self.q + self.k) + (3 if self.is_gated else 2) * self.d * self.m * self.experts


def sizes(setup: Setup) -> Sizes:
    config = setup.model_config()
    d = setup.width
    heads = config.get("num_attention_heads") or config["n_head"]
    key_heads = config.get("num_key_value_heads") or heads
    head_width = config.get("head_dim") or d // heads
    m = config.get("moe_intermediate_size") or config.get("intermediate_size") or 4 * d
    shares = TP_RANKS if setup.strategy == "tp" else 1
    return Sizes(
        kind=config["model_type"],
        d=d,
        head_width=head_width,
        q=heads // shares * head_width,
        k=key_heads // shares * head_width,
        m=m // shares,
        rows=config.get("num_experts_per_tok", 1),
        experts=config.get("num_experts", 1),
    )


@pytest.fixture(scope="module")
def outcomes():
    return outcomes_of("support.traffic_on_fake_cuda")


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_traffic_and_saved_bytes_are_within_the_limits(outcomes, setup):
    """All layers share one graph per direction."""
    bar = BARS[setup.name]
    outcome = outcomes[setup.name]
    assert outcome.error is None, outcome.error
    assert sorted(outcome.result["graphs"]) == ["backward"] * bar.graphs + ["forward"] * bar.graphs
    moved, kept = least(setup)
    found = Bar(outcome.result["bytes"] / bar.graphs / moved, outcome.result["kept"] / bar.graphs / kept, bar.graphs)
    print(f'"{setup.name}": {found}', outcome.result["kernels"])
    assert found.traffic <= bar.traffic + SLACK and found.kept <= bar.kept + SLACK, found
    gap = (outcome.result["bytes"] / bar.graphs - moved) / setup.tokens
    assert sum(causes(setup).values()) == pytest.approx(gap, rel=0.03), causes(setup)


PLANNED = [setup for setup in SETUPS if setup.model == "llama_1b" or os.environ.get("PLANS") == "all"]
"""Setups whose memory plan is tested. PLANS=all tests all of them."""


@pytest.mark.parametrize("setup", PLANNED, ids=lambda setup: setup.name)
def test_a_plan_predicts_the_bytes_that_a_compiled_layer_saves(outcomes, setup):
    model_config = AutoConfig.for_model(**setup.model_config(), num_hidden_layers=2)
    if setup.strategy == "tp":
        model_config = sliced(model_config, TP_RANKS, splits_experts=True)
    in_fp32 = setup.strategy in ("single", "ddp")
    dtype = torch.float32 if in_fp32 else torch.bfloat16
    call = ForwardPass(WindowSpec(setup.length, True), dtype, autocast=in_fp32, compiled=True)
    planned = trace_activations(model_config, call).per_layer(setup.sequences)
    kept = outcomes[setup.name].result["kept"] / BARS[setup.name].graphs
    assert planned == pytest.approx(kept, rel=0.05)


@pytest.mark.parametrize(("page", "kind"), [("performance", "traffic"), ("measurements_memory", "kept")])
def test_the_pages_show_the_limits_and_explain_large_ones(page, kind):
    _, _, table = (ROOT / f"docs/{page}.md").read_text().partition("| model | single, ddp | fsdp2 | tp |")
    shown = {}
    for line in table.partition("\n\n")[0].splitlines()[2:]:
        model, single, fsdp2, tp, *reason = (cell.strip() for cell in line.strip("|").split("|"))
        ratios = {"single": single, "ddp": single, "fsdp2": fsdp2, "tp": tp}
        shown |= {f"{model} {strategy}": float(ratio) for strategy, ratio in ratios.items() if ratio}
        assert max(map(float, filter(None, ratios.values()))) <= 1.1 or any(reason), f"{model}: add a reason"
    assert shown == {name: getattr(bar, kind) for name, bar in BARS.items()}


def test_the_page_explains_the_differences_by_cause():
    """A row's shares are for fsdp2 if the row is about fsdp2, else for its first strategy."""
    _, _, table = (ROOT / "docs/performance.md").read_text().partition("| cause | strategies |")
    models, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.partition("\n\n")[0].splitlines()
    )
    shown = {setup.name: {} for setup in SETUPS}
    for cause, strategies, *cells in rows:
        names = strategies.split(", ")
        for strategy, (model, cell) in itertools.product(names, zip(filter(None, models), cells, strict=True)):
            if not cell or f"{model} {strategy}" not in BARS:
                continue
            setup = next(
                setup for setup in SETUPS if setup.name == f"{model} {'fsdp2' if 'fsdp2' in names else names[0]}"
            )
            found, minimum = causes(setup)[cause], least(setup)[0] / setup.tokens
            assert cell == f"{found:,.0f} ({found / minimum:.1%})", f"{cause}, {model} {strategy}"
            shown[f"{model} {strategy}"][cause] = round(found)
    for setup in SETUPS:
        assert shown[setup.name] == {cause: round(size) for cause, size in causes(setup).items()}, setup.name
