"""Which parameters decay, the optimizers, and their state by parameter name."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from pretrain import config
from pretrain.errors import InputError, did_you_mean
from pretrain.model.build import embedding_parameter_names
from pretrain.optim.muon import Muon

NamedParameters = list[tuple[str, torch.nn.Parameter]]


def build_optimizer(
    named_parameters: NamedParameters,
    *,
    full_shapes: Mapping[str, tuple[int, ...]],
    no_decay: set[str],
    name: str,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    seed: int,
    device_type: str,
) -> torch.optim.Optimizer:
    """The optimizer, with weight decay on matrices alone.

    Args:
        full_shapes: {name: shape of the whole parameter}. Whether something is a matrix is decided by these: under
            ZeRO-3 every parameter of the running model is empty.
        no_decay: names of matrices that do not decay: the embeddings.
        seed: of adafactor's stochastic rounding.
        device_type: where it will run; decides on fused kernels.

    Raises InputError for a name that is unknown or that the device cannot run.
    """
    if name not in OPTIMIZERS:
        raise InputError(f"optim.name: {name!r} is unknown{did_you_mean(name, OPTIMIZERS)}")
    matrices = [(n, p) for n, p in named_parameters if len(full_shapes[n]) >= 2 and n not in no_decay]
    others = [(n, p) for n, p in named_parameters if len(full_shapes[n]) < 2 or n in no_decay]
    settings = {"lr": learning_rate, "betas": tuple(betas), "eps": eps, "device_type": device_type, "seed": seed}
    settings["full_shapes"] = full_shapes
    return OPTIMIZERS[name](matrices, others, weight_decay, settings)


def optimizer_builder(
    settings: config.Optim, causal_lm: torch.nn.Module, learning_rate: float, *, seed: int, device_type: str
) -> Callable[[NamedParameters], torch.optim.Optimizer]:
    """`build_optimizer` for a model on the meta device: strategies call it with the parameters that they update."""
    return partial(
        build_optimizer,
        full_shapes={name: tuple(parameter.shape) for name, parameter in causal_lm.named_parameters()},
        no_decay=embedding_parameter_names(causal_lm),
        name=settings.name,
        learning_rate=learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        seed=seed,
        device_type=device_type,
    )


def parameter_dtype(settings: config.Optim) -> torch.dtype:
    """Of the parameters that an optimizer updates: fp32 masters, or bf16 where it rounds stochastically."""
    return torch.bfloat16 if settings.stochastic_rounding else torch.float32


def groups_of(matrices: NamedParameters, others: NamedParameters, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices decay, the rest does not; empty groups are left out."""
    groups = [
        {"params": [parameter for _, parameter in matrices], "weight_decay": weight_decay},
        {"params": [parameter for _, parameter in others], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(
    matrices: NamedParameters, others: NamedParameters, weight_decay: float, settings: dict
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101), fused where the device has the kernel."""
    return torch.optim.AdamW(
        groups_of(matrices, others, weight_decay),
        lr=settings["lr"],
        betas=settings["betas"],
        eps=settings["eps"],
        fused=settings["device_type"] in ("cpu", "cuda"),
    )


def adamw_8bit(matrices: NamedParameters, others: NamedParameters, weight_decay: float, settings: dict):
    """AdamW with 8-bit moments (Dettmers et al., arXiv 2110.02861), from bitsandbytes, on a GPU or a CPU."""
    try:
        import bitsandbytes
    except ImportError:
        raise InputError(
            "optim.name: adamw_8bit needs bitsandbytes: pip install bitsandbytes; "
            "adamw, muon and adafactor run without it"
        ) from None
    kernel = "bitsandbytes::optimizer_update_8bit_blockwise"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(kernel, settings["device_type"].upper()):
        raise InputError(
            f"optim.name: bitsandbytes {bitsandbytes.__version__} has no 8-bit AdamW for {settings['device_type']}: "
            "upgrade it, or use adamw, muon or adafactor"
        )
    return bitsandbytes.optim.AdamW8bit(
        groups_of(matrices, others, weight_decay), lr=settings["lr"], betas=settings["betas"], eps=settings["eps"]
    )


def adafactor(matrices: NamedParameters, others: NamedParameters, weight_decay: float, settings: dict) -> "Adafactor":
    return Adafactor(groups_of(matrices, others, weight_decay), lr=settings["lr"], seed=settings["seed"])


def muon(matrices: NamedParameters, others: NamedParameters, weight_decay: float, settings: dict) -> "MuonWithAdamW":
    """Muon for the hidden matrices; AdamW for embeddings, the output head, norms and biases."""
    hidden = [(n, p) for n, p in matrices if len(settings["full_shapes"][n]) == 2 and not is_output_head(n)]
    names = {name for name, _ in hidden}
    heads = [(n, p) for n, p in matrices if n not in names]
    if not hidden:
        raise InputError("optim.name: muon finds no hidden matrices in this model; use adamw")
    return MuonWithAdamW(
        Muon([parameter for _, parameter in hidden], lr=settings["lr"], weight_decay=weight_decay),
        adamw(heads, others, weight_decay, settings),
    )


def is_output_head(name: str) -> bool:
    return name.split(".")[0] in ("lm_head", "embed_out", "output")


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": adamw,
    "adafactor": adafactor,
    "muon": muon,
    "adamw_8bit": adamw_8bit,
}


class Adafactor(torch.optim.Optimizer):
    """Adafactor (Shazeer and Stern, arXiv 1804.04235) with a given learning rate and no momentum.

    The second moment of a matrix is kept as its row and column means. Parameters in bf16 are updated with stochastic
    rounding: up or down at random so that the expectation is exact, which keeps small updates from being lost without
    an fp32 copy. The random bits follow from (seed, step, position of the parameter), so a resumed run repeats them.

    Args:
        lr: step size, relative to a root mean square of one of the clipped update.
        clip: largest root mean square of an update.
        decay_exponent: the second moment's decay at step t is 1 - t^-decay_exponent.
        eps: added to squared gradients.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float,
        *,
        weight_decay: float = 0.0,
        clip: float = 1.0,
        decay_exponent: float = 0.8,
        eps: float = 1e-30,
        seed: int = 0,
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "clip": clip})
        self.decay_exponent, self.eps, self.seed = decay_exponent, eps, seed

    @torch.no_grad()
    def step(self, closure=None):
        position = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                position += 1
                if parameter.grad is not None:
                    self._update(parameter, group, position)

    def _update(self, parameter: torch.Tensor, group: dict, position: int) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self.fresh_state(parameter))
        state["step"] += 1
        step = int(state["step"].item())
        gradient = parameter.grad.float()
        beta = 1.0 - step**-self.decay_exponent
        squared = gradient.square().add_(self.eps)
        if "row" in state:
            state["row"].lerp_(squared.mean(-1), 1 - beta)
            state["column"].lerp_(squared.mean(-2), 1 - beta)
            row = state["row"] / state["row"].mean(-1, keepdim=True)
            update = gradient * row.rsqrt().unsqueeze(-1) * state["column"].rsqrt().unsqueeze(-2)
        else:
            state["variance"].lerp_(squared, 1 - beta)
            update = gradient * state["variance"].rsqrt()
        rms = update.norm() / math.sqrt(update.numel())
        update.div_(torch.clamp(rms / group["clip"], min=1.0))
        fresh = parameter.float()
        fresh.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        if parameter.dtype == torch.bfloat16:
            fresh = round_stochastically(fresh, seed_of(self.seed, step, position))
        parameter.copy_(fresh)

    def fresh_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """State before the first step: {step, row, column} of a matrix, {step, variance} of anything else."""
        zeros = {"device": parameter.device, "dtype": torch.float32}
        state = {"step": torch.zeros((), dtype=torch.float32)}  # on the host, where the next seed is made from it
        if parameter.dim() >= 2:
            state["row"] = torch.zeros(parameter.shape[:-1], **zeros)
            state["column"] = torch.zeros(parameter.shape[:-2] + parameter.shape[-1:], **zeros)
        else:
            state["variance"] = torch.zeros(parameter.shape, **zeros)
        return state


