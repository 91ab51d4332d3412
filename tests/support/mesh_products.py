"""Combinations of parallel dimensions to test, with their models and pipeline schedules."""

from itertools import product

from pretrain.mesh_sizes import Sizes
from support.tiny_models import TINY_LLAMA, TINY_MOE

MODELS = {
    "dense": TINY_LLAMA | {"num_hidden_layers": 4, "num_key_value_heads": 4},
    "moe": TINY_MOE | {"num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 16},
}
MODELS["few"] = MODELS["moe"] | {"num_experts": 2, "num_experts_per_tok": 1}
"""A model with fewer experts than ranks, so that experts are sharded along another dimension."""
# The first two pipeline cases (TP with tied embeddings, and sharding) once failed with these zero-bubble schedules.
SCHEDULES = ("ZBVZeroBubble", "InterleavedZeroBubble", "Interleaved1F1B", "1F1B", "GPipe", "LoopedBFS")


def products(processes: int) -> dict[str, tuple[str, Sizes]]:
    """Returns {name: (model, sizes)} for all valid combinations of sizes up to 2 (ep: 4) on this many processes."""
    found = {}
    for model, most in (("dense", (1,)), ("moe", (1, 2, 4))):
        for *numbers, ep in product(*[(1, 2)] * 5, most):
            sizes = Sizes(*numbers, ep=ep)
            if sizes.world == processes and sizes.fsdp * sizes.tp % ep == 0:
                found[name_of(model, sizes)] = (model, sizes)
    return found


def name_of(model: str, sizes: Sizes) -> str:
    return " ".join([model, *(f"{name}{size}" for name, size in sizes.named().items())])


def variables(sizes: Sizes) -> dict[str, str]:
    """Returns the variables that the launcher would set."""
    return {f"PARALLELISM_CONFIG_{name.upper()}_SIZE": str(size) for name, size in sizes.named().items()}
