"""Fake CUDA cases for tests/parallel/test_products.py: combinations of parallel dimensions on one of 64 GPUs.

Unlike those in support.ranks_on_fake_cuda, these cases also record each collective's dimension and the bytes on the
device. Workspaces of the fused loss and attention kernels are not included.
"""

import functools
import json
import os
import weakref
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup, _resolve_process_group
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.mesh_sizes import DIMENSIONS, Sizes, variable
from pretrain_tools.planning.activations import FLASH
from support.ranks_on_fake_cuda import MODELS, ROOT, Counter, Launch, count

EVERYTHING = os.environ.get("STRATEGIES") == "all"
PRODUCTS = {
    "llama": [
        (Sizes(dp_replicate=2, dp_shard=8, tp=4), 0),
        (Sizes(pp=4, dp_shard=4, tp=4), 63),
        (Sizes(dp_shard=8, cp=4, tp=2), 0),
    ],
    "qwen3_moe": [(Sizes(dp_replicate=2, dp_shard=8, tp=4, ep=8), 0)],
}
"""{model: [(sizes, rank to measure)]}. For pipelines, the rank is in the last stage."""
FURTHER = {
    "llama": [
        (Sizes(dp_shard=64), 0),
        (Sizes(dp_replicate=8, dp_shard=8), 0),
        (Sizes(dp_replicate=8, tp=8), 0),
        (Sizes(dp_shard=8, tp=8), 0),
        (Sizes(dp_shard=8, cp=8), 0),
        (Sizes(dp_replicate=4, cp=4, tp=2, dp_shard=2), 0),
        (Sizes(pp=2, dp_replicate=32), 63),
        (Sizes(pp=8, dp_shard=8), 63),
        (Sizes(pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=2), 63),
        (Sizes(pp=4, tp=8, cp=1, dp_replicate=2), 63),
    ],
    "qwen3_moe": [
        (Sizes(dp_shard=64, ep=8), 0),
        (Sizes(dp_replicate=8, dp_shard=8, ep=8), 0),
        (Sizes(dp_replicate=2, dp_shard=8, tp=4), 0),
        (Sizes(dp_shard=16, cp=4, ep=16), 0),
        (Sizes(dp_shard=8, cp=2, tp=4, ep=4), 0),
    ],
}
SHAPE = {"vocab_size": 1024, "num_hidden_layers": 8}
MODELS |= {f"{name} of 64": {**model, **SHAPE} for name, model in MODELS.items()}


class CounterByDimension(Counter):
    """Counts collectives per dimension, and measures peak bytes on the device."""

    def __enter__(self):
        LiveBytes.current.peak = 0
        return super().__enter__()

    def __exit__(self, *exception):
        self.seen.peak_bytes = LiveBytes.current.peak
        return super().__exit__(*exception)

    def name(self, kind: str, group: ProcessGroup) -> str:
        first, second = dist.get_process_group_ranks(_resolve_process_group(group.group_name))[:2]
        return f"{kind} of {group.size()} by {second - first}"


class LiveBytes(TorchDispatchMode):
    """Total bytes of live storages on the device, including those that FSDP resizes."""

    current: "LiveBytes"

    def __init__(self, device_type: str = "cuda"):
        super().__init__()
        self.device_type = device_type
        self.storages: dict[int, tuple[int, weakref.ref]] = {}
        self.total = self.peak = 0
        LiveBytes.current = self

    def __enter__(self):
        resize = torch.UntypedStorage.resize_

        def resized(storage, size):
            resize(storage, size)
            if storage._cdata in self.storages:
                self.add(storage)

        self.patched = mock.patch.object(torch.UntypedStorage, "resize_", resized)
        self.patched.start()
        return super().__enter__()

    def __exit__(self, *exception):
        self.patched.stop()
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # torch calls this again with the inner tensors
        result = func(*args, **(kwargs or {}))
        self.add_all(result)
        return result

    def now(self) -> int:
        return self.total

    def add_all(self, result: Any) -> None:
        """Adds the storages of all tensors in an operator's result."""
        for value in _pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.device.type == self.device_type:
                self.add(value.untyped_storage())
        self.peak = max(self.peak, self.now())

    def add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        before, reference = self.storages.get(key) or (0, weakref.ref(storage, lambda _: self.remove(key)))
        self.storages[key] = size, reference
        self.total += size - before

    def remove(self, key: int) -> None:
        self.total -= self.storages.pop(key)[0]


def name_of(model: str, sizes: Sizes) -> str:
    return " ".join([model, *(f"{name}{size}" for name, size in sizes.named().items())])


def launch_of(model: str, sizes: Sizes, rank: int) -> Launch:
    return Launch(
        "mesh",
        rank,
        tuple((variable(name), str(getattr(sizes, name))) for name in DIMENSIONS),
        layers=SHAPE["num_hidden_layers"],
        model=f"{model} of 64",
        settings=(("loss.backend", "chunked_compiled"), ("compile", "none")),
        attention=FLASH,
        ranks=sizes.world,
    )


def measured(launch: Launch) -> dict[str, Any]:
    with LiveBytes():
        return count(launch, CounterByDimension)


ALL = {model: [*cases, *(FURTHER[model] if EVERYTHING else [])] for model, cases in PRODUCTS.items()}
LAUNCHES = {
    name_of(model, sizes): (sizes, launch_of(model, sizes, rank)) for model in ALL for sizes, rank in ALL[model]
}
OLMOE = json.loads((ROOT / "model_configs/olmoe_7b.json").read_text())
"""OLMoE at full width. Its layers are identical, so two-layer and three-layer models are enough to predict all
sixteen."""
MODELS["olmoe of 64"] = OLMOE
OLMOE_SIZES = [Sizes(dp_shard=8, ep=8), *([Sizes(dp_shard=8)] if EVERYTHING else [])]
OLMOE_LAUNCHES = {
    (sizes, layers): replace(launch_of("olmoe", sizes, 0), layers=layers, length=2048)
    for sizes in OLMOE_SIZES
    for layers in (2, 3)
}
CASES = {name: functools.partial(measured, launch) for name, (_, launch) in LAUNCHES.items()}
CASES |= {f"olmoe {key}": functools.partial(measured, launch) for key, launch in OLMOE_LAUNCHES.items()}
