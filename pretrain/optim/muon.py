"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) in the arithmetic that the device is good at.

The mathematics and the names of the state are torch.optim.Muon's, which multiplies in bf16 everywhere. A CPU without
bf16 instructions emulates that, at a fiftieth of its speed in fp32.
"""

import math
from collections.abc import Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor

from pretrain.hardware import missing_bf16

EPS = 1e-7
"""Least Frobenius norm that an update is divided by."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic a x + b x^3 + c x^5: the steepest at zero that keeps singular values within about 0.7 to 1.2."""
BATCH_ELEMENTS = 2**22
"""Matrices of one shape are multiplied together up to so many elements: small products leave cores idle, large ones
do not, and the memory of an update is bounded by this or by the largest matrix."""


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised: the update of a matrix is the nearest to its momentum with equal singular values.

    B <- m B + (1 - m) G;  U = NS((1 - m) G + m B);  W <- (1 - lr weight_decay) W - lr 0.2 sqrt(max(rows, columns)) U.
    The factor gives the update AdamW's root mean square of about 0.2 (Liu et al., arXiv 2502.16982).

    Args:
        params: matrices alone. Raises ValueError for anything else.
        lr: step size, on AdamW's scale.
        momentum: m; the update looks ahead by it once more (Nesterov).
        ns_steps: iterations of `orthogonalized`.
    """

    def __init__(
        self, params: Iterable, lr: float, *, weight_decay: float = 0.1, momentum: float = 0.95, ns_steps: int = 5
    ):
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "ns_steps": ns_steps}
        super().__init__(params, defaults)
        shapes = [tuple(p.shape) for group in self.param_groups for p in group["params"] if p.dim() != 2]
        if shapes:
            raise ValueError(f"Muon updates matrices, not parameters of shape {', '.join(map(str, shapes))}")

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
            for batch in batches_of_one_shape(with_gradient):
                self._update(batch, group)

    def _update(self, parameters: list[torch.Tensor], group: dict) -> None:
        dtype = product_dtype(parameters[0].device)
        directions = [self._direction(parameter, group["momentum"]).to(dtype) for parameter in parameters]
        if len(directions) == 1:
            updates = [orthogonalized(directions[0], group["ns_steps"])]
        else:
            updates = orthogonalized(torch.stack(directions), group["ns_steps"]).unbind()
        for parameter, update in zip(parameters, updates, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            update = update if update.shape == parameter.shape else update.mT
            parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))

    def _direction(self, parameter: torch.Tensor, momentum: float) -> torch.Tensor:
        """What is orthogonalised, with no more rows than columns; the momentum moves on."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
        direction = parameter.grad.lerp(buffer, momentum)
        return direction.mT if direction.size(0) > direction.size(1) else direction


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for hidden matrices and AdamW for the rest, as one optimizer.

    Muon's update is scaled to AdamW's root mean square (Liu et al., arXiv 2502.16982), so one learning rate serves
    both. param_groups and state are those of the two, concatenated.
    """

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW):
        self.muon, self.adamw = muon, adamw
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Groups and state are the same objects: a learning rate written here is what each part reads."""
        split = len(self.muon.param_groups)
        self.muon.param_groups, self.adamw.param_groups = self.param_groups[:split], self.param_groups[split:]
        self.muon.state = self.adamw.state = self.state

    def step(self, closure=None):
        self.muon.step()
        self.adamw.step()

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        self._share()


def batches_of_one_shape(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The matrices in batches of one shape (or its transpose) and of at most BATCH_ELEMENTS, or one by one.

    Sharded matrices come one by one: their products are collective, in the order of the parameters.
    """
    alike: dict[tuple, list[torch.Tensor]] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            yield [parameter]
        else:
            alike.setdefault((parameter.device, *sorted(parameter.shape)), []).append(parameter)
    for batch in alike.values():
        size = max(1, BATCH_ELEMENTS // max(1, batch[0].numel()))
        yield from (batch[first : first + size] for first in range(0, len(batch), size))


def product_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the device has instructions for its products, else fp32."""
    return torch.float32 if missing_bf16(device.type) else torch.bfloat16


def orthogonalized(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """(..., R, C), R <= C, to U S' V^T for U S V^T the singular value decomposition, S' within about 0.7 to 1.2.

    Newton-Schulz iterations X <- a X + (b A + c A^2) X with A = X X^T, in the matrices' dtype, after a division by the
    Frobenius norm, which bounds the largest singular value by one.
    """
    a, b, c = COEFFICIENTS
    multiply_add = torch.addmm if matrices.dim() == 2 else torch.baddbmm
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