def seed_of(*parts: int) -> int:
    """A 63-bit seed from integers."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def round_stochastically(values: torch.Tensor, seed: int) -> torch.Tensor:
    """fp32 to bf16, up or down with the probabilities that make the expectation exact.

    bf16 is the upper half of fp32's bits: adding a uniform 16-bit number before cutting the lower half off carries
    into the upper half with exactly the right probability, for either sign.
    """
    generator = torch.Generator(values.device).manual_seed(seed)
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, generator=generator, device=bits.device, dtype=torch.int32)
    finite = values.isfinite()
    rounded = ((bits + noise) & -65536).view(torch.float32)
    return torch.where(finite, rounded, values).to(torch.bfloat16)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for hidden matrices and AdamW for the rest, as one optimizer.

    Muon's update is scaled to AdamW's root mean square (Liu et al., arXiv 2502.16982), so one learning rate serves
    both. param_groups and state are those of the two, concatenated.
    """

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer):
        self.parts = (muon, adamw)
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        # The groups are shared objects: a learning rate written here is what each part reads.
        split = len(muon.param_groups)
        muon.param_groups, adamw.param_groups = self.param_groups[:split], self.param_groups[split:]
        muon.state = adamw.state = self.state

    def step(self, closure=None):
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        split = len(self.parts[0].param_groups)
        self.parts[0].param_groups, self.parts[1].param_groups = self.param_groups[:split], self.param_groups[split:]
        for part in self.parts:
            part.state = self.state


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """What was built, in words: 'AdamW (fused), weight decay on 5,933,000 of 5,934,300 parameters'."""
    inner = getattr(optimizer, "optimizer", optimizer)
    decayed = others = 0
    for group in inner.param_groups:
        elements = sum(getattr(p, "ds_numel", p.numel()) for p in group["params"])  # ZeRO-3's parameters are empty
        decayed, others = (decayed + elements, others) if group["weight_decay"] else (decayed, others + elements)
    fused = " (fused)" if any(group.get("fused") for group in inner.param_groups) else ""
    return f"{type(inner).__name__}{fused}, weight decay on {decayed:,} of {decayed + others:,} parameters"


