"""A micro-batch on its way from the shards to the model: narrow until it is on the device, and never waited for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.config import WindowSpec
from pretrain.model.attention import attention_arguments, document_layout

IGNORED = -100
"""Target that counts for nothing."""


@dataclass(frozen=True)
class HostBatch:
    """A micro-batch in host memory; pinned where it goes to a GPU, so that the copy waits for nothing."""

    ids: Tensor
    """(B, T + 1) in the shards' own integer type: a quarter of the bytes of int64."""
    layout: Mapping[str, Tensor] | None
    """See `document_layout`; None: attend over the whole window."""

    def on_device(self, device: torch.device, attention: str, rows: int | None = None) -> dict[str, Any]:
        """The model's arguments; see `model_inputs`."""
        ids = self.ids.to(device, non_blocking=True).to(torch.int64)
        targets = ids[:, 1:].clone(memory_format=torch.contiguous_format)  # one row would be contiguous as it is
        if rows is not None:
            targets[rows:] = IGNORED
        arguments = attention_arguments(self.layout, attention, device) if self.layout is not None else {}
        return {"input_ids_BT": ids[:, :-1].contiguous(), "targets_BT": targets, **arguments}


def host_batch(ids: np.ndarray, window: WindowSpec, *, end_of_document_id: int, device: torch.device) -> HostBatch:
    """Of ids (B, T + 1), each row one `window`, for a model on `device`."""
    layout = document_layout(ids[:, :-1], end_of_document_id) if window.document_mask else None
    batch = HostBatch(torch.from_numpy(ids), layout)
    if device.type != "cuda":
        return batch
    pinned = {name: tensor.pin_memory() for name, tensor in layout.items()} if layout is not None else None
    return HostBatch(batch.ids.pin_memory(), pinned)


def model_inputs(
    ids: np.ndarray,
    window: WindowSpec,
    *,
    end_of_document_id: int,
    device: torch.device,
    attention: str,
    rows: int | None = None,
) -> dict[str, Any]:
    """The model's arguments, on its device, from ids (B, T + 1), each row one `window`.

    Args:
        attention: the model's attn_implementation, which decides in what form the documents reach it.
        rows: only the first `rows` count; the targets of the others are ignored. None: all count.
    """
    batch = host_batch(ids, window, end_of_document_id=end_of_document_id, device=device)
    return batch.on_device(device, attention, rows)
