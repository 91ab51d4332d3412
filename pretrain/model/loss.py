"""Next-token loss from hidden states, without materializing all logits.

Shapes: B sequences, T positions, N = B x T tokens, D hidden width, V vocabulary, C tokens in a chunk.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.hardware import tag_compiled_code
from pretrain.model.attention import IGNORED, autocast_dtype
from pretrain.model.small_copy import logit_cap, projects_hidden_states

if TYPE_CHECKING:
    from pretrain.model.loss_terms import LossTerms

CPU_CHUNK_BYTES = 64 * 2**20
"""Size of a chunk's fp32 logits on a CPU."""
GPU_CHUNK_SHARE = 1 / 40
GPU_CHUNK_BYTES = (256 * 2**20, 2 * 2**30)
"""Minimum and maximum size of a chunk's fp32 logits on a GPU.

Between these limits, the size is GPU_CHUNK_SHARE of the GPU's memory.
"""
CPU_PIECE_BYTES = 2 * 2**20
"""Size of the fp32 logits in one softmax call on a CPU, which fit into its cache."""
CPU_PRODUCT_BYTES = 16 * 2**20
"""Number of bytes to add to the head's fp32 gradient at a time on a CPU."""
FEW_LOGITS = 2**20
"""Maximum number of logits that fit into a CPU's caches (4 MB in fp32)."""
MIN_CHUNK_TOKENS = 256
"""Minimum number of tokens per chunk.

With fewer, reading and writing the head's gradient in every chunk would dominate.
"""


class LossRecorder:
    """Optional list that collects every token's loss; see `recording_losses`."""

    losses: list[Tensor] | None = None


