"""In MoE models, routers must be found, losses must match the formulas, and active parameters must be counted."""

import copy
import functools
import json
import math
import os
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from pretrain.config import Loss
from pretrain.errors import InputError
from pretrain.model import routers as routers_module
from pretrain.model.build import active_parameters, build_meta_model, count_parameters, flops_per_token
from pretrain.model.compile import checkpoint_activations, compile_model
from pretrain.model.loss import LanguageModelLoss
from pretrain.model.routers import RouterLosses, balancing_bias, inactive_parameters, router_losses, routers_of
from pretrain.training import experts as experts_module
from pretrain.training.experts import Experts
from support.project import run_script
from support.tiny_experts import COMMON, MODELS, tiny_config

SIGMOID = ("deepseek_v3", "glm4_moe", "dots1", "llama4_text", "lfm2_moe", "minimax_m2")
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
LOGITS_AT = {"llama4_text": 1, "jetmoe": 4}
BALANCE, Z_LOSS = 0.5, 0.1


def tiny_model(name: str, **more):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name, **more), attn_implementation="eager").train()
    with torch.no_grad():  # makes the expert loads unequal
        for router in routers_of(model):
            for parameter in router.module.parameters():
                parameter.normal_(std=0.5)
    return model


def followed(model, balance: float = BALANCE, z_loss: float = Z_LOSS, bias_rate: float = 0.0, **strategy) -> Experts:
    alone = {
        "device": torch.device("cpu"),
        "data_ranks": 1,
        "sequence_parts": 1,
        "data_rank": 0,
        "part": 0,
        "microbatches": 1,
        "sum": lambda tensor, by_layer: tensor,
        "state": dict,
    }
    return Experts(model, SimpleNamespace(**{**alone, **strategy}), RouterLosses(9, balance, z_loss, bias_rate))


def losses_of(loss: Loss, config) -> RouterLosses:
    return router_losses(loss, build_meta_model(config))


