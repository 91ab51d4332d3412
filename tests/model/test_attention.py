import importlib.util
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from pretrain.config import WindowSpec
from pretrain.errors import InputError
from pretrain.model import attention as attention_module
from pretrain.model import bf16_cpu_attention, cpu_attention
from pretrain.model.attention import attention_arguments, choose_attention, document_layout, eager, sdpa
from pretrain.model.compile import checkpoint_activations
from pretrain.model.loss import LanguageModelLoss
from pretrain.model.own_code import register_all
from support.flash_packages import flash_attn_varlen_func, flash_packages

register_all()

EOD = 0
MODELS = ["llama", "qwen3", "gpt2", "deepone"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Limits torch to one thread, because synchronizing threads is slow for operations this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_layout_by_hand():
    ids = np.array([[7, 8, EOD, 9, EOD], [EOD, 1, 2, 3, 4]], dtype=np.uint16)
    layout = document_layout(ids, EOD)
    assert layout["position_ids"].tolist() == [[0, 1, 0, 1, 0], [0, 1, 2, 3, 4]]
    assert layout["position_ids"].dtype == torch.int64 and layout["cu_seq_lens_q"].dtype == torch.int32
    assert layout["cu_seq_lens_q"].tolist() == [0, 2, 4, 5, 10]
    assert ids[1, 0] == EOD and ids[0, 0] == 7, "the batch must not be modified"


def test_layout_has_no_empty_segments():
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 1000, (4, 512), dtype=np.uint16)
    ids[rng.random(ids.shape) < 1 / 100] = EOD
    ids[:, 0] = EOD
    assert len(document_layout(ids, EOD)["cu_seq_lens_q"]) == (ids == EOD).sum() + 1
    all_eod = document_layout(np.zeros((4, 512), dtype=np.uint16), EOD)
    assert all_eod["cu_seq_lens_q"].tolist() == list(range(2049))
    assert not all_eod["position_ids"].any()
    long = document_layout(np.ones((2, 32768), dtype=np.uint16), EOD)["cu_seq_lens_q"]
    assert long.tolist() == [0, 32768, 65536], "a GPU would start a full window's blocks for each further entry"


