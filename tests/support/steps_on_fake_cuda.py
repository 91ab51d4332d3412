"""Fake CUDA cases for tests/test_fake_cuda.py."""

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import transformers.integrations.flex_attention
from accelerate.state import AcceleratorState, GradientState
from torch._dynamo.backends.debugging import aot_eager
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AutoConfig

import pretrain.model.kernels
import pretrain.training.build
from pretrain.checkpoint.run_state import Request
from pretrain.checkpoint.tensor_files import HostMemory, shares
from pretrain.config import RunConfig, WindowSpec
from pretrain.errors import InputError
from pretrain.hardware import DTYPES
from pretrain.model import loss
from pretrain.model.attention import FLASH_PACKAGES, HostBatch, choose_attention, document_layout, host_batch
from pretrain.model.build import build_meta_model
from pretrain.model.loss_terms import LossTerm
from pretrain.model.own_code import register_all
from pretrain.model.routers import router_losses
from pretrain.parallel.strategy import Strategy
from pretrain.registry import LOSS_TERMS, load_extensions
from pretrain.training.build import build_training
from pretrain.training.prefetch import ReadAhead
from pretrain.training.step_reports import Consensus
from support.fake_cuda import LEAD, fake_cuda, is_pinned, pin_memory, pinned, refuse_waits
from support.flash_packages import flash_packages
from support.project import ROOT
from support.tiny_models import TINY, TINY_LLAMA

CHOICES = {
    "attention": ("auto", "eager", "sdpa", "varlen", "flex_attention", "flash_attention_2", "flash_attention_3"),
    "loss": ("chunked", "chunked_compiled", "logits"),
    "precision": ("bf16", "fp16", "fp32"),
    "activation_checkpointing": ("none", "full"),
    "optimizer": ("adamw", "muon", "adafactor", "adafactor in bf16"),
    "document_mask": (True, False),
}
"""Settings that determine which kernels run. fp8 and 8-bit AdamW are excluded because they need more packages."""
WINDOW = 128
load_extensions([str(ROOT / "examples/multi_token_prediction.py")])
module_on_host = LOSS_TERMS["multi_token_prediction"].module


def settings_of(choice: Mapping[str, object], loss: Mapping[str, object] | None = None) -> RunConfig:
    name, _, in_bf16 = choice["optimizer"].partition(" in ")
    return RunConfig(
        model="none.json",
        output="none",
        data={"train": [{"shards": "none"}], "sequence_length": WINDOW, "document_mask": choice["document_mask"]},
        budget={"steps": 1},
        batch={"tokens_per_step": WINDOW},
        optim={"name": name, "learning_rate": 1e-3, "stochastic_rounding": bool(in_bf16)},
        compile="none",
        attention=choice["attention"],
        precision=choice["precision"],
        loss={"backend": choice["loss"], **(loss or {})},
        activation_checkpointing=choice["activation_checkpointing"],
    )


@functools.cache
def chosen_attention(attention: str, precision: str, document_mask: bool) -> str | None:
    """Returns the attention chosen on a GPU with all packages installed, or None if the setting is rejected."""
    dtype, window = DTYPES[precision], WindowSpec(WINDOW, document_mask)
    packages = mock.patch("pretrain.model.attention.importlib.util.find_spec", return_value=True)
    with packages, mock.patch("torch.cuda.get_device_capability", lambda *_: (9, 0)):
        try:
            return choose_attention(attention, device_type="cuda", dtype=dtype, window=window)
        except InputError:
            return None


def pairwise(choices: Mapping[str, tuple]) -> list[dict[str, object]]:
    """Returns allowed combinations: all of them with CUDA=all, otherwise a few that cover every pair of choices."""
    combinations = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    allowed = [
        choice
        for choice in combinations
        if chosen_attention(choice["attention"], choice["precision"], choice["document_mask"])
    ]
    if os.environ.get("CUDA") == "all":
        return allowed
    pairs_of = [set(itertools.combinations(choice.items(), 2)) for choice in allowed]
    missing, chosen = set().union(*pairs_of), []
    while missing:
        best = max(range(len(allowed)), key=lambda number: len(pairs_of[number] & missing))
        chosen.append(allowed[best])
        missing -= pairs_of[best]
    return chosen