def batch(rows: int = 4):
    ids = torch.randint(0, 128, (rows, 25), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def step(experts: Experts, model, micro_batches: list, skipped=None) -> dict[str, torch.Tensor]:
    """Returns the gradients of one step without an update."""
    loss_of, micro_steps = LanguageModelLoss(model), len(micro_batches)
    experts.begin_step(micro_steps)
    for ids, targets in micro_batches:
        (loss_of(ids, targets)[0] / micro_steps).backward()
        experts.count()
    experts.end_step(skipped)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def probabilities(name: str, logits):
    scores = logits.sigmoid() if name in SIGMOID else logits.softmax(-1)
    return scores / scores.sum(-1, keepdim=True)


def recorded_logits(model, name: str) -> dict:
    """Returns {router index: its logits in the last forward pass}."""
    logits = {}

    def record(number):
        def hook(module, inputs, outputs):
            logits[number] = outputs[LOGITS_AT.get(name, 0)].flatten(0, -2).float()

        return hook

    for number, router in enumerate(routers_of(model)):
        logits[number] = None
        router.module.register_forward_hook(record(number))
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_gradients_match_the_loss_formula(name):
    """The balancing loss uses the fraction of tokens per expert in the previous step. For the first step, it is
    uniform."""
    model, twin = tiny_model(name), tiny_model(name)
    experts = followed(model)
    first = step(experts, model, [batch()])
    counts, sizes = experts.counts(), experts.sizes
    share = [torch.tensor(row, dtype=torch.float32) / batch()[0].numel() for row in counts]
    top_k = next(MODELS[name][key] for key in CHOSEN if key in MODELS[name])
    assert all(row.sum().item() == pytest.approx(top_k) and row.max() > 1.2 * top_k / 8 for row in share)
    second = step(experts, model, [batch()])

    logits, loss_of = recorded_logits(twin, name), LanguageModelLoss(twin)
    for found, shares in ((first, [torch.full((e,), top_k / e) for e in sizes]), (second, share)):
        loss = loss_of(*batch())[0]
        for z, f in zip(logits.values(), shares, strict=True):
            balance = z.shape[-1] * (f * probabilities(name, z).mean(0)).sum()
            loss = loss + (BALANCE * balance + Z_LOSS * z.logsumexp(-1).square().mean()) / len(shares)
        loss.backward()
        expected = {name: p.grad.clone() for name, p in twin.named_parameters() if p.grad is not None}
        twin.zero_grad()
        for key, gradient in expected.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-6)
    assert experts.counts() == counts


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_the_loss_has_the_same_scale_as_in_transformers(name):
    model = tiny_model(name, num_hidden_layers=2)  # qwen3_moe's first layer is dense
    logits = recorded_logits(model, name)
    experts = followed(model)
    step(experts, model, [batch()])
    expected = [load_balancing_loss_func((z,), num_experts=8, top_k=2).item() for z in logits.values()]
    assert experts.figures()["router_balance_loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_metrics_match_the_assignments():
    model = tiny_model("mixtral")
    logits, experts = recorded_logits(model, "mixtral"), followed(model)
    step(experts, model, [batch()])
    parts = [torch.bincount(z.topk(2).indices.flatten(), minlength=8) / (2 * len(z)) for z in logits.values()]
    entropies = [-sum(p * math.log(p) for p in part.tolist() if p) / math.log(8) for part in parts]
    figures = experts.figures()
    assert figures["expert_entropy"] == pytest.approx(sum(entropies) / 3, rel=1e-5)
    assert figures["expert_entropy_min"] == pytest.approx(min(entropies), rel=1e-5)
    assert figures["expert_load_max"] == pytest.approx(8 * max(part.max().item() for part in parts), rel=1e-5)
    assert figures["expert_load_min"] == pytest.approx(8 * min(part.min().item() for part in parts), rel=1e-5)
    z_losses = [z.logsumexp(-1).square().mean().item() for z in logits.values()]
    assert figures["router_z_loss"] == pytest.approx(sum(z_losses) / 3, rel=1e-5)


def test_micro_batches_and_ranks_do_not_change_the_step():
    (ids, targets), model = batch(4), tiny_model("mixtral")
    whole = followed(model)
    gradients = [step(whole, model, [(ids, targets)]) for _ in range(2)][1]
    twin = tiny_model("mixtral")
    parts = followed(twin)
    found = [step(parts, twin, [(ids[i : i + 1], targets[i : i + 1]) for i in range(4)]) for _ in range(2)][1]
    assert parts.counts() == whole.counts()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)
    for name, value in whole.figures().items():
        assert parts.figures()[name] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "mode", "checkpointing"),
    [("qwen3_moe", "none", "full"), ("qwen3_moe", "regional", "full"), ("deepseek_v3", "regional", "none")],
)
def test_compiled_and_recomputed_blocks_count_once_and_have_the_same_gradients(name, mode, checkpointing, monkeypatch):
    """DeepSeek's bias is updated outside the graph, between steps.

    The aot_eager backend is sufficient, because code generation doesn't matter here. `make test-strategies` also runs
    DeepSeek with inductor.
    """
    is_deepseek = name == "deepseek_v3"
    if not is_deepseek or os.environ.get("STRATEGIES") != "all":
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    layers = {"num_hidden_layers": 1 if is_deepseek else 2, "mlp_only_layers": [], "first_k_dense_replace": 0}
    model, twin = tiny_model(name, **layers), tiny_model(name, **layers)
    rate = 0.02 if is_deepseek else 0.0
    plain, experts = followed(model, bias_rate=rate), followed(twin, bias_rate=rate)
    checkpoint_activations(twin, checkpointing)
    torch._dynamo.utils.counters.clear()
    compile_model(twin, twin, mode)
    for _ in range(2):
        expected, found = step(plain, model, [batch()]), step(experts, twin, [batch()])
    assert experts.counts() == plain.counts()
    assert not torch._dynamo.utils.counters["graph_break"]
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


BIASED = ("deepseek_v3", "glm4_moe", "dots1", "ernie4_5_moe", "lfm2_moe", "minimax_m2")