def tiny_model(model_type, attention, **changes):
    sizes = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 61}
    config = AutoConfig.for_model(model_type, **sizes)
    small = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    for name, value in {**small, **tokens, **no_dropout, **changes}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    torch.manual_seed(1)
    for parameter in model.parameters():
        # The initial weights would make attention almost uniform, so masks would hardly matter.
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def packed_batch():
    """Returns (inputs, targets) for three windows of 32 tokens. Two of them contain several documents."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 61, (3, 33), generator=generator)
    ids[0, [5, 6, 20, 32]] = EOD
    ids[1, [0, 31]] = EOD
    return ids[:, :-1], ids[:, 1:]


def losses_of_documents_alone(model, input_ids, targets):
    """Returns the mean loss over all tokens, with a separate forward pass per document and transformers' eager
    attention."""
    model.set_attn_implementation("eager")
    total = 0.0
    for row_ids, row_targets in zip(input_ids, targets, strict=True):
        starts = [0] + [t for t in range(1, len(row_ids)) if row_ids[t] == EOD]
        for start, end in zip(starts, [*starts[1:], len(row_ids)], strict=True):
            logits = model(input_ids=row_ids[None, start:end], use_cache=False).logits[0]
            total = total + torch.nn.functional.cross_entropy(logits, row_targets[start:end], reduction="sum")
    return total / targets.numel()


def loss_and_gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(got, wanted):
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-5, atol=1e-5)
    for name, gradient in wanted[1].items():
        # Gradients are sums over 96 tokens in a different order, so allow 1e-5 of the largest entry.
        atol = 1e-5 * max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(got[1][name], gradient, rtol=1e-5, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", MODELS)
def test_packed_loss_and_gradients_equal_those_of_the_documents_alone(model_type, attention):
    name = choose_attention(attention, device_type="cpu", dtype=torch.float32)
    model = tiny_model(model_type, name)
    input_ids, targets = packed_batch()
    arguments = attention_arguments(document_layout(input_ids.numpy(), EOD), name, "cpu")
    packed = loss_and_gradients(model, LanguageModelLoss(model)(input_ids, targets, **arguments)[0])
    unpacked = LanguageModelLoss(model)(input_ids, targets)[0].item()
    assert abs(packed[0].item() - unpacked) > 1e-3, "masking must change the loss"
    assert_same(packed, loss_and_gradients(model, losses_of_documents_alone(model, input_ids, targets)))


def test_packed_loss_is_the_same_compiled_and_does_not_recompile():
    model = tiny_model("llama", "groundwork_sdpa", num_hidden_layers=1)
    input_ids, targets = (ids.contiguous() for ids in packed_batch())
    module = LanguageModelLoss(model)
    torch.compiler.reset()  # otherwise, code compiled for another test would count as the first compilation
    compiled = torch.compile(module, dynamic=False, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for ids in (input_ids, input_ids.flip(1), torch.ones_like(input_ids)):
            arguments = attention_arguments(document_layout(ids.numpy(), EOD), "groundwork_sdpa", "cpu")
            wanted = loss_and_gradients(model, module(ids, targets, **arguments)[0])
            assert_same(loss_and_gradients(model, compiled(ids, targets, **arguments)[0]), wanted)


def test_operator_between_generated_kernels_equals_eager():
    """In compiled code, the operator's outputs must have the memory layout that it declares to the compiler."""
    cu_seq_lens = torch.tensor([0, 100, 160, 320, 330, 480, 480], dtype=torch.int32)
    inputs = [torch.randn(3, 160, heads, 16).transpose(1, 2).requires_grad_() for heads in (4, 2, 2)]

    def attend(query, key, value):
        assert not cpu_attention.as_products(query.dtype, query.shape[2]), "the custom operator must be used"
        return sdpa(torch.nn.Identity(), query * 2, key * 2, value * 2, None, cu_seq_lens_q=cu_seq_lens)[0].square()

    results = []
    # Compile in this process, because the pool of compile workers sometimes hangs for minutes on a busy machine.
    with torch._inductor.config.patch(compile_threads=1):
        for function in (attend, torch.compile(attend, fullgraph=True, dynamic=False)):
            out = function(*inputs)
            results.append([out, *torch.autograd.grad(out.sum(), inputs)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("share", "recomputed"), [(0.5, [0, 2, 4, 6]), (0.3, [0, 3, 6]), (0.9, [0, 1, 2, 3, 4, 5, 6, 7]), (0.01, [0])]
)
def test_a_share_of_the_layers_is_recomputed(share, recomputed):
    """The number of recomputed layers is rounded up, and they are evenly spaced."""
    model = tiny_model("llama", "groundwork_sdpa", num_hidden_layers=8)
    checkpoint_activations(model, share)
    layers = model.model.layers
    assert [index for index, layer in enumerate(layers) if layer.gradient_checkpointing] == recomputed


def test_activation_checkpointing_changes_nothing():
    input_ids, targets = packed_batch()
    arguments = attention_arguments(document_layout(input_ids.numpy(), EOD), "groundwork_sdpa", "cpu")
    results = []
    for checkpointing in ("none", 0.5, "full"):
        model = tiny_model("llama", "groundwork_sdpa").train()
        checkpoint_activations(model, checkpointing)
        results.append(loss_and_gradients(model, LanguageModelLoss(model)(input_ids, targets, **arguments)[0]))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_without_a_layout_attention_is_causal_over_the_window():
    input_ids, targets = packed_batch()
    reference = LanguageModelLoss(tiny_model("llama", "sdpa"))(input_ids, targets)
    for name in ("groundwork_sdpa", "groundwork_eager"):
        loss = LanguageModelLoss(tiny_model("llama", name))(input_ids, targets)
        torch.testing.assert_close(loss, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [128, 200, 1024])
def test_whole_windows_in_blocks_of_queries_equal_torchs_kernel(length):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, length, 16, requires_grad=True) for heads in (4, 2, 2))
    results = []
    for attend in (
        lambda: sdpa(torch.nn.Identity(), query, key, value, None)[0].transpose(1, 2),
        lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True),
    ):
        out = attend()
        results.append([out, *torch.autograd.grad(out.square().sum(), (query, key, value))])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["groundwork_fa2", "groundwork_fa3"])