class FakeWeights:
    """Stand-in for InitialWeights that creates parameters on the device, without values."""

    def __init__(self, *, dtype: torch.dtype, **_):
        self.dtype = dtype

    def fill(self, causal_lm: torch.nn.Module, unit: str) -> None:
        for module in causal_lm.get_submodule(unit).modules():
            for name, parameter in module.named_parameters(recurse=False):
                module._parameters[name] = torch.nn.Parameter(
                    torch.empty_like(parameter, dtype=self.dtype, device="cuda")
                )
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty_like(buffer, device="cuda")


def module_on_device(term: LossTerm) -> torch.nn.Module:
    """Replaces `LossTerm.module`, because fake tensors can't be moved to the device later."""
    module = module_on_host(term)
    FakeWeights(dtype=torch.float32).fill(module, "")
    return module


class NoWholeScores(TorchDispatchMode):
    """Dispatch mode that fails if an operator allocates full attention scores, (B, H, T, T)."""

    def __init__(self, batch: int, heads: int, length: int):
        super().__init__()
        self.batch, self.heads, self.length = batch, heads, length

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[-2:] == (self.length, self.length):
                # A mask that is expanded over the heads is only allocated once.
                allocated = min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size())
                assert allocated < self.batch * self.heads * self.length**2, f"{func}: whole scores"
        return made


class HostGenerator(torch.Generator):
    """CPU generator for any device, because a CUDA generator needs a GPU."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls)


WHOLE = F.scaled_dot_product_attention
"""torch's function, which computes full scores for fake tensors, as on a GPU without a suitable kernel."""


def cudnn_serves(head_sizes: tuple[int, int], dropout: float) -> bool:
    """Returns True if torch selects cuDNN for these (query, value) head sizes, in half precision on an H100.

    Larger head sizes need cuDNN 9.23, but torch 2.13's wheels for CUDA 13 contain 9.20. This rule is from torch's main
    branch in the summer of 2026. In April, main served head sizes up to 256 with cuDNN 9.10, and 2.13 may still do so.
    """
    fits = max(head_sizes) <= 128 or head_sizes == (192, 128)
    return fits and not any(size % 8 for size in head_sizes) and (16 * dropout).is_integer()


def by_torchs_kernels(query, key, value, mask=None, dropout=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Runs the kernel that torch 2.13 selects on an H100 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).

    In half precision, this is cuDNN if it serves the head sizes and the dropout, or flash attention for equal head
    sizes up to 256 without a mask. Otherwise, it is the memory-efficient kernel, or full scores if heads are grouped.
    """
    head_sizes = (query.shape[-1], value.shape[-1])
    in_half = query.dtype in (torch.bfloat16, torch.float16)
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, -torch.inf)
        bias = bias.expand(*query.shape[:2], -1, -1)
    if in_half and cudnn_serves(head_sizes, dropout):
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        return cudnn(query, key, value, bias, query.requires_grad, dropout, is_causal, scale=scale)[0]
    if in_half and mask is None and len(set(head_sizes)) == 1 and max(head_sizes) <= 256:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        if enable_gqa:  # its fake backward pass doesn't support groups
            key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
        return flash(query, key, value, dropout, is_causal, scale=scale)[0]
    if enable_gqa or any(size * query.element_size() % 16 for size in head_sizes):
        return WHOLE(query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, query.requires_grad, dropout, is_causal, scale=scale)[0]


class Kernels(TorchDispatchMode):
    """Names of the attention kernels that run."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in func._opname or "varlen" in func._opname:
            self.names.append(func._opname.strip("_"))
        return func(*args, **(kwargs or {}))


def kernels_of(precision: str, document_mask: bool, head_sizes: tuple[int, int], dropout: float) -> list[str]:
    """Returns the kernels that `auto` runs, forward and backward, with grouped queries."""
    with replacements(), fake_cuda(), Kernels() as kernels:
        shape = {"device": "cuda", "dtype": DTYPES[precision], "requires_grad": True}
        of_query, of_value = head_sizes
        shapes = ((8, of_query), (2, of_query), (2, of_value))
        tensors = [torch.empty(2, heads, 256, size, **shape) for heads, size in shapes]
        packed = {"cu_seq_lens_q": torch.zeros(9, dtype=torch.int32, device="cuda")} if document_mask else {}
        attend = AttentionInterface()[chosen_attention("auto", precision, document_mask)]
        attend(torch.nn.Module(), *tensors, None, dropout, **packed)[0].sum().backward()
    return kernels.names


