"""What a strategy hands out of the model and the optimizer for a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True)
class TensorGroup:
    """Tensors by name, whole, wherever their pieces are. Fetching one is collective: every rank asks in one order."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Self:
        """A group of these tensors: of ordinary ones, which are whole, or of whatever kind the class knows."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return cls(shapes, {name: tensor.dtype for name, tensor in tensors.items()}, tensors)

    def whole(self, name: str, wanted: bool = True) -> torch.Tensor | None:
        """The whole tensor, perhaps the one that trains, where it is; None on a rank that does not want it."""
        return self.tensors[name].detach() if wanted else None

    def fetch(self, name: str, wanted: bool = True) -> torch.Tensor | None:
        """The whole tensor on the host; None on a rank that takes part but does not want it."""
        whole = self.whole(name, wanted)
        return whole.to("cpu") if wanted else None
