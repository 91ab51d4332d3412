"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) for sharded and fused weights.

The math and state names match torch.optim.Muon, which always uses bf16 matmuls. On a CPU without bf16 instructions,
these are up to 37 times slower than fp32 matmuls.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch

from pretrain.config import Optim
from pretrain.hardware import missing_bf16
from pretrain.optim.matrix_exchange import HiddenMatrix, Holders, MatrixPiece, pieces_of, replace_whole_matrices
from pretrain.optim.optimizers import AdamWSpec, local_tensor

EPS = 1e-7
"""Lower limit for the Frobenius norm, to avoid division by zero."""
BATCH_ELEMENTS = 2**22
"""Maximum number of elements in a batch of same-shape matrices. Limits the memory for an update."""

Quintic = tuple[float, float, float]
"""Coefficients a, b and c of a x + b x^3 + c x^5."""
SAFETY = 1.01
"""Polar Express's safety factor. bf16 rounding can push singular values above 1."""
POLAR_EXPRESS: tuple[Quintic, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
"""Optimal sequence of quintics for singular values from 1e-3 to 1 (Amsel et al., arXiv 2505.16932, algorithm 1)."""


def divided(quintic: Quintic, by: float) -> Quintic:
    """Substitutes x / by for x in the polynomial."""
    a, b, c = quintic
    return a / by, b / by**3, c / by**5


COEFFICIENTS: dict[str, tuple[Quintic, ...]] = {
    # Maximizes the slope at zero. The singular values end up between about 0.7 and 1.2.
    "jordan": ((3.4445, -4.7750, 2.0315),),
    # The first polynomial includes the safety factor twice: once for itself, once for the division by the norm.
    "polar_express": (
        divided(POLAR_EXPRESS[0], SAFETY * SAFETY),
        *(divided(quintic, SAFETY) for quintic in POLAR_EXPRESS[1:]),
        (1.875, -1.25, 0.375),
    ),
}
"""{name: one quintic per iteration}. Additional iterations repeat the last quintic."""


class Muon(torch.optim.Optimizer):
    """Updates each matrix with its orthogonalized Nesterov momentum.

    B <- m B + (1 - m) G;  U = NS((1 - m) G + m B);  W <- (1 - lr weight_decay) W - lr 0.2 sqrt(max(rows, columns)) U.
    The factor 0.2 sqrt(max(rows, columns)) gives updates an RMS of about 0.2, like AdamW (Liu et al., arXiv
    2502.16982).

    `step` overwrites the gradients. `grad_scale` and `found_inf` work as in torch's fused optimizers. `copies` is the
    group of ranks with replicas of the matrices. These ranks share the work.

    Args:
        params: matrices. Raises ValueError for other shapes.
        lr: learning rate, on the same scale as AdamW's.
        momentum: m in the formulas above.
        ns_steps: number of Newton-Schulz iterations.
        coefficients: key in COEFFICIENTS.
        matrices: descriptions of split or stacked parameters. All other parameters are updated as single matrices.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    copies: Holders | None = None

    def __init__(
        self,
        params: Iterable,
        lr: float,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        ns_steps: int = 5,
        coefficients: str = "jordan",
        matrices: Mapping[torch.Tensor, HiddenMatrix] | None = None,
    ):
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, defaults | {"ns_steps": ns_steps, "coefficients": coefficients})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.matrices = {p: HiddenMatrix(tuple(p.shape)) for p in parameters} | dict(matrices or {})
        if shapes := [matrix.shape for matrix in self.matrices.values() if len(matrix.shape) != 2]:
            raise ValueError(f"Muon supports only matrices, got parameters of shape {', '.join(map(str, shapes))}")
        self.placed: dict[torch.Tensor, list[MatrixPiece]] = {}
        """{tensor: shards in it}. Set by strategies that shard parameters or flatten them into one tensor."""
        self._pieces: dict[tuple[torch.Tensor, ...], list[MatrixPiece]] = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if with_gradient := [parameter for parameter in group["params"] if parameter.grad is not None]:
                self._update(with_gradient, group)

    def _update(self, parameters: list[torch.Tensor], group: dict) -> None:
        weights = []
        updates = []
        momenta = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
            weights.append(local_tensor(parameter))
            updates.append(local_tensor(parameter.grad))
            momenta.append(local_tensor(state["momentum_buffer"]))
        decay = 1 - group["lr"] * group["weight_decay"]
        if self.grad_scale is not None:
            torch._foreach_div_(updates, self.grad_scale.to(updates[0].device))
        if self.found_inf is not None:
            skips = self.found_inf.to(updates[0].device).bool()
            for update, momentum in zip(updates, momenta, strict=True):
                torch.where(skips, momentum, update, out=update)  # the lerp below then leaves the momentum unchanged
            decay = torch.where(skips, 1.0, decay)
        torch._foreach_lerp_(momenta, updates, 1 - group["momentum"])
        torch._foreach_lerp_(updates, momenta, group["momentum"])
        pieces = self._pieces_in(parameters)
        coefficients = iterations(group["coefficients"], group["ns_steps"])
        replace_whole_matrices(pieces, updates, product_dtype, lambda wholes: orthogonalize_all(wholes, coefficients))
        if self.found_inf is not None:
            torch._foreach_mul_(updates, (~skips).float())
        torch._foreach_mul_(weights, decay)
        for piece in pieces:
            if piece.is_here:
                factor = group["lr"] * update_scale(piece.matrix)
                piece.part(weights).add_(piece.part(updates), alpha=-factor)

    def _pieces_in(self, parameters: list[torch.Tensor]) -> list[MatrixPiece]:
        """Returns this rank's matrix shards in these tensors. The result is cached."""
        key = tuple(parameters)
        if key not in self._pieces:
            found = []
            for index, parameter in enumerate(parameters):
                pieces = self.placed.get(parameter)
                if pieces is None:
                    holders = self.copies or Holders(None, parameter.device)
                    pieces = pieces_of(self.matrices[parameter], holders)
                found += [replace(piece, tensor=index) for piece in pieces]
            self._pieces[key] = found
        return self._pieces[key]


class MuonWithAdamW(torch.optim.Optimizer):
    """Combines Muon for hidden matrices and AdamW for all other parameters in one optimizer.

    `param_groups` and `state` contain both optimizers' groups and state. `adamw` is None without other parameters.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW | None):
        self.muon = muon
        self.parts = (muon,) if adamw is None else (muon, adamw)
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._step_supports_amp_scaling = adamw is None or getattr(adamw, "_step_supports_amp_scaling", False)

    def step(self, closure=None):
        for part in self.parts:
            # A strategy, or loading a checkpoint, may replace the combined optimizer's groups and state.
            part.param_groups = [g for g in self.param_groups if ("ns_steps" in g) == (part is self.muon)]
            part.state = self.state
            part.grad_scale = self.grad_scale
            part.found_inf = self.found_inf
            part.step()


def update_scale(matrix: HiddenMatrix) -> float:
    """Returns the scale of a matrix's update, or the largest scale of its blocks if it is split."""
    rows, columns = matrix.shape
    if matrix.blocks:
        rows, columns = (max(matrix.blocks), columns) if matrix.block_dim == 0 else (rows, max(matrix.blocks))
    return 0.2 * math.sqrt(max(rows, columns))


def orthogonalize_all(matrices: list[tuple[torch.Tensor, HiddenMatrix]], coefficients: Sequence[Quintic]) -> None:
    """Orthogonalizes matrices or their blocks in place, and scales each block relative to `update_scale`."""
    blocks = []
    relative = []
    for whole, matrix in matrices:
        for block in matrix.split(whole):
            blocks.append(block)
            relative.append(0.2 * math.sqrt(max(block.shape)) / update_scale(matrix))
    for batch in batches_of_one_shape(blocks):
        # Transposing tall matrices makes X X^T smaller.
        wide = [block.mT if block.size(0) > block.size(1) else block for block in (blocks[index] for index in batch)]
        if len(batch) == 1:
            results = [orthogonalized(wide[0].to(product_dtype(wide[0].device)), coefficients)]
        else:
            stack = torch.empty(len(wide), *wide[0].shape, dtype=product_dtype(wide[0].device), device=wide[0].device)
            torch._foreach_copy_(list(stack.unbind()), wide)
            results = list(orthogonalized(stack, coefficients).unbind())
        torch._foreach_copy_(wide, results)
        for index, block in zip(batch, wide, strict=True):
            if relative[index] != 1:
                block.mul_(relative[index])


def batches_of_one_shape(matrices: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Yields batches of indices. A batch's matrices have the same shape, up to transposition."""
    alike: dict[tuple, list[int]] = {}
    for index, matrix in enumerate(matrices):
        alike.setdefault((matrix.device, *sorted(matrix.shape)), []).append(index)
    for batch in alike.values():
        size = max(1, BATCH_ELEMENTS // max(1, matrices[batch[0]].numel()))
        yield from (batch[first : first + size] for first in range(0, len(batch), size))


def product_dtype(device: torch.device) -> torch.dtype:
    """Returns bf16 if the device has bf16 matmul instructions, otherwise fp32."""
    return torch.float32 if missing_bf16(device.type) else torch.bfloat16


def iterations(name: str, steps: int) -> list[Quintic]:
    """Returns one polynomial per iteration."""
    quintics = COEFFICIENTS[name]
    return [quintics[min(step, len(quintics) - 1)] for step in range(steps)]


def orthogonalized(matrices: torch.Tensor, coefficients: Sequence[Quintic]) -> torch.Tensor:
    """Approximately orthogonalizes matrices: the SVD U S V^T becomes U S' V^T, with S' close to 1.

    Divides by the Frobenius norm, so that no singular value exceeds 1, then runs Newton-Schulz iterations
    X <- a X + (b A + c A^2) X with A = X X^T in the matrices' dtype. Shape: (..., R, C) with R <= C.
    """
    multiply_add = torch.addmm if matrices.dim() == 2 else torch.baddbmm
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class MuonSpec(AdamWSpec):
    """Muon for hidden matrices, and AdamW for embeddings, the output head, norms and biases."""

    takes = ("whole", "sharded", "pieces")
    runs_from_disk = False
    shares_work = True
    relative_learning_rate = 2.0
    min_batch_factor = 0.5  # docs/quality.md has the measurements
    updates_in_bf16 = True
    clips_heads = True

    def problems(self, settings: Optim, device_type: str) -> list[str]:
        hidden = [name for name in self.model.shapes if self.model.is_hidden_matrix(name)]
        if not hidden:
            return ["optim.name: this model has no hidden matrices for muon; use adamw"]
        problems = []
        fitting = {name: pattern_of(name, settings.muon.split_matrices) for name in hidden}
        for pattern, blocks in settings.muon.split_matrices.items():
            whole = {name: self.matrix(name, {}) for name in hidden if fitting[name] == pattern}
            outputs = {name: matrix.shape[matrix.block_dim] for name, matrix in whole.items()}
            wrong = [name for name, size in outputs.items() if size != sum(block_sizes(blocks, size))]
            if not outputs:
                problems.append(
                    f"optim.muon.split_matrices: {pattern} matches no hidden matrix of this model, or only "
                    f"matrices that earlier patterns also match; the first hidden matrix is {hidden[0]}"
                )
            if wrong:
                given = f"{blocks} equal blocks" if isinstance(blocks, int) else f"{sum(blocks)}, the sum of {blocks}"
                problems.append(
                    f"optim.muon.split_matrices: {pattern}: {wrong[0]} has {outputs[wrong[0]]} outputs, "
                    f"which doesn't match {given}"
                )
        return problems

    def matrix(self, name: str, blocks_of: Mapping[str, int | list[int]]) -> HiddenMatrix:
        """Describes a hidden matrix and its blocks. Without a matching pattern, only fused gate and up projections are
        split.

        blocks_of: `optim.muon.split_matrices`.
        """
        *stack, rows, columns = self.model.shapes[name]
        halves_dim, alternates = self.model.stacks.get(name, (None, False))
        dim = 1 if name in self.model.transposed or halves_dim == 1 else 0
        pattern = pattern_of(name, blocks_of)
        blocks = (1 if halves_dim is None else 2) if pattern is None else blocks_of[pattern]
        sizes = block_sizes(blocks, (rows, columns)[dim])
        return HiddenMatrix(
            (rows, columns),
            blocks=tuple(sizes) if len(sizes) > 1 else (),
            block_dim=dim,
            alternates=alternates and pattern is None,
            stacked=math.prod(stack),
        )

    def make(self, parameters, settings, learning_rate, seed, device_type) -> torch.optim.Optimizer:
        own = settings.muon
        hidden = {
            p: self.matrix(name, own.split_matrices) for name, p in parameters if self.model.is_hidden_matrix(name)
        }
        matrices = [(name, parameter) for name, parameter in parameters if parameter in hidden]
        others = [(name, parameter) for name, parameter in parameters if parameter not in hidden]
        muon = Muon(
            self.groups_by_rate(matrices, settings.weight_decay, orthogonalized=True),
            lr=learning_rate,
            ns_steps=own.ns_steps,
            coefficients=own.ns_coefficients,
            matrices=hidden,
        )
        # A pipeline stage may have only matrices, as in OLMo, whose norms have no weights.
        adamw = super().make(others, settings, learning_rate, seed, device_type) if others else None
        return MuonWithAdamW(muon, adamw)

    def state_shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        if self.model.is_hidden_matrix(name):
            return {"momentum_buffer": self.model.shapes[name]}
        return super().state_shapes(name)


def block_sizes(blocks: int | list[int], total: int) -> list[int]:
    """Returns the block sizes. `blocks` is a list of sizes or a number of equal blocks."""
    return [total // blocks] * blocks if isinstance(blocks, int) else blocks


def pattern_of(name: str, patterns: Iterable[str]) -> str | None:
    """Returns the first pattern that matches a parameter name, or None."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