@contextlib.contextmanager
def replacements() -> Iterator[None]:
    """Replaces missing packages and functions that don't work with fake tensors. Resets accelerate's state at exit."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (LOSS_TERMS["multi_token_prediction"], "module", module_on_device),
            (pretrain.training.build, "InitialWeights", FakeWeights),
            (torch.nn.Module, "to", lambda module, *_, **__: module),
            (transformers.integrations.flex_attention, "compile_friendly_flex_attention", flex_attention),
            (F, "scaled_dot_product_attention", by_torchs_kernels),
            (torch, "Generator", HostGenerator),
            (pretrain.model.kernels, "_activate_flash_3", lambda *_: "fake tensors have no values to compare"),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(flash_packages())
        stack.callback(GradientState._reset_state)
        stack.callback(AcceleratorState._reset_state, reset_partial_state=True)
        yield


def flex_attention(query, key, value, *, score_mod, block_mask, enable_gqa, scale, **_):
    """Checks devices and shapes, and returns an output that depends on query, key and value."""
    batch, heads, length, _ = query.shape
    if block_mask is not None:
        assert block_mask.kv_indices.device == query.device and block_mask.shape[0] == batch
        block_mask.mask_mod(*(torch.zeros(1, dtype=torch.int32, device=query.device) for _ in range(4)))
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return out, SimpleNamespace(lse=query.new_empty(batch, heads, length))


def a_host_batch(window: WindowSpec) -> HostBatch:
    """Builds a micro-batch as the prefetching thread does."""
    return host_batch(host_arrays(False)[0], window, end_of_document_id=0, device=torch.device("cuda"))


def host_arrays(
    document_mask: bool, rows: int = 2, length: int = WINDOW
) -> tuple[np.ndarray, Mapping[str, torch.Tensor] | None]:
    """Returns token IDs for 41-token documents, (rows, length + 1), and their layout."""
    ids = (np.arange(rows * (length + 1)).reshape(rows, -1) % 41).astype(np.uint16)
    return ids, document_layout(ids[:, :-1], 0) if document_mask else None


def train_a_step(
    choice: Mapping[str, object],
    model: Mapping[str, object] = TINY_LLAMA,
    loss: Mapping[str, object] | None = None,
) -> None:
    """Runs two micro-steps and an update, as in train.py."""
    config = settings_of(choice, loss)
    attention = chosen_attention(config.attention, config.precision, config.data.document_mask)
    register_all()  # needed for deepone
    plan = SimpleNamespace(model_config=AutoConfig.for_model(**model), attention=attention, from_hidden_states=True)
    plan.active_parameters, plan.parameters = 10**6, 10**6
    plan.router_losses = router_losses(config.loss, build_meta_model(plan.model_config))
    with replacements(), fake_cuda(may_wait=True):
        strategy = Strategy(config.precision, config)
        built = build_training(config, plan, strategy, learning_rate=1e-3)
        built.model.train()
        batch_on_host = a_host_batch(config.data.window)
        watch = NoWholeScores(len(batch_on_host.ids), plan.model_config.num_attention_heads, WINDOW)
        is_watched = choice["attention"] not in ("eager", *FLASH_PACKAGES)
        with refuse_waits(), watch if is_watched else contextlib.nullcontext():
            strategy.begin_step(1e-3, 2)
            step_loss = torch.zeros((), device=strategy.device)
            for micro_step in range(2):
                batch = batch_on_host.on_device(strategy.device, attention)
                with strategy.accumulate(is_last=micro_step == 1):
                    micro_loss, cross_entropy = built.model(**batch)
                    strategy.backward(micro_loss / 2)
                step_loss += cross_entropy / 2
            grad_norm, skipped = strategy.update(config.optim.max_grad_norm)
        for figure in (step_loss, grad_norm, skipped):
            assert (figure.device.type, figure.dtype, figure.shape) == ("cuda", torch.float32, ())
        assert {parameter.device.type for parameter in strategy.causal_lm.parameters()} == {"cuda"}


def train_four_steps() -> None:
    """Runs `four_steps` in a single process."""
    config = settings_of({name: values[0] for name, values in CHOICES.items()})
    attention = chosen_attention(config.attention, config.precision, config.data.document_mask)
    model_plan = SimpleNamespace(
        model_config=AutoConfig.for_model(**TINY_LLAMA), attention=attention, from_hidden_states=True
    )
    model_plan.active_parameters, model_plan.parameters = 10**6, 10**6
    model_plan.router_losses = router_losses(config.loss, build_meta_model(model_plan.model_config))
    compiles = functools.partial(torch.compile, backend=aot_eager)
    with replacements(), fake_cuda(may_wait=True), compiled_by(compiles):
        strategy = Strategy(config.precision, config)
        compiled = config.model_copy(update={"compile": "regional"})
        built = build_training(compiled, model_plan, strategy, learning_rate=1e-3)
        four_steps(strategy, built.model, config.data.window, attention)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "all layers must share one graph"


class InThisThread:
    """Stand-in for ReadAhead's thread. Only the case's own thread can create fake tensors."""

    def submit(self, function: Callable, *arguments: object) -> Future:
        done = Future()
        done.set_result(function(*arguments))
        return done


def four_steps(strategy: Strategy, model: torch.nn.Module, window: WindowSpec, attention: str) -> None:
    """Runs train.py's loop with prefetching, report exchange and a checkpoint's weight copies.

    The first two steps may wait for the device, because they compile.
    """

    def read(step: int, micro_step: int, rank: int, *, ranks: int, sequences: int) -> np.ndarray:
        return host_arrays(False, sequences, window.sequence_length)[0]

    plan = SimpleNamespace(
        attention=attention,
        total_steps=4,
        micro_steps=lambda _: 2,
        stage=lambda _: SimpleNamespace(window=window, sequences_per_micro_batch=2),
        batches=SimpleNamespace(read=read, end_of_document_id=0),
    )
    no_values = mock.patch.object(FakeTensor, "tolist", values_that_arrived)
    locks = mock.patch("pretrain.checkpoint.tensor_files.lock", locked)
    memory_is_pinned = mock.patch.multiple(torch.Tensor, pin_memory=pin_memory, is_pinned=is_pinned)
    with no_values, locks, empty_is_pinned(), memory_is_pinned:
        model.train()
        read_ahead = ReadAhead(strategy)
        read_ahead._thread = InThisThread()
        consensus = Consensus(strategy)
        tensors = strategy.model_tensors()
        memory = HostMemory({name: (shape, tensors.dtypes[name]) for name, shape in tensors.shapes.items()})
        reports = []
        for step in range(plan.total_steps):
            with refuse_waits() if step >= 2 else contextlib.nullcontext():
                strategy.begin_step(1e-3, 2)
                step_loss = torch.zeros((), device=strategy.device)
                for micro_step in range(2):
                    batch = read_ahead.micro_batch(plan, step, micro_step)
                    read_ahead.last_seconds.append(1.0)  # slow disk: the thread reads the next step
                    with strategy.accumulate(is_last=micro_step == 1):
                        micro_loss, cross_entropy = model(**batch)
                        strategy.backward(micro_loss / 2)
                    step_loss += cross_entropy / 2
                grad_norm, skipped = strategy.update(1.0)
                reports += consensus.exchange(step, step_loss, grad_norm, skipped, Request.NONE)
                for _, name, tensor in shares("model", tensors, 0, strategy.ranks.count, int):
                    memory.hold(name, tensor)
        assert [report.step for report in reports] == [0, 1], "each report must arrive two steps later"


def values_that_arrived(tensor: FakeTensor) -> list[float]:
    """Replaces `tolist` for tensors on the host."""
    if tensor.device.type == "cuda":
        return tensor[0].item()  # raises Waits
    return [1.0] * tensor.numel()


@contextlib.contextmanager
def empty_is_pinned() -> Iterator[None]:
    """Replaces pin_memory in torch.empty, which needs a GPU."""
    empty = torch.empty

    def make(*size, pin_memory=False, **more):
        return pinned(empty(*size, **more)) if pin_memory else empty(*size, **more)

    with mock.patch.object(torch, "empty", make):
        yield


def locked(memory: torch.Tensor, device: torch.device) -> bool:
    """Replaces `lock`. Returns False, because fake memory has no address by which it could be unlocked."""
    pinned(memory)
    return False


@contextlib.contextmanager
def compiled_by(compiles: Callable) -> Iterator[None]:
    torch._dynamo.reset()
    state = torch.zeros(16, dtype=torch.uint8)
    rng = mock.patch.multiple(torch.cuda, get_rng_state=lambda *_: state, set_rng_state=lambda *_: None)
    with mock.patch.object(torch, "compile", compiles), rng:
        yield
    torch._dynamo.reset()


def attend(attention: str, precision: str, document_mask: bool, dropout: float = 0.0) -> None:
    """Runs an attention implementation forward and backward with grouped queries. Fails if it allocates full
    scores."""
    name, batch, heads, length = chosen_attention(attention, precision, document_mask), 2, 8, 256
    with replacements(), fake_cuda():
        tensors = [
            torch.empty(batch, n, length, 64, device="cuda", dtype=DTYPES[precision], requires_grad=True)
            for n in (heads, 2, 2)
        ]
        module, packed = torch.nn.Module(), {}
        if document_mask:
            packed["cu_seq_lens_q"] = torch.zeros(9, dtype=torch.int32, device="cuda")
        with NoWholeScores(batch, heads, length):
            AttentionInterface()[name](module, *tensors, None, dropout, **packed)[0].sum().backward()


def loss_body(dtype: torch.dtype, compiled: bool, cap: float | None) -> None:
    """Runs the chunked loss's real implementation. Other cases run the fake one."""
    matrix_products = []

    def addmm(total, left, right, *, out_dtype, out):
        """Replaces torch.addmm, whose fake implementation fails if the dtype of `out` differs from that of the
        matrices."""
        assert out is total and total.dtype == out_dtype == torch.float32
        matrix_products.append(left.shape)
        return total.copy_(torch.ops.aten.addmm.dtype(total, left, right, out_dtype))

    plain = mock.patch.object(torch, "compile", lambda function, **_: function)
    with fake_cuda(), mock.patch.object(torch, "addmm", addmm), plain:
        loss._compiled_softmax_less_target_.cache_clear()
        hidden, weight = (torch.empty(rows, 64, device="cuda") for rows in (600, 512))
        targets = torch.empty(600, device="cuda", dtype=torch.int64)
        sums, count, of_hidden, of_weight, *_ = loss._chunked_loss._init_fn(
            hidden, weight, None, targets, 1e-4, cap, 256, dtype, compiled, [True, True, False]
        )
        loss._compiled_softmax_less_target_.cache_clear()
        assert {x.device.type for x in (sums, count, of_hidden, of_weight)} == {"cuda"}
        assert (of_hidden.dtype, of_weight.dtype) == (hidden.dtype, torch.float32)
        in_half = dtype != torch.float32
        assert matrix_products == [(512, 256), (512, 256), (512, 88)] * in_half, "one matmul per chunk"


