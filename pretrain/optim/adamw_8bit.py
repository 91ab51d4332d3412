"""AdamW with 8-bit moments (Dettmers et al., arXiv 2110.02861), using bitsandbytes kernels.

Each moment has one scale per block of 256 consecutive elements in the flattened tensor. Sharding doesn't change the
update if shard boundaries are aligned with block boundaries (see `unit_rows`).
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

from pretrain.config import Optim
from pretrain.optim.optimizers import OptimizerSpec, local_tensor, sharded_like
from pretrain.optim.tiles import Tile, local_part, tile_of, whole_tile

BLOCK = 256
"""Number of elements per scale."""
MIN_ELEMENTS = 4096
"""Minimum number of elements, before sharding, for 8-bit moments. Smaller tensors use fp32 moments."""
SCALES = ("absmax1", "absmax2")
"""State keys of the scales for the first and second moments."""


def block_count(shape: Sequence[int]) -> int:
    """Returns the number of blocks in a tensor. The last block may be partial."""
    return -(-math.prod(shape) // BLOCK)


def has_blocks(shape: Sequence[int]) -> bool:
    """Returns True if a tensor with this unsharded shape has 8-bit moments."""
    return math.prod(shape) >= MIN_ELEMENTS


def unit_rows(shape: Sequence[int]) -> int:
    """Returns the smallest number of rows that fills complete blocks."""
    return BLOCK // math.gcd(BLOCK, math.prod(shape[1:]))


def table_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the scale table's unsharded shape: (units of `unit_rows` rows, blocks per unit).

    The table is sharded like the parameter.
    """
    unit = unit_rows(shape)
    return -(-shape[0] // unit), unit * math.prod(shape[1:]) // BLOCK


def keeps_blocks(shape: Sequence[int], tile: Tile) -> bool:
    """Returns True if a shard consists of whole rows and starts at a multiple of `unit_rows`."""
    starts = [first for first, _ in tile[0]]
    return tile[1:] == whole_tile(shape[1:]) and len(starts) < 2 and all(row % unit_rows(shape) == 0 for row in starts)


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with 8-bit moments for large tensors.

    A parameter's state consists of `step` and the moments `state1` and `state2`. Large parameters also have the
    dequantization tables `qmap1` and `qmap2`, and the scales named in SCALES (see `scales_for`). The kernels don't
    support `found_inf`, so `step` must not be called with non-finite gradients.

    Args:
        params: parameters or parameter groups. Raises RuntimeError if a DTensor's sharding splits a block.
        lr: learning rate.
    """

    def __init__(
        self, params: Iterable, lr: float, *, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ):
        from bitsandbytes import functional

        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for parameter in [parameter for group in self.param_groups for parameter in group["params"]]:
            shape = tuple(parameter.shape)
            if isinstance(parameter, DTensor) and has_blocks(shape) and not keeps_blocks(shape, tile_of(parameter)):
                raise RuntimeError(
                    f"{parameter.placements} over {parameter.device_mesh} splits blocks of {BLOCK} elements in a "
                    f"parameter of shape {shape}; this should have been rejected before training"
                )
        self._kernels = functional
        self._codes: dict[torch.device, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self._first_state(parameter))
        state["step"] += 1
        weight = local_tensor(parameter)
        if not weight.numel():
            return
        # The kernels ignore strides.
        updated = weight.contiguous()
        gradient = local_tensor(parameter.grad).contiguous()
        first, second = (local_tensor(state[name]) for name in ("state1", "state2"))
        beta1, beta2 = group["betas"]
        given = {"weight_decay": group["weight_decay"], "step": state["step"], "lr": group["lr"], "eps": group["eps"]}
        if has_blocks(parameter.shape):
            blocks = block_count(weight.shape)
            scales = {name: local_tensor(state[name]).view(-1)[:blocks] for name in SCALES}
            self._kernels.optimizer_update_8bit_blockwise(
                "adam", gradient, updated, first, second, beta1, beta2, 0.0, 0.0,
                qmap1=state["qmap1"], qmap2=state["qmap2"], **scales, **given,
            )  # fmt: skip
        else:
            self._kernels.optimizer_update_32bit(
                "adam", gradient, updated, first, beta1, state2=second, beta2=beta2, **given
            )
        if updated is not weight:
            weight.copy_(updated)

    def _first_state(self, parameter: torch.Tensor) -> dict:
        is_large = has_blocks(parameter.shape)
        dtype = torch.uint8 if is_large else torch.float32
        state = {"step": 0, "state1": zeros_for(parameter, dtype), "state2": zeros_for(parameter, dtype)}
        if is_large:
            state |= self._codes_on(parameter.device)
            state |= {name: scales_for(parameter) for name in SCALES}
        return state

    def _codes_on(self, device: torch.device) -> dict[str, torch.Tensor]:
        if device not in self._codes:
            create = self._kernels.create_dynamic_map
            self._codes[device] = {"qmap1": create(signed=True).to(device), "qmap2": create(signed=False).to(device)}
        return self._codes[device]


def zeros_for(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns contiguous zeros with the parameter's shape and sharding."""
    local = torch.zeros(local_tensor(parameter).shape, dtype=dtype, device=parameter.device)
    return sharded_like(parameter, local, tuple(parameter.shape))


def scales_for(parameter: torch.Tensor) -> torch.Tensor:
    """Returns scales initialized to zero.

    The shape is (blocks,). For a DTensor, it is `table_shape`, sharded like the parameter.
    """
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return torch.zeros(block_count(shape), device=parameter.device)
    units, blocks = table_shape(shape)
    mine = -(-parameter.to_local().size(0) // unit_rows(shape))
    return sharded_like(parameter, torch.zeros(mine, blocks, device=parameter.device), (units, blocks))


class AdamW8bitSpec(OptimizerSpec):
    """AdamW with 8-bit moments, for GPUs and CPUs."""

    takes = ("whole", "sharded")

    def problems(self, settings: Optim, device_type: str) -> list[str]:
        if device_type == "cuda" and not torch.cuda.is_available():
            return []  # a plan for another machine
        try:
            import bitsandbytes
        except ImportError:
            return [
                "optim.name: adamw_8bit needs bitsandbytes: pip install -r requirements-gpu.txt; "
                "adamw, muon and adafactor work without it"
            ]
        kernel = "optimizer_update_8bit_blockwise"
        # torch has no public API for this.
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        exists = hasattr(torch.ops.bitsandbytes, kernel)  # not in older versions
        if exists and has_kernel(f"bitsandbytes::{kernel}", device_type.upper()):
            return []
        return [
            f"optim.name: bitsandbytes {bitsandbytes.__version__} has no 8-bit AdamW for {device_type}: "
            "upgrade it, or use adamw, muon or adafactor"
        ]

    pads_state = True

    def make(self, parameters, settings, learning_rate, seed, device_type) -> torch.optim.Optimizer:
        groups = self.groups(parameters, settings.weight_decay)
        return AdamW8bit(groups, lr=learning_rate, betas=settings.betas, eps=settings.eps)

    def state_shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        shape = self.model.shapes[name]
        state = {"step": (), "state1": shape, "state2": shape}
        if has_blocks(shape):
            state |= {"qmap1": (256,), "qmap2": (256,), **dict.fromkeys(SCALES, (block_count(shape),))}
        return state

    def placed(self, key: str, value: torch.Tensor, parameter: torch.Tensor, group: dict) -> torch.Tensor | int:
        if key == "step":
            return int(value)
        if key in SCALES and isinstance(parameter, DTensor):
            scales = scales_for(parameter)
            table = torch.zeros(scales.shape)
            table.view(-1)[: value.numel()] = value
            scales.to_local().copy_(local_part(table, scales))
            return scales
        return value.to(parameter.device, copy=True)
