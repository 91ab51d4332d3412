import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from pretrain.model.loss import (
    LOSS_BACKENDS,
    LanguageModelLoss,
    choose_loss,
    next_token_loss,
    recording_losses,
    tokens_of_chunk,
)
from pretrain.model.own_code import register_all

register_all()

B, T, D, V = 2, 25, 16, 53
PROJECTING = (
    "deepone gpt2 gpt_neox llama mistral olmo olmo2 olmo3 phi3 qwen2 qwen3 smollm3 stablelm starcoder2".split()  # noqa: SIM905
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Limits torch to one thread, because synchronizing threads is slow for operations this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def inputs(with_bias=False, masked=True):
    torch.manual_seed(0)
    hidden_BTD = torch.randn(B, T, D, requires_grad=True)
    weight_VD = torch.randn(V, D, requires_grad=True)
    bias_V = torch.randn(V, requires_grad=True) if with_bias else None
    targets_BT = torch.randint(0, V, (B, T))
    if masked:
        targets_BT[0, :7] = -100
    return hidden_BTD, weight_VD, bias_V, targets_BT


def plain_loss(hidden_BTD, weight_VD, bias_V, targets_BT, z_loss=0.0, cap=None):
    logits_NV = F.linear(hidden_BTD, weight_VD, bias_V).flatten(0, 1)
    logits_NV = cap * torch.tanh(logits_NV / cap) if cap else logits_NV
    targets_N = targets_BT.flatten()
    cross_entropy = F.cross_entropy(logits_NV, targets_N)
    return cross_entropy + z_loss * logits_NV[targets_N != -100].logsumexp(-1).square().mean(), cross_entropy


def gradients(loss, *tensors):
    return torch.autograd.grad(loss, [tensor for tensor in tensors if tensor is not None])


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize(
    ("backend", "chunk_tokens"),
    [("chunked", 1), ("chunked", 16), ("chunked", 1000), ("chunked", None), ("chunked_compiled", 16)],
)
def test_chunked_equals_plain_with_gradients(with_bias, z_loss, backend, chunk_tokens):
    hidden, weight, bias, targets = inputs(with_bias)
    loss, cross_entropy = next_token_loss(
        hidden, weight, targets, head_bias=bias, z_loss=z_loss, chunk_tokens=chunk_tokens, backend=backend
    )
    wanted, wanted_cross_entropy = plain_loss(hidden, weight, bias, targets, z_loss)
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cross_entropy, wanted_cross_entropy, rtol=1e-6, atol=1e-6)
    assert not cross_entropy.requires_grad
    # A factor other than 1 detects a backward pass that ignores the incoming gradient.
    for got, want in zip(
        gradients(3 * loss, hidden, weight, bias), gradients(3 * wanted, hidden, weight, bias), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("backend", LOSS_BACKENDS)
def test_capped_logits_match_the_formula_in_fp64(backend, z_loss):
    """The cap is below half of the largest logits, so that tanh is far from linear."""
    hidden, weight, bias, targets = inputs(with_bias=True)
    loss, cross_entropy = next_token_loss(
        hidden, weight, targets, head_bias=bias, z_loss=z_loss, cap=4.0, chunk_tokens=16, backend=backend
    )
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    wanted, wanted_cross_entropy = plain_loss(*exact, targets, z_loss, cap=4.0)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cross_entropy.double(), wanted_cross_entropy.detach(), rtol=1e-6, atol=1e-6)
    for got, want in zip(gradients(3 * loss, hidden, weight, bias), gradients(3 * wanted, *exact), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", LOSS_BACKENDS)
def test_every_backend_gives_the_same_loss(backend):
    hidden, weight, bias, targets = inputs()
    loss, cross_entropy = next_token_loss(hidden, weight, targets, backend=backend)
    wanted, _ = plain_loss(hidden, weight, bias, targets)
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cross_entropy, wanted, rtol=1e-6, atol=1e-6)
    for got, want in zip(gradients(loss, hidden, weight), gradients(wanted, hidden, weight), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", LOSS_BACKENDS)
def test_every_backend_records_the_loss_of_each_token(backend):
    hidden, weight, bias, targets = inputs()
    recorded = []
    with torch.no_grad():
        _, cross_entropy = next_token_loss(hidden, weight, targets, head_bias=bias, backend=backend, record=recorded)
    (losses,) = recorded
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    counts = targets.flatten() != -100
    wanted = F.cross_entropy(logits, targets.flatten().clamp(min=0), reduction="none")
    torch.testing.assert_close(losses[counts], wanted[counts], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses[counts].mean(), cross_entropy, rtol=1e-5, atol=1e-5)


def test_loss_by_hand():
    """The two tokens have losses of -ln 3/4 and -ln 1/2."""
    hidden = torch.tensor([[[1.0], [0.0]]])
    weight = torch.tensor([[0.0], [1.0986123]])
    loss, _ = next_token_loss(hidden, weight, torch.tensor([[1, 0]]))
    assert loss.item() == pytest.approx((0.2876821 + 0.6931472) / 2, abs=1e-6)


def test_all_targets_masked_is_zero_not_nan():
    hidden, weight, _, targets = inputs()
    loss, cross_entropy = next_token_loss(hidden, weight, torch.full_like(targets, -100), z_loss=0.1)
    assert loss.item() == 0.0 == cross_entropy.item()
    assert all(g.abs().max() == 0 for g in gradients(loss, hidden, weight))


@pytest.mark.parametrize("backend", ["chunked", "chunked_compiled"])
def test_softmax_is_fp32_under_autocast_and_gradients_follow_the_parameters(backend):
    hidden, weight, _, targets = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, cross_entropy = next_token_loss(hidden, weight, targets, chunk_tokens=10, backend=backend)
    assert loss.dtype == cross_entropy.dtype == torch.float32
    wanted, _ = plain_loss(hidden, weight, None, targets)
    # bf16 has 8 bits, so the relative error of logits of size 4 sqrt(16) is up to 2^-9. The error of the mean is far
    # smaller.
    assert abs(loss.item() - wanted.item()) < 0.02
    for got, want in zip(gradients(loss, hidden, weight), gradients(wanted, hidden, weight), strict=True):
        assert got.dtype == torch.float32
        assert (got - want).norm() < 0.02 * want.norm()


def test_weight_gradient_over_many_chunks_is_summed_in_fp32():
    """A bf16 sum of 1,000 equal terms would stop growing at 256 times a term."""
    hidden = torch.ones(1, 1000, D)
    weight = torch.zeros(V, D, requires_grad=True)
    targets = torch.zeros(1, 1000, dtype=torch.long)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = next_token_loss(hidden, weight, targets, chunk_tokens=1)
    (grad,) = gradients(loss, weight)
    assert grad[0, 0].item() == pytest.approx(1 / V - 1, rel=2**-8)


def test_no_gradient_is_computed_if_none_is_needed():
    hidden, weight, _, targets = inputs()
    with torch.no_grad():
        loss, _ = next_token_loss(hidden, weight, targets)
    assert not loss.requires_grad
    loss, _ = next_token_loss(hidden, weight.detach(), targets)
    assert gradients(loss, hidden)[0].shape == (B, T, D)


def test_second_backward_over_a_kept_graph_is_right():
    # Zero-bubble pipelines run the backward pass twice, once for input gradients and once for weight gradients.
    hidden, weight, _, targets = inputs()
    loss, _ = next_token_loss(hidden, weight, targets)
    first = torch.autograd.grad(2 * loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    for twice, once in zip(first, second, strict=True):
        assert torch.equal(twice, 2 * once)
        assert once.grad_fn is None  # otherwise, the sum over microbatches would keep all their activations


def test_the_loss_compiles_as_one_graph_and_equals_eager():
    hidden, weight, _, targets = inputs()

    def double(hidden, weight, targets):
        loss, cross_entropy = next_token_loss(hidden * 2, weight, targets, z_loss=0.01, chunk_tokens=16)
        return 2 * loss, cross_entropy

    eager, eager_cross_entropy = double(hidden, weight, targets)
    compiled, cross_entropy = torch.compile(double, fullgraph=True, backend="aot_eager")(hidden, weight, targets)
    torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cross_entropy, eager_cross_entropy, rtol=1e-6, atol=1e-6)
    for got, want in zip(gradients(compiled, hidden, weight), gradients(eager, hidden, weight), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_custom_op_keeps_torchs_rules():
    hidden, weight, _, targets = inputs()
    for cap in (None, 4.0):
        numbers = (0.1, cap, 8, torch.float32, False, [True, True, False])
        arguments = (hidden.detach()[0], weight.detach(), None, targets[0], *numbers)
        torch.library.opcheck(torch.ops.groundwork.chunked_loss, arguments)


def test_the_loss_is_compiled_once_for_training_and_validation():
    hidden, weight, _, targets = inputs()
    torch.compiler.reset()
    next_token_loss(hidden, weight, targets, backend="chunked_compiled")[0].backward()
    with torch.no_grad(), torch.compiler.set_stance("fail_on_recompile"):
        loss, _ = next_token_loss(hidden, weight, targets, backend="chunked_compiled")
    torch.testing.assert_close(loss, plain_loss(hidden, weight, None, targets)[0], rtol=1e-6, atol=1e-6)


def test_chunks_grow_with_a_gpus_memory():
    """With GPT-2's vocabulary and 512 MB chunks, the head's gradient is read and written 25 times for 64 x 1,024
    tokens."""
    sizes = [tokens_of_chunk(50_304, "cuda", gibibytes * 2**30) for gibibytes in (4, 24, 79, 178)]
    assert sizes == [1_280, 3_200, 10_496, 10_624]
    assert tokens_of_chunk(50_304, "cpu", 1e12) == 320 and tokens_of_chunk(10**7, "cuda", 4e9) == 256


@pytest.mark.parametrize(
    ("requested", "device_type", "compile_mode", "logits", "chosen"),
    [
        ("auto", "cpu", "regional", 2**20, "chunked"),
        ("auto", "cpu", "full", 2**20, "logits"),
        ("auto", "cpu", "full", 2**20 + 1, "chunked"),
        ("auto", "cpu", "full", None, "chunked"),
        ("auto", "cuda", "regional", 2**20, "chunked_compiled"),
        ("auto", "cuda", "none", None, "chunked"),
        ("logits", "cuda", "full", None, "logits"),
    ],
)
def test_auto_compiles_the_loss_on_a_gpu_and_few_logits_with_the_model(
    requested, device_type, compile_mode, logits, chosen
):
    found = choose_loss(requested, device_type=device_type, compile_mode=compile_mode, logits=logits)
    assert found == chosen


PEAK_MEMORY_SCRIPT = """
import torch
from pretrain.model.loss import next_token_loss
def kilobytes(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))
for backend in ("chunked", "logits"):
    hidden = torch.randn(1, 768, 16, requires_grad=True)
    weight = torch.randn(131072, 16, requires_grad=True)
    before = kilobytes("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = next_token_loss(hidden, weight, torch.randint(0, 131072, (1, 768)), backend=backend)
    loss.backward()
    print(kilobytes("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak memory from /proc")
def test_peak_memory_with_a_large_vocabulary_is_under_two_fifths_of_plain_logits():
    run = subprocess.run([sys.executable, "-c", PEAK_MEMORY_SCRIPT], capture_output=True, text=True, check=True)
    chunked, logits = map(int, run.stdout.split())
    assert chunked < 0.4 * logits, run.stdout


def tiny_model(model_type, **changes):
    sizes = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": V}
    config = AutoConfig.for_model(model_type, **sizes)
    small = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    for name, value in {**small, **tokens, **changes}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def hf_loss_and_gradients(model, input_ids, targets):
    # transformers shifts labels: position t is compared with label t + 1
    labels = torch.cat([torch.zeros_like(targets[:, :1]), targets], dim=1)
    logits = model(input_ids=input_ids).logits.float()
    padded = torch.cat([logits, logits[:, -1:]], dim=1)
    loss = model.loss_function(logits=padded, labels=labels, vocab_size=model.config.vocab_size)
    loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), wanted


@pytest.mark.parametrize("model_type", [*PROJECTING, "gemma2", "nanochat", "cohere", "granite"])
def test_model_loss_is_the_models_own(model_type):
    # These factors differ clearly from 1 and from the logits' size, so that ignoring them changes the loss.
    changes = {"final_logit_softcapping": 0.5, "logit_scale": 3.0, "logits_scaling": 5.0}
    capped = {"gemma2", "nanochat"}
    model = tiny_model(model_type, **changes)
    input_ids, targets = torch.randint(0, V, (2, 12)), torch.randint(0, V, (2, 12))
    wanted, wanted_gradients = hf_loss_and_gradients(model, input_ids, targets)
    module = LanguageModelLoss(model)
    assert module.from_hidden_states == (model_type in {*PROJECTING, *capped})
    assert (module.cap is not None) == (model_type in capped)
    loss, _ = module(input_ids, targets)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted_gradients[name], rtol=1e-4, atol=1e-5, msg=name)


def test_token_losses_are_recorded_without_gradients_and_only_inside_the_context():
    module = LanguageModelLoss(tiny_model("llama"))
    batch = torch.randint(0, V, (2, 12)), torch.randint(0, V, (2, 12))
    with recording_losses(torch.nn.Sequential(module)) as recorded:
        module(*batch)
        assert recorded == []
        with torch.no_grad():
            _, cross_entropy = module(*batch)
    with torch.no_grad():
        module(*batch)
    (losses,) = recorded
    torch.testing.assert_close(losses.mean(), cross_entropy)


@pytest.mark.parametrize("tied", [False, True])
def test_module_with_activation_checkpointing_equals_without(tied):
    input_ids, targets = torch.randint(0, V, (2, 12)), torch.randint(0, V, (2, 12))
    results = []
    for checkpointing in (False, True):
        model = tiny_model("llama", tie_word_embeddings=tied).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        loss, _ = LanguageModelLoss(model, z_loss=1e-3)(input_ids, targets)
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


def test_module_keeps_names_config_and_blocks_and_compiles():
    model = tiny_model("llama")
    module = LanguageModelLoss(model)
    assert [n for n, _ in module.named_parameters()] == [f"causal_lm.{n}" for n, _ in model.named_parameters()]
    assert module.config is model.config
    assert "LlamaDecoderLayer" in module._no_split_modules
    input_ids, targets = torch.randint(0, V, (2, 12)), torch.randint(0, V, (2, 12))
    compiled = torch.compile(module, backend="aot_eager")(input_ids, targets)
    torch.testing.assert_close(compiled, module(input_ids, targets), rtol=1e-5, atol=1e-5)