def on_weight(use: Callable[[torch.Tensor], object]) -> Callable[[], None]:
    def case():
        with fake_cuda():
            use(torch.empty(4, 4, device="cuda", requires_grad=True))

    return case


def recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def awaits_the_step_before(weight: torch.Tensor) -> None:
    event = recorded_event()
    for _ in range(LEAD):
        weight + 1
    event.synchronize()


def copies_after_pinning(weight: torch.Tensor) -> None:
    pageable = torch.ones(4)
    pageable.pin_memory()
    pageable.to("cuda", non_blocking=True)


WAITS = {
    "item": lambda weight: weight.sum().item(),
    "truth": lambda weight: bool(weight.sum() > 0),
    "list": lambda weight: weight.tolist(),
    "shape from values": lambda weight: weight.nonzero(),
    "mask as an index": lambda weight: weight[weight > 0],
    "comparison": lambda weight: torch.equal(weight, weight),
    "copy to the host": lambda weight: weight.cpu(),
    "copy from the host": lambda weight: weight.detach().copy_(torch.ones(4, 4)),
    "copy of pageable memory": lambda weight: torch.ones(4).to("cuda", non_blocking=True),
    "write of pageable memory": lambda weight: weight.detach().copy_(torch.ones(4, 4), non_blocking=True),
    "copy to pageable memory": lambda weight: torch.ones(4, 4).copy_(weight.detach(), non_blocking=True),
    "pinned copy that is not used": copies_after_pinning,
    "number to the device": lambda weight: torch.tensor(1.0, device=weight.device),
    "synchronize": lambda weight: torch.cuda.synchronize(),
    "stream": lambda weight: torch.cuda.current_stream().synchronize(),
    "event": lambda weight: recorded_event().synchronize(),
    "cache": lambda weight: torch.cuda.empty_cache(),
    "write to a mask": lambda weight: weight.detach().__setitem__(weight[:, 0] > 0, torch.ones(4, device="cuda")),
    "write of one element to a mask": lambda weight: weight.detach().__setitem__(
        weight > 0, torch.ones((), device="cuda")
    ),
    "index on the host": lambda weight: weight[torch.tensor([0, 1])],
    "list as an index": lambda weight: weight[[0, 1]],
    "write to an index on the host": lambda weight: weight.detach().index_put_(
        (torch.tensor([0, 1]),), torch.ones((), device="cuda")
    ),
    "write of a number to an index": lambda weight: weight.detach().__setitem__(
        torch.zeros(2, dtype=torch.long, device="cuda"), 0.0
    ),
    "accumulation of a number in a mask": lambda weight: weight.detach().index_put_(
        (weight > 0,), torch.tensor(1.0), accumulate=True
    ),
    "new_tensor": lambda weight: weight.new_tensor([0.0, 1.0]),
    "masked_scatter_": lambda weight: weight.detach().masked_scatter_(weight > 0, torch.ones(16, device="cuda")),
    "repeats": lambda weight: torch.repeat_interleave(weight, torch.ones(4, dtype=torch.long, device="cuda"), dim=0),
    "counts": lambda weight: torch.bincount(torch.zeros(4, dtype=torch.long, device="cuda")),
    "split by values": lambda weight: weight.split(torch.ones(4, dtype=torch.long, device="cuda").tolist()),
    "numpy": lambda weight: weight.detach().cpu().numpy(),
}
MIXES = {"product": lambda weight: weight @ torch.ones(4, 4), "sum": lambda weight: weight + torch.ones(4)}
RUNS = {
    "backward": lambda weight: (weight @ weight).sum().backward(),
    "scalar of the host": lambda weight: weight * torch.tensor(2.0),
    "copy without waiting": lambda weight: torch.ones(4).pin_memory().to("cuda", non_blocking=True) + weight,
    "copy of a pinned row": lambda weight: weight.detach()[0].copy_(
        torch.ones(2, 4).pin_memory()[1], non_blocking=True
    ),
    "copy to the host without waiting": lambda weight: (
        torch.ones(4, 4).pin_memory().copy_(weight.detach().to("cpu", non_blocking=True))
    ),
    "write to pinned memory": lambda weight: torch.ones(4, 4).pin_memory().copy_(weight.detach(), non_blocking=True),
    "number on the device": lambda weight: torch.full((), 1.0, device=weight.device),
    "write of a number": lambda weight: weight.detach()[0].fill_(1.0),
    "index on the device": lambda weight: weight[torch.zeros(2, dtype=torch.long, device="cuda")],
    "number of the device to an index": lambda weight: weight.detach().__setitem__(
        torch.zeros(2, dtype=torch.long, device="cuda"), torch.zeros((), device="cuda")
    ),
    "number to a mask": lambda weight: weight.detach().__setitem__(weight > 0, 0.0),
    "event of the step before": awaits_the_step_before,
}
INDEX = functools.partial(torch.zeros, 4, dtype=torch.long, device="cuda")
VARIES = {
    "cumsum": lambda weight: weight.cumsum(0),
    "cumsum of integers as fp32": lambda weight: INDEX().cumsum(0, dtype=torch.float32),
    "histogram": lambda weight: torch.histc(weight.detach(), 4, 0, 3),
    "median": lambda weight: weight.median(0),
    "product of scattered values": lambda weight: weight.detach()[0].scatter_reduce_(0, INDEX(), weight[0], "prod"),
    "put": lambda weight: weight.detach().put_(INDEX(), weight[0], accumulate=True),
    "backward of padding": lambda weight: F.pad(weight, (1, 1), mode="reflect").sum().backward(),
}
"""Operations that fail on a GPU with `deterministic: true`."""
RUNS |= {
    "cumsum of integers": lambda weight: INDEX().cumsum(0),
    "histogram of integers": lambda weight: torch.histc(INDEX().int(), 4, 0, 3),
    "median of all": lambda weight: weight.median(),
    "sum of scattered values": lambda weight: weight.detach()[0].scatter_add_(0, INDEX(), weight[0].detach()),
    "sum of indexed values": lambda weight: weight[INDEX()].sum().backward(),
}
OF_FAKE_CUDA = {"waits": WAITS, "mixes": MIXES, "runs": RUNS, "varies": VARIES}
STEPS = {", ".join(map(str, choice.values())): functools.partial(train_a_step, choice) for choice in pairwise(CHOICES)}