@pytest.mark.parametrize("name", BIASED)
def test_a_bias_moves_against_the_load_of_the_step(name):
    model = tiny_model(name)
    experts = followed(model, balance=0.0, z_loss=0.0, bias_rate=0.02)
    biases = [balancing_bias(router).zero_() for router in routers_of(model)]
    step(experts, model, [batch(2), batch(2)])
    for bias, counts in zip(biases, experts.counts(), strict=True):
        expected = [0.02 * ((sum(counts) > 8 * n) - (sum(counts) < 8 * n)) for n in counts]
        assert torch.equal(bias, torch.tensor(expected)) and bias.any()
    kept = [bias.clone() for bias in biases]
    step(experts, model, [batch()], skipped=torch.tensor(1.0))
    assert all(map(torch.equal, biases, kept)), "a skipped step must not move the biases"
    assert experts.figures()["router_bias_max"] == pytest.approx(0.02)


@pytest.mark.parametrize("name", ["deepseek_v3", "ernie4_5_moe"])
def test_a_bias_balances_the_load_without_a_gradient(name):
    model = tiny_model(name)
    experts = followed(model, balance=0.0, z_loss=0.0, bias_rate=0.02)
    spread = []
    for _ in range(40):
        step(experts, model, [batch()])
        spread.append(experts.figures()["expert_entropy_min"])
    assert 1 - spread[-1] < (1 - spread[0]) / 3


def test_an_even_share_does_not_move_the_bias():
    model = tiny_model("deepseek_v3")
    experts = followed(model, bias_rate=0.5)
    even = 2**24 // 3
    experts._move_biases(torch.tensor([[float(even)] * 8, [even + 1.0, even - 1.0, *[float(even)] * 6]]), None)
    found = [balancing_bias(router).tolist() for router in routers_of(model)]
    assert found == [[0.0] * 8, [-0.5, 0.5, *[0.0] * 6]]


@pytest.mark.parametrize("name", ["ernie4_5_moe", "laguna", "afmoe"])
def test_a_bias_declared_as_a_parameter_becomes_a_buffer(name):
    """As a buffer, the bias is replicated under every strategy and not passed to the optimizer."""
    config = AutoConfig.for_model(name, **{**COMMON, **MODELS.get(name, {}), "num_hidden_layers": 3})
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    ours = build_meta_model(config)
    frozen = {name for name, parameter in theirs.named_parameters() if not parameter.requires_grad}
    assert frozen and frozen <= {name for name, _ in ours.named_buffers()}
    assert {name for name, _ in ours.named_parameters()} == {name for name, _ in theirs.named_parameters()} - frozen
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_evaluation_counts_nothing():
    model = tiny_model("mixtral")
    experts = followed(model)
    step(experts, model, [batch()])
    before = experts.counts()
    with torch.no_grad():
        LanguageModelLoss(model.eval())(*batch(2))
    experts.end_step()
    assert experts.counts() != before and experts.counts() is None


def test_a_restored_step_continues_identically():
    model, twin = tiny_model("mixtral"), tiny_model("mixtral")
    experts, resumed = followed(model), followed(twin)
    step(experts, model, [batch()])
    resumed.load(json.loads(json.dumps(experts.counts())))
    expected, found = step(experts, model, [batch(2)]), step(resumed, twin, [batch(2)])
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    resumed.load(None)
    assert not torch.equal(
        step(resumed, twin, [batch(2)])["model.layers.0.mlp.gate.weight"], expected["model.layers.0.mlp.gate.weight"]
    )


def test_an_fp16_loss_scale_also_scales_the_router_losses():
    model, twin = tiny_model("mixtral"), tiny_model("mixtral")
    plain, scaled = followed(model), followed(twin, state=lambda: {"scale": 1024.0})
    plain.load(counts := [[40, 0, 0, 0, 0, 0, 0, 8]] * 3)
    scaled.load(counts)
    plain.begin_step(1)
    scaled.begin_step(1)
    LanguageModelLoss(model)(*batch())[0].backward()
    (LanguageModelLoss(twin)(*batch())[0] * 1024.0).backward()
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other.grad / 1024.0, parameter.grad, rtol=1e-5, atol=1e-6)