@contextmanager
def recording_losses(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collects every token's loss in nats, (N,) in fp32, from calls to `model` without gradients.

    In a pipeline, the last stage adds a tensor per microbatch. The other stages add none.
    """
    losses: list[Tensor] = []
    recorders = [module.recorder for module in model.modules() if hasattr(module, "recorder")]
    for recorder in recorders:
        recorder.losses = losses
    try:
        yield losses
    finally:
        for recorder in recorders:
            recorder.losses = None


def next_token_loss(
    hidden_BTD: Tensor,
    head_weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    head_bias: Tensor | None = None,
    z_loss: float = 0.0,
    cap: float | None = None,
    chunk_tokens: int | None = None,
    backend: str = "chunked",
    record: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the mean next-token loss over all targets that aren't IGNORED, or 0 if there are none.

    Returns (loss, cross_entropy), both fp32 scalars. The cross-entropy is in nats and detached. The loss also includes
    z_loss x mean(logsumexp^2) (PaLM, arXiv 2204.02311). Matmuls run in autocast's dtype if autocast is on. Softmax and
    sums always run in fp32.

    Args:
        cap: if not None, logits are replaced by cap x tanh(logits / cap), in fp32.
        backend: a key of LOSS_BACKENDS.
        record: list to which every token's loss is appended, (N,) in fp32. Only works without gradients.
    """
    hidden_ND = hidden_BTD.flatten(0, -2)
    targets_N = targets_BT.flatten()
    return LOSS_BACKENDS[backend](hidden_ND, head_weight_VD, head_bias, targets_N, z_loss, cap, chunk_tokens, record)


def tokens_of_chunk(vocabulary: int, device_type: str, device_bytes: float) -> int:
    """Returns the number of tokens per chunk.

    Every chunk reads and writes the head's fp32 gradient, so we use larger chunks on GPUs with more memory.

    Args:
        device_bytes: the GPU's memory; ignored on a CPU.
    """
    least, most = GPU_CHUNK_BYTES
    chunk_bytes = max(least, min(most, GPU_CHUNK_SHARE * device_bytes)) if device_type == "cuda" else CPU_CHUNK_BYTES
    return max(MIN_CHUNK_TOKENS, int(chunk_bytes) // (4 * vocabulary) // 64 * 64)


@torch.compiler.assume_constant_result
def _gpu_bytes(device_index: int | None) -> int:
    return torch.cuda.get_device_properties(device_index).total_memory


def _chunked(hidden_ND, weight_VD, bias_V, targets_N, z_loss, cap, chunk_tokens, record, *, compiled=False):
    if chunk_tokens is None:
        kind = hidden_ND.device.type
        device_bytes = _gpu_bytes(hidden_ND.device.index) if kind == "cuda" else 0
        chunk_tokens = tokens_of_chunk(weight_VD.shape[0], kind, device_bytes)
    dtype = autocast_dtype(hidden_ND, torch.promote_types(hidden_ND.dtype, weight_VD.dtype))
    with_gradient = torch.is_grad_enabled()
    needs = [with_gradient and x is not None and x.requires_grad for x in (hidden_ND, weight_VD, bias_V)]
    sums, count, *_, losses_N = torch.ops.groundwork.chunked_loss(
        hidden_ND, weight_VD, bias_V, targets_N, z_loss, cap, chunk_tokens, dtype, compiled, needs
    )
    if record is not None:
        record.append(losses_N)
    cross_entropy, z_term = sums / count
    return cross_entropy + z_loss * z_term, cross_entropy.detach()


def _logits(hidden_ND, weight_VD, bias_V, targets_N, z_loss, cap, chunk_tokens, record):
    logits_NV = F.linear(hidden_ND, weight_VD, bias_V)
    if cap:
        logits_NV = cap * (logits_NV.float() / cap).tanh()
    return loss_of_logits(logits_NV, targets_N, z_loss, record)


LOSS_BACKENDS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "chunked": _chunked,
    "chunked_compiled": functools.partial(_chunked, compiled=True),
    "logits": _logits,
}
"""Implementations of the same loss: chunked, chunked with compiled softmax, full logits."""


def choose_loss(requested: str, *, device_type: str, compile_mode: str, logits: int | None = None) -> str:
    """Returns the key of LOSS_BACKENDS for the recipe's loss.backend.

    auto means chunked_compiled on a GPU with compilation, because eager kernels read and write 26 bytes per bf16
    logit, and compiled kernels only 6. On a CPU, compiling the softmax isn't faster (docs/measurements_cpu.md), so
    auto means chunked, or logits for a fully compiled model with few logits.

    Args:
        logits: number of fp32 logits per micro-batch. None if it's unknown, or if the logits are in bf16, because
            gradients would then be summed in bf16.
    """
    if requested != "auto":
        return requested
    if device_type == "cpu" and compile_mode == "full" and logits and logits <= FEW_LOGITS:
        return "logits"
    return "chunked_compiled" if device_type == "cuda" and compile_mode != "none" else "chunked"


def loss_of_logits(
    logits_BTV: Tensor, targets_BT: Tensor, z_loss: float, record: list[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Computes (loss, cross_entropy) as in `next_token_loss`, from logits."""
    logits_NV = logits_BTV.flatten(0, -2).float()
    targets_N = targets_BT.flatten()
    is_target_N = targets_N != IGNORED
    count = is_target_N.sum().clamp(min=1)  # without targets, the loss is 0 instead of NaN
    if record is not None:
        record.append(F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="none"))
    cross_entropy = F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum") / count
    loss = cross_entropy
    if z_loss:
        loss = loss + z_loss * (logits_NV.logsumexp(-1).square() * is_target_N).sum() / count
    return loss, cross_entropy.detach()


@torch.library.custom_op("groundwork::chunked_loss", mutates_args=())
def _chunked_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    z_loss: float,
    cap: float | None,
    chunk_tokens: int,
    dtype: torch.dtype,
    compiled: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the summed loss and its gradients chunk by chunk.

    Gradients are computed in the forward pass, to avoid computing logits twice. They are gradients of the sum of
    cross-entropy + z_loss x logsumexp^2, because gradients of the mean could underflow in half-precision matmuls.

    Returns the sums of cross-entropy and logsumexp^2, (2,); the number of targets; the gradients of hidden states,
    weight and bias (empty if not in `needs`); and each token's cross-entropy (empty if any gradient is needed).
    """
    grad_hidden_ND, grad_weight_VD, grad_bias_V, losses_N = _empty_outputs(hidden_ND, weight_VD, bias_V, needs)
    is_target_N = targets_N != IGNORED
    sums = torch.zeros(2, dtype=torch.float32, device=hidden_ND.device)
    eager = functools.partial(_softmax_less_target_, cap=cap, needs_gradient=any(needs))
    softmax_less_target_ = _compiled_softmax_less_target_(cap) if compiled else eager
    # The casts below set the matmuls' dtype, so autocast is off.
    with torch.no_grad(), torch.autocast(hidden_ND.device.type, enabled=False):
        head_VD = weight_VD.to(dtype)
        bias = None if bias_V is None else bias_V.to(dtype)
        for start in range(0, hidden_ND.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            hidden_CD = hidden_ND[rows].to(dtype)
            weights_C1 = is_target_N[rows, None].float()
            block_CV = F.linear(hidden_CD, head_VD, bias)
            # IGNORED isn't a valid index. These rows have weight 0.
            target_C1 = targets_N[rows].where(is_target_N[rows], 0)[:, None]
            cross_entropy_C1, lse_C1 = softmax_less_target_(block_CV, target_C1, z_loss)
            sums += torch.cat([cross_entropy_C1 * weights_C1, lse_C1.square() * weights_C1], dim=1).sum(dim=0)
            if not any(needs):
                losses_N[rows] = cross_entropy_C1[:, 0]
            weights_C1 *= 1.0 + 2.0 * z_loss * lse_C1
            if needs[0]:
                grad_hidden_ND[rows] = (block_CV @ head_VD) * weights_C1
            if needs[1]:
                _add_product(grad_weight_VD, block_CV.T, hidden_CD * weights_C1.to(dtype))
            if needs[2]:
                grad_bias_V += (block_CV.T @ weights_C1.to(dtype))[:, 0]
            del block_CV, hidden_CD  # frees this chunk's logits before the next chunk's are allocated
    count = is_target_N.sum().clamp(min=1)
    return sums, count, grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), grad_bias_V, losses_N


@_chunked_loss.register_fake
def _(hidden_ND, weight_VD, bias_V, targets_N, z_loss, cap, chunk_tokens, dtype, compiled, needs):
    sums = torch.empty(2, dtype=torch.float32, device=hidden_ND.device)
    count = torch.empty((), dtype=torch.int64, device=hidden_ND.device)
    grad_hidden_ND, grad_weight_VD, grad_bias_V, losses_N = _empty_outputs(hidden_ND, weight_VD, bias_V, needs)
    return sums, count, grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), grad_bias_V, losses_N


def _save_for_backward(ctx, inputs, output):
    *_, ctx.needs = inputs
    ctx.save_for_backward(*output[2:5])
    # Only the sums have a gradient. Zero gradients for the other outputs would take as much memory as the head.
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_sums, *_):
    # To save memory, we scale the gradients in place, unless the graph is retained for a second backward pass, as in
    # zero-bubble pipelines. The gradients would then be scaled twice. They are detached because saved outputs refer to
    # their graph, so a zero-bubble pipeline's sum of gradients would keep the activations of all microbatches.
    in_place = not torch.compiler.is_compiling() and not torch._C._autograd._get_current_graph_task_keep_graph()
    scaled = [
        (gradient.mul_(grad_sums[0]) if in_place else (gradient * grad_sums[0]).to(gradient.dtype)) if needed else None
        for gradient, needed in zip((saved.detach() for saved in ctx.saved_tensors), ctx.needs, strict=True)
    ]
    return *scaled, *[None] * 7


_chunked_loss.register_autograd(_backward, setup_context=_save_for_backward)


def _softmax_less_target_(
    block_CV: Tensor, target_C1: Tensor, z_loss: float, cap: float | None, needs_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Returns each row's (cross-entropy, logsumexp), and overwrites the logits with their unscaled gradients.

    The gradients are softmax - onehot / (1 + 2 z_loss lse). The caller multiplies them by (1 + 2 z_loss lse) on the
    (C, D) side of the matmuls, which saves a pass over the block. With a cap, softmax and logsumexp use cap x
    tanh(logits / cap), and the gradients include the factor 1 - tanh^2. On a CPU, rows are processed in groups
    that fit into the cache.
    """
    piece_rows = block_CV.shape[0]
    if block_CV.device.type == "cpu":
        piece_rows = max(1, CPU_PIECE_BYTES // (4 * block_CV.shape[1]))
    results = []
    for start in range(0, block_CV.shape[0], piece_rows):
        logits_RV = block_CV[start : start + piece_rows]
        target_R1 = target_C1[start : start + piece_rows]
        tanh_RV = None if cap is None else (logits_RV.float() / cap).tanh_()
        capped_RV = logits_RV if tanh_RV is None else cap * tanh_RV
        softmax_RV, lse_R1 = _softmax(capped_RV)
        results.append(torch.cat([lse_R1 - capped_RV.gather(1, target_R1), lse_R1], dim=1))
        if needs_gradient:
            gradient_RV = softmax_RV.scatter_add_(1, target_R1, -1.0 / (1.0 + 2.0 * z_loss * lse_R1))
            if tanh_RV is not None:
                gradient_RV.addcmul_(gradient_RV, tanh_RV.square_(), value=-1)
            logits_RV.copy_(gradient_RV)
    cross_entropy_C1, lse_C1 = torch.cat(results).split(1, dim=1)
    return cross_entropy_C1, lse_C1


@functools.cache
def _compiled_softmax_less_target_(cap: float | None) -> Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """Compiles `_softmax_less_target_` into one kernel that reads the block twice and writes it once.

    The kernel writes gradients even if they aren't needed, so that validation doesn't cause a recompilation.
    """

    def softmax_less_target_(logits_CV: Tensor, target_C1: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
        fp32_CV = logits_CV.float()
        if cap is not None:
            tanh_CV = (fp32_CV / cap).tanh()
            fp32_CV = cap * tanh_CV
        # Inductor fuses this maximum and sum into one pass. logsumexp would take two.
        largest_C1 = fp32_CV.amax(-1, keepdim=True)
        lse_C1 = (fp32_CV - largest_C1).exp().sum(-1, keepdim=True).log() + largest_C1
        cross_entropy_C1 = lse_C1 - fp32_CV.gather(1, target_C1)
        is_target_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == target_C1
        less_C1 = 1.0 / (1.0 + 2.0 * z_loss * lse_C1)
        gradient_CV = (fp32_CV - lse_C1).exp() - torch.where(is_target_CV, less_C1, 0.0)
        logits_CV.copy_(gradient_CV if cap is None else gradient_CV * (1.0 - tanh_CV.square()))
        return cross_entropy_C1, lse_C1

    tag_compiled_code()
    return torch.compile(softmax_less_target_, dynamic=False)


def _softmax(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each row's (softmax, logsumexp) in fp32. The largest probability is 1 / sum(exp(logits - max))."""
    if logits_RV.device.type == "cpu":
        logits_RV = logits_RV.float()  # half precision would take twice as long
    softmax_RV = F.softmax(logits_RV, dim=-1, dtype=torch.float32)
    return softmax_RV, logits_RV.amax(-1, keepdim=True) - softmax_RV.amax(-1, keepdim=True).log()


def _empty_outputs(hidden_ND, weight_VD, bias_V, needs):
    """Allocates the gradients of hidden states, weight and bias, and each token's loss, as in `_chunked_loss`."""
    grad_hidden_ND = torch.empty_like(hidden_ND) if needs[0] else hidden_ND.new_empty(0)
    grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs[1] else weight_VD.new_empty(0)
    grad_bias_V = torch.zeros_like(bias_V) if needs[2] else hidden_ND.new_empty(0)
    losses_N = hidden_ND.new_empty(0 if any(needs) else hidden_ND.shape[0], dtype=torch.float32)
    return grad_hidden_ND, grad_weight_VD, grad_bias_V, losses_N


def _add_product(total_VD: Tensor, left_VC: Tensor, right_CD: Tensor) -> None:
    """Adds left @ right to total. The sum is in fp32 even if the matmul is in bf16."""
    if left_VC.dtype == total_VD.dtype:
        total_VD.addmm_(left_VC, right_CD)
        return
    if total_VD.is_cuda and torch.version.hip is None:  # this fused kernel is only available on CUDA
        torch.addmm(total_VD, left_VC, right_CD, out_dtype=total_VD.dtype, out=total_VD)
        return
    rows = total_VD.shape[0]
    if total_VD.device.type == "cpu":  # a CPU would copy a full tensor to add two dtypes
        rows = max(1, CPU_PRODUCT_BYTES // (4 * total_VD.shape[1]))
    for start in range(0, total_VD.shape[0], rows):
        total_VD[start : start + rows] += left_VC[start : start + rows] @ right_CD


class LanguageModelLoss(nn.Module):
    """A transformers causal language model with its loss, which strategies wrap and the training loop calls.

    Parameter names start with "causal_lm." or "loss_terms.".

    from_hidden_states: True to compute the loss from the last hidden states without materializing the logits. The
    default is `projects_hidden_states`, which is False for models that scale their logits (cohere, granite).
    """

    def __init__(
        self,
        causal_lm: nn.Module,
        *,
        z_loss: float = 0.0,
        backend: str = "chunked",
        from_hidden_states: bool | None = None,
        terms: "LossTerms | None" = None,
    ):
        super().__init__()
        self.terms = terms
        self.loss_terms = nn.ModuleDict() if terms is None else terms.trained
        self.causal_lm = causal_lm
        self.z_loss = z_loss
        self.backend = backend
        self.recorder = LossRecorder()
        if from_hidden_states is None:
            from_hidden_states = projects_hidden_states(causal_lm.config)
        self.from_hidden_states = from_hidden_states
        self.cap = logit_cap(causal_lm.config)

    @property
    def config(self):
        """Model configuration, from which DeepSpeed reads hidden_size."""
        return self.causal_lm.config

    @property
    def _no_split_modules(self):
        """Class names of the blocks, which accelerate uses for wrapping."""
        return self.causal_lm._no_split_modules

    def forward(self, input_ids_BT: Tensor, targets_BT: Tensor, **attention_kwargs) -> tuple[Tensor, Tensor]:
        """Returns (loss, cross_entropy) as in `next_token_loss`.

        attention_kwargs (position_ids ...) are passed to the model.
        """
        if not self.from_hidden_states:
            outputs = self.causal_lm(input_ids=input_ids_BT, use_cache=False, **attention_kwargs)
            return loss_of_logits(outputs.logits, targets_BT, self.z_loss, self._record())
        outputs = self.causal_lm.base_model(input_ids=input_ids_BT, use_cache=False, **attention_kwargs)
        loss, cross_entropy = self.loss_of_hidden(outputs.last_hidden_state, targets_BT)
        if self.terms is not None and torch.is_grad_enabled():
            head = self.causal_lm.get_output_embeddings()
            embedding = self.causal_lm.get_input_embeddings()
            hidden_BTD = outputs.last_hidden_state
            loss = loss + self.terms.add(input_ids_BT, targets_BT, hidden_BTD, head, embedding, attention_kwargs)
        return loss, cross_entropy

    def loss_of_hidden(self, hidden_BTD: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (loss, cross_entropy) from the base model's last hidden states."""
        head = self.causal_lm.get_output_embeddings()
        return next_token_loss(
            hidden_BTD,
            head.weight,
            targets_BT,
            head_bias=getattr(head, "bias", None),
            z_loss=self.z_loss,
            cap=self.cap,
            backend=self.backend,
            record=self._record(),
        )

    def _record(self) -> list[Tensor] | None:
        return None if torch.is_grad_enabled() else self.recorder.losses