MIXTURE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FIRST = {name: values[0] for name, values in CHOICES.items()}
MODELS = {**TINY, "qwen3_moe": {**TINY_LLAMA, **MIXTURE, "head_dim": 16, "decoder_sparse_step": 1}}
STEPS |= {name: functools.partial(train_a_step, FIRST, model) for name, model in MODELS.items()}
STEPS |= {
    f"{name}, {backend}": functools.partial(train_a_step, {**FIRST, "loss": backend, "optimizer": "muon"}, model, loss)
    for backend in ("chunked", "logits")
    for name, model, loss in (
        ("loss term", TINY_LLAMA, {"z_loss": 1e-4, "terms": {"multi_token_prediction": {}}}),
        ("capped logits", {**TINY_LLAMA, "model_type": "nanochat"}, {"z_loss": 1e-4}),
        ("router losses", MODELS["qwen3_moe"], {"router_balance": 0.01, "router_z_loss": 0.001}),
    )
}

LOSSES = {
    f"{dtype}, compiled {compiled}, cap {cap}": functools.partial(loss_body, dtype, compiled, cap)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for compiled in (True, False)
    for cap in (None, 15.0)
}

SCORES = {
    f"{attention}, {precision}, {document_mask}, {dropout}": (attention, precision, document_mask, dropout)
    for attention in CHOICES["attention"]
    for precision in CHOICES["precision"]
    for document_mask in (True, False)
    for dropout in (0.0, 0.1)
    if attention not in ("flex_attention", *FLASH_PACKAGES) and chosen_attention(attention, precision, document_mask)
}
"""{name: arguments for `attend`}. Flex attention and FlashAttention are excluded, because stand-ins replace them."""
CASES = {f"scores: {name}": functools.partial(attend, *given) for name, given in SCORES.items()}