@pytest.mark.parametrize(
    ("model_type", "changes"), [("llama", {}), ("llama", {"head_dim": 10}), ("mistral", {"sliding_window": 4})]
)
@pytest.mark.parametrize("has_documents", [True, False])
def test_flash_packages_get_arguments_equivalent_to_sdpa(name, model_type, changes, has_documents):
    """The arguments passed to the flash packages give the same results as SDPA. Stand-ins are used because the
    packages need a GPU."""
    input_ids, targets = packed_batch()
    layout = document_layout(input_ids.numpy(), EOD)
    results = []
    for attention in ("groundwork_sdpa", name):
        model = tiny_model(model_type, attention, **changes)
        arguments = attention_arguments(layout, attention, "cpu") if has_documents else {}
        with flash_packages():
            loss, _ = LanguageModelLoss(model)(input_ids, targets, **arguments)
        results.append(loss_and_gradients(model, loss))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("cu_seq_lens", [None, torch.tensor([0, 8], dtype=torch.int32)])
def test_flash_packages_are_told_to_be_deterministic(monkeypatch, is_deterministic, cu_seq_lens):
    def attend(*arguments, deterministic, **settings):
        told.append(deterministic)
        return arguments[0]

    told = []
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_deterministic)
    package = SimpleNamespace(flash_attn_func=attend, flash_attn_varlen_func=attend)
    attention_module._flash(package, *torch.randn(3, 1, 2, 8, 16), None, cu_seq_lens_q=cu_seq_lens)
    assert told == [is_deterministic]


def test_flash_packages_get_soft_caps_and_values_narrower_than_keys():
    query, key, value = (torch.randn(1, 2, 8, width) for width in (16, 16, 12))
    cu_seq_lens = torch.tensor([0, 3, 8], dtype=torch.int32)
    function = AttentionInterface()["groundwork_fa2"]
    with flash_packages():
        out, _ = function(torch.nn.Identity(), query, key, value, None, cu_seq_lens_q=cu_seq_lens, softcap=2.0)
        with pytest.raises(InputError, match="uses s_aux"):
            function(torch.nn.Identity(), query, key, value, None, s_aux=torch.zeros(2))
        with pytest.raises(InputError, match="uses dropout, which flash_attention_3 does not"):
            AttentionInterface()["groundwork_fa3"](torch.nn.Identity(), query, key, value, None, dropout=0.1)
    scores = 2.0 * (query @ key.mT / 4.0 / 2.0).tanh()
    segment = torch.tensor([0] * 3 + [1] * 5)
    seen = torch.ones(8, 8).tril().bool() & (segment[:, None] == segment[None, :])
    wanted = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value
    torch.testing.assert_close(out, wanted.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("batch", "length", "share"), [(3, 512, 0.01), (2, 600, 0.004), (1, 100, 0.05), (2, 1024, 0)])
