"""Compares two kinds of context parallelism: exchanging heads, as in cp.yaml, and gathering keys. Prints Markdown.

    torchrun --standalone --nproc_per_node 2 bench/context.py --shapes 4096x8x8x64 16384x32x8x128 --dtype bf16

A shape is sequence length x query heads x key-value heads x head dimension. One causal sequence is sharded across all
processes. Both methods compute the same result (this is checked) with torch's attention, forward and backward. When
keys and values are gathered, each process has one chunk from the start of the sequence and one from the end, which
balances causal attention. The methods alternate. Times are medians over --repeats for the slowest process.
"""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed import _functional_collectives as collectives  # noqa: E402
from torch.nn.attention.bias import causal_lower_right  # noqa: E402

from pretrain.hardware import DTYPES  # noqa: E402
from pretrain.parallel.context_parallel import to_parts, to_whole  # noqa: E402

# Private, but the only all-gather with autograd. Renamed in torch 2.13.
all_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function from this process's query, key and value, (B, heads, P, E), to its output, (B, P, heads, E)."""


def group_name() -> str:
    return dist.group.WORLD.group_name


def heads_exchanged(query: Tensor, key: Tensor, value: Tensor, *, attends: bool = True) -> Tensor:
    """Computes attention by exchanging positions for heads (all-to-all). With attends=False, only communicates."""
    parts = dist.get_world_size()
    # With fewer key-value heads than processes, repeat them so that each process gets one.
    if (copies := max(1, parts // key.shape[1])) > 1:
        key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    query, key, value = to_whole((query, key, value), parts, group_name())
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True) if attends else query
    return to_parts(out.transpose(1, 2), parts, group_name())


def keys_gathered(query: Tensor, key: Tensor, value: Tensor, *, attends: bool = True) -> Tensor:
    """Computes attention by gathering keys and values. With attends=False, only communicates.

    This process has the chunks `rank` and `2 * processes - 1 - rank`.
    """
    parts = dist.get_world_size()
    rank = dist.get_rank()
    sent = torch.stack([key, value]).unflatten(3, (2, -1)).movedim(3, 0)  # (2 chunks, key or value, B, G, P / 2, E)
    gathered = all_gather(sent.contiguous(), 0, dist.group.WORLD).unflatten(0, (parts, 2))
    ordered = torch.cat([gathered[:, 0], gathered[:, 1].flip(0)])  # in chunk order
    key, value = (x.movedim(0, 2).flatten(2, 3) for x in ordered.unbind(1))
    if not attends:
        # The term with factor 0 keeps key and value in the graph, so that the backward pass also communicates.
        return query.transpose(1, 2) * 1.0 + 0.0 * (key.sum() + value.sum())
    outputs = []
    for number, chunk in zip((rank, 2 * parts - 1 - rank), query.chunk(2, dim=2), strict=True):
        seen = (number + 1) * chunk.shape[2]
        mask = causal_lower_right(chunk.shape[2], seen)
        outputs.append(
            F.scaled_dot_product_attention(
                chunk, key[:, :, :seen], value[:, :, :seen], attn_mask=mask, enable_gqa=True
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2)


def positions_of(way: str, length: int) -> Tensor:
    """Returns the positions of this process's shard with the given method."""
    parts = dist.get_world_size()
    rank = dist.get_rank()
    if way == "exchanged":
        return torch.arange(length).chunk(parts)[rank]
    chunks = torch.arange(length).chunk(2 * parts)
    return torch.cat([chunks[rank], chunks[2 * parts - 1 - rank]])


def inputs_of(way: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Returns this process's shard of query, key and value. The full sequence is the same for both methods."""
    length, heads, key_heads, width = shape
    generator = torch.Generator().manual_seed(0)
    mine = positions_of(way, length)
    whole = [torch.randn(1, number, length, width, generator=generator) for number in (heads, key_heads, key_heads)]
    return [x[:, :, mine].to(device, dtype).requires_grad_() for x in whole]


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Measures how many seconds the slowest process takes."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    dist.barrier()
    wait()
    start = time.perf_counter()
    work()
    wait()
    taken = torch.tensor(time.perf_counter() - start, device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def both_directions(way: Way, tensors: list[Tensor]) -> list[Tensor]:
    """Runs a forward and a backward pass and returns the input gradients."""
    return list(torch.autograd.grad(way(*tensors).float().square().sum(), tensors))


def whole_of(parts: Tensor, way: str, length: int) -> Tensor:
    """Gathers every process's (B, heads, P, E) into (B, heads, T, E), ordered by position."""
    gathered = [torch.empty_like(parts) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, parts.contiguous())
    places = [torch.empty(parts.shape[2], dtype=torch.long, device=parts.device) for _ in gathered]
    dist.all_gather(places, positions_of(way, length).to(parts.device))
    return torch.cat(gathered, dim=2)[:, :, torch.cat(places).argsort()]


def rows(shapes: list[tuple[int, ...]], dtype: torch.dtype, repeats: int, device: torch.device) -> Iterator[str]:
    ways = {"exchanged": heads_exchanged, "gathered": keys_gathered}
    for shape in shapes:
        tensors = {name: inputs_of(name, shape, dtype, device) for name in ways}
        found = [
            [whole_of(x, name, shape[0]) for x in both_directions(way, tensors[name])] for name, way in ways.items()
        ]
        for ours, theirs in zip(*found, strict=True):
            difference = (ours - theirs).abs().max() / theirs.abs().max()
            # Times are only comparable if both methods compute the same result.
            assert difference < (1e-4 if dtype == torch.float32 else 5e-2), (
                f"{shape}: results differ by {difference:.1e}"
            )
        times: dict[tuple[str, bool], list[float]] = {}
        for _ in range(repeats):
            for name, way in ways.items():
                for attends in (True, False):
                    work = functools.partial(both_directions, functools.partial(way, attends=attends), tensors[name])
                    times.setdefault((name, attends), []).append(seconds_of(work, device))
        median = {key: 1e3 * statistics.median(taken) for key, taken in times.items()}
        cells = [f"{median[name, attends]:.1f}" for attends in (True, False) for name in ways]
        length, heads, key_heads, width = shape
        yield f"| {length:,} | {heads} / {key_heads} x {width} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["2048x8x8x64", "4096x8x2x64"])
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend)
    shapes = [tuple(map(int, shape.split("x"))) for shape in given.shapes]
    lines = [
        f"{dist.get_world_size()} processes, {backend}, {given.dtype}; ms, forward and backward\n",
        "| sequence | query / key-value heads | heads exchanged | keys gathered | exchange alone | gathering alone |",
        "|---|---|---|---|---|---|",
    ]
    for line in [*lines, *rows(shapes, DTYPES[given.dtype], given.repeats, device)]:
        if dist.get_rank() == 0:
            print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