def test_dead_experts_are_reported_once(monkeypatch):
    monkeypatch.setattr(experts_module, "IDLE_STEPS", 3)
    model = tiny_model("mixtral")
    with torch.no_grad():
        routers_of(model)[1].module.weight.zero_()  # equal logits always select the same two experts
    experts = followed(model, balance=0.0, z_loss=0.0)
    told = []
    for _ in range(5):
        step(experts, model, [batch(16)])
        told.append(experts.newly_dead())
    assert told[:2] == [None, None] and told[3:] == [None, None]
    assert "6 experts are dead" in told[2] and "new ones in model.layers.1.mlp.gate;" in told[2]
    with torch.no_grad():
        routers_of(model)[1].module.weight.normal_()
    step(experts, model, [batch(16)])
    assert experts.newly_dead() is None and experts.figures()["expert_load_min"] > 0
    with torch.no_grad():
        routers_of(model)[1].module.weight.zero_()
    for _ in range(3):
        assert experts.newly_dead() is None
        step(experts, model, [batch(16)])
    assert "6 experts are dead" in experts.newly_dead()


@pytest.mark.parametrize("name", MODELS)
def test_active_parameters_match_a_model_with_only_the_selected_experts(name):
    """The smaller model also has fewer router rows, which are counted separately."""
    key = next(key for key in EXPERTS if key in MODELS[name])
    chosen = next(MODELS[name][key] for key in CHOSEN if key in MODELS[name])
    whole, small = tiny_model(name), tiny_model(name, **{key: chosen, "topk_group": 1, "n_group": 1})
    row = COMMON["hidden_size"] + (1 if name in ("gpt_oss", "ernie4_5_moe") else 0)  # router bias
    rows = (8 - chosen) * row * len(routers_of(whole))
    inactive = inactive_parameters(whole)
    assert inactive > 0
    assert whole.num_parameters() - inactive == small.num_parameters() + rows


def test_all_parameters_of_a_dense_model_are_active():
    config = AutoConfig.for_model("qwen3", **{**COMMON, "head_dim": 16})
    assert active_parameters(config) == count_parameters(config)
    more = flops_per_token(config, 64) - flops_per_token(config, 32)
    assert more == 12 * 3 * (4 * 16) * 32, "attention uses heads x head size, not the hidden size"
    config = tiny_config("deepseek_v3")
    more = flops_per_token(config, 64) - flops_per_token(config, 32)
    assert more == 6 * 3 * 4 * ((8 + 8) + 8) * 32, "keys and values have different sizes"


def test_experts_compute_in_the_precision_of_the_run(monkeypatch):
    seen = []

    def spied(experts, hidden_states, *arguments):
        seen.append((experts.gate_up_proj.dtype, experts.down_proj.dtype, hidden_states.dtype))
        return original(experts, hidden_states, *arguments)

    original = routers_module.grouped_experts
    monkeypatch.setattr(routers_module, "grouped_experts", spied)
    model = tiny_model("mixtral")
    exact = model(*batch()[:1]).logits
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(*batch()[:1]).logits
    assert set(seen[:3]) == {(torch.float32,) * 3} and set(seen[3:]) == {(torch.bfloat16,) * 3}
    assert 0 < (rounded - exact).abs().max() < 0.05 * exact.abs().max()
    rounded.float().mean().backward()
    assert model.model.layers[0].mlp.experts.gate_up_proj.grad.dtype == torch.float32


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_compute_the_same_as_those_of_transformers(name):
    """gpt_oss has biases, so it runs transformers' own function."""
    found = []
    for function in (routers_module.grouped_experts, routers_module.grouped_mm_experts_forward):
        model = tiny_model(name)
        experts = next(module for module in model.modules() if hasattr(module, "down_proj"))
        torch.manual_seed(0)
        hidden = torch.randn(64, COMMON["hidden_size"], requires_grad=True)
        weights, chosen = torch.rand(64, 8).softmax(-1).requires_grad_().topk(2)
        weights.retain_grad()
        out = function(experts, hidden, chosen, weights)
        out.square().mean().backward()
        found.append((out, experts.gate_up_proj.grad, experts.down_proj.grad, weights.grad, hidden.grad))
    *exact, hidden_grads = zip(*found, strict=True)
    assert all(torch.equal(own, theirs) for own, theirs in exact)
    torch.testing.assert_close(*hidden_grads)