def test_flex_block_masks_match_torch_without_allocating_a_dense_mask(batch, length, share):
    ids = (np.random.default_rng(length).random((batch, length)) >= share).astype(np.int64)
    layout = document_layout(ids, EOD)
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, tuple | list) else [out]) if torch.is_tensor(x))
            return out

    with Sizes():
        found = attention_arguments(layout, "flex_attention", "cpu")["attention_mask"]
    assert max(sizes) <= batch * max(length, 2 * (length // 128 + 1) ** 2)
    segment_BT = torch.from_numpy((ids == EOD).cumsum(1))
    wanted = create_block_mask(
        lambda b, h, q, k: (segment_BT[b, q] == segment_BT[b, k]) & (q >= k), batch, None, length, length, device="cpu"
    )
    assert (found.shape, found.BLOCK_SIZE, found.seq_lengths) == (wanted.shape, wanted.BLOCK_SIZE, wanted.seq_lengths)
    for blocks in ("kv", "full_kv", "q", "full_q"):
        numbers, indices = ([getattr(m, f"{blocks}_{n}") for m in (found, wanted)] for n in ("num_blocks", "indices"))
        is_listed = torch.arange(indices[1].shape[-1]) < numbers[1][..., None]
        assert torch.equal(*numbers) and torch.equal(*(index.where(is_listed, 0) for index in indices)), blocks


@pytest.mark.parametrize("name", ["groundwork_sdpa", "groundwork_eager"])
def test_sliding_window_is_kept(name):
    input_ids, targets = packed_batch()
    arguments = attention_arguments(document_layout(input_ids.numpy(), EOD), name, "cpu")
    model = tiny_model("mistral", name, sliding_window=4)
    loss, _ = LanguageModelLoss(model)(input_ids, targets, **arguments)
    wanted = losses_of_documents_alone(model, input_ids, targets)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
    wide, _ = LanguageModelLoss(tiny_model("mistral", name))(input_ids, targets, **arguments)
    assert abs(loss.item() - wide.item()) > 1e-3


def test_generation_equals_transformers_own_sdpa():
    prompt = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    outputs = [tiny_model("llama", name).generate(prompt, **options) for name in ("sdpa", "groundwork_sdpa")]
    assert outputs[0].tolist() == outputs[1].tolist()


@pytest.mark.parametrize("keys", [1, 2, 4])
def test_operator_equals_dense_attention_in_bf16_with_grouped_heads(keys):
    torch.manual_seed(3)
    layout = document_layout(packed_batch()[0].numpy(), EOD)
    cu_seq_lens = layout["cu_seq_lens_q"]
    shapes = [(3, 32, heads, 16) for heads in (4, keys, keys)]
    inputs = [torch.randn(shape).transpose(1, 2).requires_grad_() for shape in shapes]
    results = []
    for function, dtype in ((sdpa, torch.float32), (eager, torch.float32), (sdpa, torch.bfloat16)):
        half = [x.to(dtype) for x in inputs]
        out, _ = function(torch.nn.Identity(), *half, None, cu_seq_lens_q=cu_seq_lens)
        # A sum's gradient is expanded (stride 0), and the kernel must support that.
        results.append([out, *torch.autograd.grad(out.sum() + out.square().sum(), inputs)])
    for got, want in zip(results[0], results[1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for got, want in zip(results[2], results[1], strict=True):
        assert (got - want).norm() < 0.02 * want.norm(), "bf16 has 8 bits"


@pytest.mark.parametrize("keys", [2, 4])
def test_segments_in_blocks_of_queries_equal_dense_attention(keys):
    """Block attention matches dense attention for full windows, and for segments longer than, equal to and shorter
    than a block."""
    torch.manual_seed(4)
    length, ends = 300, [0, 300, 600, 728, 740, 880, 900, 1200]
    cu_seq_lens = torch.tensor([*ends, 1200, 1200], dtype=torch.int32)
    tokens = [end - start for start, end in itertools.pairwise(ends)]
    assert {n in cpu_attention.LENGTHS_IN_BLOCKS for n in tokens} == {True, False}
    inputs = [torch.randn(4, length, heads, 16).transpose(1, 2).requires_grad_() for heads in (4, keys, keys)]
    results = []
    for function, dtype in ((sdpa, torch.float32), (eager, torch.float32), (sdpa, torch.bfloat16)):
        out, _ = function(torch.nn.Identity(), *(x.to(dtype) for x in inputs), None, cu_seq_lens_q=cu_seq_lens)
        results.append([out, *torch.autograd.grad(out.sum() + out.square().sum(), inputs)])
    for got, want in zip(results[0], results[1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for got, want in zip(results[2], results[1], strict=True):
        assert (got - want).norm() < 0.02 * want.norm(), "bf16 has 8 bits"
    with torch.no_grad():
        out, _ = sdpa(torch.nn.Identity(), *inputs, None, cu_seq_lens_q=cu_seq_lens)
    assert torch.equal(out, results[0][0])


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("length", [32, 300, 1100])
def test_windows_in_bf16_equal_dense_attention(monkeypatch, length, has_kernel):
    """bf16 attention matches dense attention with the kernel, and in fp32 if the kernel isn't available."""
    if not has_kernel:
        monkeypatch.setattr(bf16_cpu_attention, "is_available", lambda: False)
    assert cpu_attention.serves_windows(torch.bfloat16, length)
    assert cpu_attention.serves_windows(torch.float32, length) == (length == 300)
    torch.manual_seed(6)
    inputs = [torch.randn(2, length, heads, 16).transpose(1, 2).requires_grad_() for heads in (4, 2, 2)]
    results = []
    for function, dtype in ((sdpa, torch.bfloat16), (eager, torch.float32)):
        out, _ = function(torch.nn.Identity(), *(x.to(dtype) for x in inputs), None)
        results.append([out, *torch.autograd.grad(out.sum() + out.square().sum(), inputs)])
    assert results[0][0].dtype == torch.bfloat16
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() < 0.02 * want.norm(), "bf16 has 8 bits"


def test_autocast_does_not_reach_matmuls_in_fp32(monkeypatch):
    monkeypatch.setattr(bf16_cpu_attention, "is_available", lambda: False)
    torch.manual_seed(9)
    inputs = [torch.randn(1, 300, 2, 16).bfloat16().transpose(1, 2).requires_grad_() for _ in range(3)]
    results = []
    for is_on in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
            out = cpu_attention.attend(*inputs, None, None)
            results.append([out, *torch.autograd.grad(out.sum(), inputs)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scaling", "has_documents"), [(None, False), (0.1, True)])
def test_short_windows_are_left_to_the_compiler_and_equal_dense_attention(dtype, scaling, has_documents):
    """Short windows are compiled as plain matmuls, because torch's kernel hardly benefits from a second thread."""
    torch._dynamo.reset()  # resets the recompile limit
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.manual_seed(7)
    longest = 31 if cpu_attention.has_kernel(dtype) else 128
    for length in (2, 20, longest, longest + 1):
        inputs = [torch.randn(3, length, heads, 16).transpose(1, 2).requires_grad_() for heads in (4, 2, 2)]
        # The second window is one document, and the third begins with a single-token document. The last end is
        # repeated.
        ends = [0, length // 2, length, 2 * length, 2 * length + 1, 3 * length, 3 * length]
        arguments = {"cu_seq_lens_q": torch.tensor(ends, dtype=torch.int32)} if has_documents else {}
        results = []
        for function, used in ((torch.compile(sdpa, backend=keep, dynamic=False), dtype), (eager, torch.float32)):
            out, _ = function(torch.nn.Identity(), *(x.to(used) for x in inputs), None, scaling=scaling, **arguments)
            results.append([out, *torch.autograd.grad(out.sum() + out.square().sum(), inputs)])
        for got, want in zip(*results, strict=True):
            if dtype == torch.float32:
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            assert (got - want).norm() <= 0.02 * want.norm(), "bf16 has 8 bits"
        products = graphs.pop().graph.find_nodes(op="call_function", target=torch.baddbmm)
        assert len(products) == (length <= longest)
    assert not cpu_attention.as_products(dtype, 64), "eager mode must not use matmuls"


def test_the_probability_buffer_fits_any_segments():
    generator = torch.Generator().manual_seed(5)
    for length in (64, 256, 300, 1500):
        query = torch.empty(2, 3, length, 8)
        room = cpu_attention._empty_probabilities(query, keeps=True).numel()
        for documents in (0, 1, 3, 9):
            cuts = torch.randint(1, 2 * length, (documents,), generator=generator).tolist()
            cu_seq_lens = torch.tensor(sorted({0, *cuts, length, 2 * length}), dtype=torch.int32)
            used = 0
            for rows, positions, in_blocks in cpu_attention.query_blocks(cu_seq_lens, query):
                for begin, end in cpu_attention._block_bounds(positions.stop - positions.start):
                    used += in_blocks * (rows.stop - rows.start) * 3 * (end - begin) * end
            assert used <= room
        for tokens in set(cpu_attention.LENGTHS_IN_BLOCKS) & set(range(length + 1)):
            bounds = cpu_attention._block_bounds(tokens)
            assert sum((end - begin) * end for begin, end in bounds) * 2 * 3 * length <= room * tokens


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operator creates."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize(("length", "share"), [(256, 0.86), (1024, 0.59), (2048, 0.3)])
def test_the_full_attention_matrix_is_never_allocated(length, share):
    query, key, value = torch.randn(3, 1, 4, length, 16)
    cu_seq_lens = torch.tensor([0, length], dtype=torch.int32)
    with Largest() as seen:
        out, lse, kept = cpu_attention._packed_attention._init_fn(query, key, value, cu_seq_lens, 0.25, True)
        cpu_attention._packed_attention_backward._init_fn(out, query, key, value, out, lse, kept, cu_seq_lens, 0.25)
    assert out.numel() < seen.elements <= share * 4 * length**2


def test_autocast_reaches_the_operator():
    """Autocast doesn't apply to registered operators automatically."""
    cu_seq_lens = torch.tensor([0, 3, 8], dtype=torch.int32)
    query, key, value = (torch.randn(1, 2, 8, 16) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for function in (sdpa, eager):
            out, _ = function(torch.nn.Identity(), query, key, value.bfloat16(), None, cu_seq_lens_q=cu_seq_lens)
            assert out.dtype == torch.bfloat16 and out.shape == (1, 8, 2, 16)


def test_dropout_takes_the_dense_path_and_stays_within_documents():
    torch.manual_seed(0)
    cu_seq_lens = torch.tensor([0, 3, 8], dtype=torch.int32)
    query, key = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16)
    value = torch.zeros(1, 2, 8, 16)
    value[:, :, :3] = 1.0
    out, _ = sdpa(torch.nn.Identity(), query, key, value, None, dropout=0.5, cu_seq_lens_q=cu_seq_lens)
    assert not out[:, 3:].any() and out[:, :3].any()


def test_custom_op_keeps_torchs_rules():
    cu_seq_lens = torch.tensor([0, 3, 8, 16, 16], dtype=torch.int32)
    inputs = [torch.randn(2, 8, 2, 16).transpose(1, 2).requires_grad_() for _ in range(3)]
    torch.library.opcheck(torch.ops.groundwork.packed_attention, (*inputs, cu_seq_lens, 0.25, True))


@pytest.fixture
def gpu(monkeypatch):
    """Mocks an H100. Tests append to the list to change the compute capability."""
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability[-1])
    return capability


@pytest.mark.parametrize(
    ("requested", "device_type", "dtype", "message"),
    [
        (
            "flex_attention",
            "cpu",
            torch.float32,
            "flex_attention has no backward pass on cpu; available here: auto, eager",
        ),
        (
            "flash_attention_2",
            "cpu",
            torch.bfloat16,
            "flash_attention_2 does not run on cpu; available here: auto, eager",
        ),
        ("varlen", "cuda", torch.float32, "varlen supports only bf16 and fp16, not float32"),
        ("flash_attn", "cpu", torch.float32, "'flash_attn' is unknown; did you mean flash_attention"),
    ],
)
def test_unavailable_attention_is_rejected_with_the_available_ones(gpu, requested, device_type, dtype, message):
    with pytest.raises(InputError) as error:
        choose_attention(requested, device_type=device_type, dtype=dtype)
    assert message in str(error.value)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn_interface") is not None, reason="the package is installed")
def test_missing_flash_package_is_named(gpu):
    with pytest.raises(InputError, match=r"requires the package flash_attn_interface.*available here: auto,.* varlen"):
        choose_attention("flash_attention_3", device_type="cuda", dtype=torch.bfloat16)


def test_varlen_without_documents_is_refused(gpu):
    with pytest.raises(InputError, match=r"varlen requires data\.document_mask"):
        choose_attention("varlen", device_type="cuda", dtype=torch.bfloat16, window=WindowSpec(64, False))


def test_auto_is_sdpa_everywhere():
    for device_type in ("cpu", "cuda"):
        assert choose_attention("auto", device_type=device_type, dtype=torch.bfloat16) == "groundwork_sdpa"


FLASH = ("varlen", "flash_attention_2", "flash_attention_3")


@pytest.mark.parametrize(
    ("capability", "runs"), [((7, 0), ()), ((7, 5), ()), ((8, 6), FLASH), ((9, 0), FLASH), ((10, 0), FLASH[:2])]
)
def test_flash_attention_needs_a_gpu_with_its_kernels(gpu, monkeypatch, capability, runs):
    gpu.append(capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: package)
    for name in FLASH:
        if name in runs:
            choose_attention(name, device_type="cuda", dtype=torch.float16)
        else:
            with pytest.raises(
                InputError, match=f"{name} does not support GPUs .* {capability[0]}.{capability[1]}; available here"
            ):
                choose_attention(name, device_type="cuda", dtype=torch.float16)


@pytest.mark.parametrize(
    ("capability", "width", "taken"),
    [
        ((7, 5), 16, "dense mask"),
        ((8, 0), 16, "varlen"),
        ((8, 0), 200, "varlen"),
        ((8, 7), 200, "dense mask"),
        ((8, 9), 200, "dense mask"),
        ((8, 9), 256, "varlen"),
        ((9, 0), 264, "dense mask"),
        ((12, 1), 200, "dense mask"),
    ],
)
def test_sdpa_uses_the_kernel_available_on_the_gpu(gpu, monkeypatch, capability, width, taken):
    gpu.append(capability)
    seen = []
    monkeypatch.setattr(attention_module, "_varlen", lambda query, *rest: seen.append("varlen") or query)
    monkeypatch.setattr(attention_module, "_dense_mask", lambda *parts: seen.append("dense mask"))
    product = SimpleNamespace(transpose=lambda *dims: None)
    monkeypatch.setattr(attention_module.F, "scaled_dot_product_attention", lambda *parts, **named: product)
    shape = {"device": torch.device("cuda", 0), "dtype": torch.float16, "shape": (1, 2, 8, width)}
    on_gpu = SimpleNamespace(**shape, to=lambda dtype: on_gpu)
    sdpa(torch.nn.Identity(), on_gpu, on_gpu, on_gpu, None, cu_seq_lens_q=torch.tensor([0, 3, 8]))
    assert seen == [taken]


def test_heads_of_any_width_are_padded_for_varlen(monkeypatch):
    """Head dimensions are padded to a multiple of 8, which the kernel requires, without changing results."""
    widths = []

    def varlen_attn(query_NHE, key_NHE, value_NHE, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
        widths.append(query_NHE.shape[-1])
        causal = torch.ones(max_q, max_k, dtype=torch.bool).tril()
        scores_HNN = torch.einsum("qhe,khe->hqk", query_NHE, key_NHE) * scale
        weights_HNN = scores_HNN.masked_fill(~causal, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khe->qhe", weights_HNN, value_NHE)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    tensors = [torch.randn(1, 2, 6, 20) for _ in range(3)]
    found = attention_module._varlen(*tensors, torch.tensor([0, 6]), None, None)
    wanted = F.scaled_dot_product_attention(*tensors, is_causal=True).transpose(1, 2)
    assert widths == [24] and found.shape == (1, 6, 2, 20)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_documents_with_narrower_values_match_the_dense_mask(monkeypatch, device_type, groups, dtype):
    """As in latent attention. A stand-in replaces the kernel for GPUs, which requires equal widths."""

    def varlen_attn(query, key, value, starts, _, longest, __, *, scale, window_size, enable_gqa=False):
        settings = {"softmax_scale": scale, "causal": True, "window_size": window_size}
        return flash_attn_varlen_func(query, key, value, starts, starts, longest, longest, **settings).to(query.dtype)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    if device_type == "cpu":
        monkeypatch.setattr(attention_module, "_dense_mask", None)
    cu_seq_lens = torch.tensor([0, 5, 32, 33, 64], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 32, 24), (2, 4 // groups, 32, 24), (2, 4 // groups, 32, 16))
    tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    if device_type == "cpu":
        found = sdpa(torch.nn.Identity(), *tensors, None, cu_seq_lens_q=cu_seq_lens)[0]
    else:
        found = attention_module._varlen(*tensors, cu_seq_lens, None, None)
    monkeypatch.undo()
    in_fp32 = [x.detach().float().requires_grad_() for x in tensors]
    wanted = eager(torch.nn.Identity(), *in_fp32, None, cu_seq_lens_q=cu_seq_lens)[0]
    assert found.shape == wanted.shape == (2, 32, 4, 16)
    weight = torch.randn(wanted.shape, generator=generator)
    results = [
        [out, *torch.autograd.grad((out.float() * weight).sum(), inputs)]
        for out, inputs in ((found, tensors), (wanted, in_fp32))
    ]
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() <= (1e-6 if dtype == torch.float32 else 0.02) * want.norm()


def test_grouped_heads_are_repeated_if_varlen_does_not_support_them(monkeypatch):
    """torch 2.11 doesn't support grouped heads in varlen."""

    def varlen_attn(query_NHE, key_NHE, value_NHE, *segments, scale, window_size):
        assert query_NHE.shape == key_NHE.shape == value_NHE.shape
        return key_NHE

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(attention_module, "VARLEN_TAKES_GROUPS", False)
    query, key = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    found = attention_module._varlen(query, key, key, torch.tensor([0, 6]), None, None)
    assert torch.equal(found, key.repeat_interleave(2, dim=1).transpose(1, 2))


@pytest.mark.parametrize("kind", ["tokens first", "part of a product", "heads first"])
def test_compiled_attention_views_tokens_first_without_a_copy(kind):
    """Values and gradients match those of a flattened tensor. A copy is needed only if heads come before tokens."""
    wide_BTHE = torch.randn(2, 5, 3, 12, requires_grad=True)
    weight_NHE = torch.randn(10, 3, 4)

    def view(wide_BTHE, flatten):
        part_BHTE = wide_BTHE[..., 4:8].transpose(1, 2)
        if kind != "part of a product":
            part_BHTE = (part_BHTE.contiguous() if kind == "heads first" else part_BHTE) * 2
        return flatten(part_BHTE)

    seen = []

    def compiled(graph, _):
        seen.extend(node.target for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    found = torch.compile(view, backend=compiled, dynamic=False)(wide_BTHE, attention_module._tokens_first)
    expected = view(wide_BTHE, lambda x: x.transpose(1, 2).flatten(0, 1))
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad((x * weight_NHE).sum(), wide_BTHE)[0] for x in (found, expected)]
    assert torch.equal(*gradients)
    assert ("flatten" in seen) == (kind != "tokens first")


@pytest.mark.parametrize("kind", ["three in one matmul", "exchanged between ranks", "stacked"])
def test_inductor_reads_slices_tokens_first(kind):
    """Compiled slices match eager mode. torch 2.11 computed wrong keys for GPT-2, and NaN for context parallelism."""
    x_BTC, weight_CW = torch.randn(2, 16, 24), torch.randn(24, 96)

    def slices(x_BTC, weight_CW):
        whole_BTW = x_BTC @ weight_CW
        if kind == "exchanged between ranks":
            whole_BTW = whole_BTW.view(2, 2, 8, 96).transpose(0, 1).flatten(1, 2)
        if kind == "stacked":
            stacked = whole_BTW.view(2, 16, 3, 4, 8).permute(2, 0, 1, 3, 4).contiguous()
            return [attention_module._tokens_first(part.transpose(1, 2)) * 1 for part in stacked]
        parts = [part.unflatten(-1, (4, 8)).transpose(1, 2) for part in whole_BTW.split(32, dim=-1)]
        return [attention_module._tokens_first(part) * 1 for part in parts]

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(slices)(x_BTC, weight_CW), slices(x_BTC, weight_CW))


@pytest.mark.parametrize(
    ("capability", "value_width", "in_kernel"), [((7, 5), 16, False), ((8, 0), 16, True), ((8, 0), 8, False)]
)
def test_grouped_queries_are_passed_only_to_kernels_that_support_them(
    gpu, monkeypatch, capability, value_width, in_kernel
):
    """Grouped queries are passed to SDPA only if its kernel supports them. Otherwise, torch would allocate (T, T)
    matrices."""
    gpu.append(capability)
    seen = {}

    def attend(query, key, *rest, enable_gqa, **named):
        seen["heads"], seen["enable_gqa"] = key.shape[1], enable_gqa
        return SimpleNamespace(transpose=lambda *dims: None)

    def on_gpu(heads, width=16):
        tensor = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float16, shape=(1, heads, 8, width))
        tensor.to, tensor.repeat_interleave = lambda dtype: tensor, lambda group, dim: on_gpu(heads * group, width)
        return tensor

    monkeypatch.setattr(attention_module.F, "scaled_dot_product_attention", attend)
    sdpa(torch.nn.Identity(), on_gpu(4), on_gpu(2), on_gpu(2, value_width), None)
    assert seen == {"heads": 2 if in_kernel else 4, "enable_gqa": in_kernel}


def test_choosing_the_kernel_does_not_break_a_compiled_graph(gpu):
    def scaled(x):
        return x * (2 if attention_module.has_flash_kernels(x.device.index, 64) else 3)

    x = torch.ones(4)
    assert torch.compile(scaled, backend="eager", fullgraph=True)(x).tolist() == [2.0] * 4
    torch._dynamo.reset()
    gpu.append((7, 5))
    assert torch.compile(scaled, backend="eager", fullgraph=True)(x).tolist() == [3.0] * 4


def test_unsupported_attention_is_rejected():
    x = torch.randn(1, 2, 8, 16)
    with pytest.raises(InputError, match="uses softcap"):
        sdpa(torch.nn.Identity(), x, x, x, None, softcap=50.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("requested", ["sdpa", "flex_attention", "flash_attention_2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_loss_on_a_gpu_equals_the_documents_alone(requested, dtype):
    try:
        name = choose_attention(requested, device_type="cuda", dtype=dtype)
    except InputError as error:
        pytest.skip(str(error))
    # The kernels need a head dimension of at least 16, and flex attention needs windows of whole blocks.
    model = tiny_model("llama", name, head_dim=64).cuda()
    ids = packed_batch()[0].repeat(1, 4)
    input_ids, targets = ids.cuda(), ids.roll(-1, 1).cuda()
    arguments = attention_arguments(document_layout(ids.numpy(), EOD), name, "cuda")
    with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
        got = loss_and_gradients(model, LanguageModelLoss(model)(input_ids, targets, **arguments)[0])
    wanted = loss_and_gradients(model, losses_of_documents_alone(model, input_ids, targets))
    tolerance = 1e-4 if dtype == torch.float32 else 0.03
    assert (got[0] - wanted[0]).abs() < tolerance * wanted[0]
    for gradient_name, gradient in wanted[1].items():
        assert (got[1][gradient_name] - gradient).norm() <= 3 * tolerance * gradient.norm(), gradient_name
