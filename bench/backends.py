"""Measures every loss and attention implementation that runs on this device, forward and backward. Prints Markdown.

    python bench/backends.py                    # both tables
    python bench/backends.py --only loss --repeat 9

Times are the minimum over the repetitions, because other load can only add time. Memory is the peak size of live
tensors, including hidden states and weights. Uses bf16 autocast if the device has bf16 instructions, otherwise fp32.
Gradients are in fp32.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from pretrain.hardware import DTYPES
from pretrain.parallel.strategy import device_type, resolve_precision

DEVICE = device_type()
DTYPE = DTYPES[resolve_precision("auto")]
LOSS_SHAPES = {
    "65": (768, 128, 65),
    "1,024": (2048, 256, 1024),
    "8,192": (4096, 384, 8192),
    "131,072": (1024, 384, 131_072),
}
"""Shapes by name: (tokens, hidden size, vocabulary size)."""
LOSSES = {
    "chunked (auto)": "chunked",
    "chunked, compiled (auto on a GPU)": "chunked_compiled",
    "full logits": "logits",
}
ATTENTION_SHAPES = {"12 x 64": (12, 64), "8 x 512": (8, 512), "2 x 2,048": (2, 2048), "1 x 8,192": (1, 8192)}
HEADS = 6
HEAD_WIDTH = 64
SLOW_SECONDS = 20.0
"""Duration above which a measurement isn't repeated."""
DOCUMENT_TOKENS = (None, 800, 100)
"""Mean document lengths in tokens. None means no document mask."""


def best_milliseconds(work: Callable[[], object], repeat: int) -> float:
    """Returns the shortest time that `work` takes. With one CPU thread, this is CPU time, which excludes other
    load."""
    clock = time.process_time if torch.get_num_threads() == 1 and DEVICE == "cpu" else time.perf_counter
    # The first call may compile, so it only counts if it is too slow to repeat.
    began = clock()
    work()
    if (first := clock() - began) > SLOW_SECONDS:
        return 1e3 * first
    seconds = []
    for _ in range(repeat):
        _wait()
        began = clock()
        work()
        _wait()
        seconds.append(clock() - began)
    return 1e3 * min(seconds)


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def loss_step(backend: str, shape: tuple[int, int, int], device: str, *, compiled: bool) -> Callable[[], object]:
    """Returns a function that runs the LM head and the loss, forward and backward, on random inputs.

    shape: (tokens, hidden size, vocabulary size).
    """
    from pretrain.model.loss import next_token_loss

    tokens, width, vocabulary = shape
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, tokens, width, generator=generator).to(device).requires_grad_()
    weight = torch.nn.Parameter((0.02 * torch.randn(vocabulary, width, generator=generator)).to(device))
    targets = torch.randint(0, vocabulary, (1, tokens), generator=generator).to(device)
    compute = torch.compile(next_token_loss, dynamic=False) if compiled else next_token_loss

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=DTYPE is not torch.float32):
            loss, _ = compute(hidden, weight, targets, backend=backend)
        loss.backward()
        # Otherwise the next backward pass would accumulate gradients, which takes longer.
        hidden.grad = weight.grad = None

    return step


def peak_megabytes(make: Callable[[], Callable[[], object]], device: str) -> float:
    """Measures the peak size of live tensors in the second step, in MB. The first step may compile."""
    from bench.steps import PeakBytes

    peak = PeakBytes(device)
    with peak.counting():
        step = make()
        step()
        with peak.marked():
            step()
    return peak.bytes / 1e6


def loss_rows(device: str, repeat: int) -> list[str]:
    """Returns the table rows: time in ms and memory in MB for each loss and vocabulary size."""
    rows = [f"| | {' | '.join(f'vocabulary {name}' for name in LOSS_SHAPES)} |", "|---" * (len(LOSS_SHAPES) + 1) + "|"]
    variants = [(name, backend, False) for name, backend in LOSSES.items()]
    for name, backend, compiled in [*variants, ("full logits, compiled", "logits", True)]:
        cells = []
        for shape in LOSS_SHAPES.values():
            milliseconds = best_milliseconds(loss_step(backend, shape, device, compiled=compiled), repeat)
            megabytes = peak_megabytes(
                lambda shape=shape: loss_step(backend, shape, device, compiled=compiled),  # noqa: B023
                device,
            )
            cells.append(f"{milliseconds:,.0f} ms, {megabytes:,.0f} MB")
        rows.append(f"| {name} | {' | '.join(cells)} |")
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def attention_steps(windows: int, length: int, document_tokens: int | None, device: str) -> dict[str, Callable]:
    """Returns {attention name: function that runs one layer's attention forward and backward}."""
    from pretrain.model.attention import document_layout, eager, sdpa

    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(windows, length, HEADS, HEAD_WIDTH, generator=generator, dtype=DTYPE)
        .to(device)
        .transpose(1, 2)
        .requires_grad_()
        for _ in range(3)
    )
    module = torch.nn.Identity()
    segments = None
    if document_tokens is not None:
        ids = (torch.rand(windows, length, generator=generator) > 1 / document_tokens).long()
        segments = document_layout(ids.numpy(), 0)["cu_seq_lens_q"].to(device)

    def timed(forward: Callable[[], torch.Tensor]) -> Callable[[], object]:
        # The first call compiles and selects kernels, so it isn't timed.
        gradient = torch.ones_like(forward())
        return lambda: torch.autograd.grad(forward(), (query, key, value), gradient)

    steps = {"auto": timed(lambda: sdpa(module, query, key, value, None, cu_seq_lens_q=segments)[0])}
    if segments is None:
        steps["torch's causal kernel"] = timed(
            lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        )
    # Eager attention materializes the (B, H, T, T) scores.
    if windows * length * length * HEADS < 2**27:
        steps["eager, dense mask"] = timed(lambda: eager(module, query, key, value, None, cu_seq_lens_q=segments)[0])
    return steps


def attention_rows(device: str, repeat: int) -> list[str]:
    """Returns the table rows: time in ms for each attention, document length and shape."""
    rows = [f"| | documents | {' | '.join(ATTENTION_SHAPES)} |", "|---" * (len(ATTENTION_SHAPES) + 2) + "|"]
    for documents in DOCUMENT_TOKENS:
        columns = [attention_steps(*shape, documents, device) for shape in ATTENTION_SHAPES.values()]
        for name in columns[0]:
            cells = [f"{best_milliseconds(c[name], repeat):,.0f} ms" if name in c else "" for c in columns]
            mean = "whole windows" if documents is None else f"of {documents} tokens"
            rows.append(f"| {name} | {mean} | {' | '.join(cells)} |")
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("loss", "attention"), help="print only this table")
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()
    print(f"{DEVICE}, {torch.get_num_threads()} threads, {DTYPE}\n")
    for name, rows_of in (("loss", loss_rows), ("attention", attention_rows)):
        if given.only in (None, name):
            print("\n".join(rows_of(DEVICE, given.repeat)), end="\n\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