def optimizer_state_by_name(
    optimizer: torch.optim.Optimizer, name_of: Mapping[torch.Tensor, str]
) -> dict[str, torch.Tensor]:
    """{'<parameter>.<state>': tensor} of everything the optimizer keeps; numbers become 0-dimensional tensors."""
    return {
        f"{name_of[parameter]}.{key}": value if torch.is_tensor(value) else torch.tensor(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if value is not None
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, name_of: Mapping[torch.Tensor, str], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Puts saved state into an optimizer that has not stepped yet, to the last bit.

    Moments go where their parameter is; `step` stays on the host unless a kernel wants it on the device. Parameters
    that were never updated have no state and get none, if that holds for all. Raises InputError with everything that
    is missing, unexpected or of another shape, before anything is changed.
    """
    if not tensors:
        return
    wanted: dict[str, tuple[torch.Tensor, dict, str, tuple[int, ...]]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                for key, shape in _state_shapes(optimizer, group, parameter).items():
                    wanted[f"{name_of[parameter]}.{key}"] = (parameter, group, key, tuple(shape))
    _check_state(type(optimizer).__name__, {name: entry[3] for name, entry in wanted.items()}, tensors)
    for name, (parameter, group, key, _) in wanted.items():
        optimizer.state[parameter][key] = _placed(optimizer, group, parameter, key, tensors[name])


def _check_state(optimizer_name: str, wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor]):
    missing, unexpected = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    reshaped = [n for n in wanted.keys() & tensors.keys() if tuple(tensors[n].shape) != wanted[n]]
    found = {"missing": missing, "unexpected": unexpected, "of another shape": sorted(reshaped)}
    problems = [f"{len(names)} {kind} ({', '.join(names[:4])})" for kind, names in found.items() if names]
    if problems:
        raise InputError(
            f"this optimizer state is not that of {optimizer_name} on this model: {'; '.join(problems)}; "
            "resume with the optimizer and the model that saved it"
        )


def _state_shapes(optimizer: torch.optim.Optimizer, group: dict, parameter: torch.Tensor) -> dict[str, tuple]:
    """{name: shape} of what the optimizer keeps for a parameter once it has stepped."""
    if isinstance(optimizer, Adafactor):
        return {key: value.shape for key, value in optimizer.fresh_state(parameter).items()}
    if "ns_steps" in group:
        return {"momentum_buffer": parameter.shape}
    if _is_8bit(optimizer):
        state = {"step": (), "state1": parameter.shape, "state2": parameter.shape}
        if parameter.numel() >= optimizer.args.min_8bit_size:
            blocks = -(-parameter.numel() // 256)
            state |= {"qmap1": (256,), "qmap2": (256,), "absmax1": (blocks,), "absmax2": (blocks,)}
        return state
    return {"step": (), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}


def _placed(optimizer: torch.optim.Optimizer, group: dict, parameter: torch.Tensor, key: str, value: torch.Tensor):
    if key != "step":
        return value.to(parameter.device, copy=True)
    if _is_8bit(optimizer):
        return int(value)
    return value.to(parameter.device, copy=True) if group.get("fused") or group.get("capturable") else value.clone()


def _is_8bit(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("bitsandbytes")