UP_TO_128 = ((32, 32), (48, 32), (64, 64), (96, 64), (96, 96), (128, 128))
"""(query, value) head sizes of the shipped models that cuDNN serves without an exception for that size."""
KERNELS = {
    "fp32 takes the memory-efficient kernel": (
        "efficient",
        [("fp32", masked, sizes, 0.0) for masked in (True, False) for sizes in ((64, 64), (192, 128), (256, 256))],
    ),
    "cuDNN serves head sizes up to 128": ("cudnn", [("bf16", False, sizes, 0.0) for sizes in UP_TO_128]),
    "cuDNN serves head sizes of 192 and 128": ("cudnn", [("bf16", False, (192, 128), 0.0)]),
    "cuDNN 9.20 does not serve other large head sizes": (
        "flash",
        [("bf16", False, sizes, 0.0) for sizes in ((136, 136), (192, 192), (256, 256))],
    ),
    "cuDNN serves dropout in sixteenths": ("cudnn", [("bf16", masked, (64, 64), 0.125) for masked in (True, False)]),
    "flash attention serves other dropout": ("flash", [("bf16", False, (64, 64), 0.1)]),
    "flash attention serves no mask": ("efficient", [("bf16", True, (64, 64), 0.1)]),
    "flash attention serves equal head sizes": (
        "efficient",
        [("bf16", False, (192, 128), 0.1), ("bf16", False, (256, 128), 0.0)],
    ),
    "packed documents take varlen attention": (
        "varlen",
        [("bf16", True, sizes, 0.0) for sizes in ((64, 64), (192, 128), (256, 256))],
    ),
}
"""{rule: (kernel, [(precision, document_mask, (query, value) head size, dropout)])}"""
CASES |= {
    f"kernels: {given}": functools.partial(kernels_of, *given) for _, cases in KERNELS.values() for given in cases
}

CASES |= {f"{kind}: {name}": on_weight(use) for kind, uses in OF_FAKE_CUDA.items() for name, use in uses.items()}
CASES |= {"four steps": train_four_steps}
CASES |= STEPS | LOSSES