def test_a_recipes_coefficient_overrides_the_models():
    assert losses_of(Loss(), tiny_config("olmoe", router_aux_loss_coef=0.03)) == RouterLosses(3, 0.03, 0.0)
    assert losses_of(Loss(router_balance=0.0, router_z_loss=0.1), tiny_config("olmoe")) == RouterLosses(3, 0, 0.1)
    assert losses_of(Loss(), tiny_config("mixtral", router_z_loss_coef=0.002)).z_loss == 0.002
    assert losses_of(Loss(), AutoConfig.for_model("llama", **COMMON)) == RouterLosses()
    by_bias = Loss(router_bias_rate=0.001)
    assert losses_of(by_bias, tiny_config("deepseek_v3")) == RouterLosses(2, 0.0, 0.0, 0.001)
    assert losses_of(by_bias, tiny_config("ernie4_5_moe")).balance == tiny_config("ernie4_5_moe").router_aux_loss_coef


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "llama"])
def test_a_bias_rate_is_rejected_for_a_model_without_a_bias(name):
    config = tiny_config(name) if name in MODELS else AutoConfig.for_model(name, **COMMON)
    with pytest.raises(InputError, match=rf"loss.router_bias_rate: .*{name} .*has no router bias"):
        losses_of(Loss(router_bias_rate=0.001), config)


@pytest.mark.parametrize("setting", ["router_balance", "router_z_loss"])
def test_a_coefficient_is_rejected_for_a_model_without_routers(setting):
    with pytest.raises(InputError, match=r"llama declares no routers, .*; omit both"):
        losses_of(Loss(**{setting: 0.01}), AutoConfig.for_model("llama", **COMMON))
    assert losses_of(Loss(**{setting: 0}), AutoConfig.for_model("llama", **COMMON)) == RouterLosses()


def test_a_model_without_a_coefficient_needs_one_in_the_recipe(recipe, tmp_path):
    keys = {key: value for key, value in {**COMMON, **MODELS["deepseek_v3"]}.items() if key != "pad_token_id"}
    (tmp_path / "moe.json").write_text(json.dumps({**keys, "model_type": "deepseek_v3", "vocab_size": 512}))
    recipe.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), "model": str(tmp_path / "moe.json")}))
    refused = run_script("train.py", "--config", recipe, "--check", check=False)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    remedy = "set loss.router_balance: 0.001, or 0 to train without it"
    assert remedy in refused.stderr + refused.stdout
    accepted = run_script("train.py", "--config", recipe, "--check", "--loss.router_balance", "0.002")
    assert "2, balancing loss x 0.002, z-loss x 0" in accepted.stdout
    assert "active of" in accepted.stdout and "per active parameter" in accepted.stdout


def test_experts_whose_routers_are_not_declared_are_not_silently_unbalanced(monkeypatch):
    """transformers 5.17 doesn't declare those of deepseek_v3."""
    config = tiny_config("deepseek_v3")
    monkeypatch.setattr(routers_module, "_declared", lambda model: [])
    for given in ({}, {"router_balance": 0.01}):
        with pytest.raises(InputError, match=r"deepseek_v3 declares no routers.* newer transformers"):
            losses_of(Loss(**given), config)
    assert losses_of(Loss(router_balance=0), config) == RouterLosses()
    assert losses_of(Loss(), AutoConfig.for_model("gpt2")) == RouterLosses()


def test_copies_of_a_model_keep_their_routers():
    model = tiny_model("mixtral")
    followed(model)
    assert [router.name for router in routers_of(copy.deepcopy(model))] == [r.name for r in routers_of(model)]
