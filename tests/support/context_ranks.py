"""Compares losses and gradients under context parallelism with those from a single process.

    accelerate launch --config_file accelerate_configs/cp.yaml --num_processes 4 ... tests/support/context_ranks.py OUT

Writes JSON to OUT: {case: {quantity: largest difference}}. Loss and gradient differences are relative to the largest
value.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from transformers import AutoConfig

from pretrain.config import WindowSpec
from pretrain.model.attention import IGNORED, model_inputs
from pretrain.model.build import InitialWeights, build_meta_model, build_model
from pretrain.model.compile import checkpoint_activations
from pretrain.model.loss import LanguageModelLoss
from pretrain.optim.optimizers import OPTIMIZERS, ModelShapes, OptimizerBuilder
from pretrain.parallel.mesh import MeshStrategy

LENGTH, END = 64, 1
VISIBLE = 3.0
"""Scaling factor for the initial weights, which are too small for attention to have a visible effect."""
DOCUMENTS = ((3, 13, 40, 8), (64,), (20, 44), (16, 16, 17, 15))
"""Document lengths in each window. With four processes, each process has 16 positions."""
SHAPE = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
MODELS = {
    "llama": {"model_type": "llama", **SHAPE},
    "gpt2": {"model_type": "gpt2", "vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "mistral with a window": {"model_type": "mistral", **SHAPE, "sliding_window": 10},
    "qwen3_moe": {"model_type": "qwen3_moe", **SHAPE, **EXPERTS, "head_dim": 8},
    "olmoe": {"model_type": "olmoe", **SHAPE, **EXPERTS, "num_key_value_heads": 4},
}
CASES = {
    # Fewer key heads than processes.
    "llama, 4": ("llama", 4, "groundwork_sdpa"),
    "llama, 2 x 2": ("llama", 2, "groundwork_sdpa"),
    "llama, 2 x 2, recomputed": ("llama", 2, "groundwork_sdpa"),
    "llama, 4, eager": ("llama", 4, "groundwork_eager"),
    "gpt2, 2 x 2": ("gpt2", 2, "groundwork_sdpa"),
    "mistral with a window, 4": ("mistral with a window", 4, "groundwork_sdpa"),
    "qwen3_moe, 2 x 2": ("qwen3_moe", 2, "groundwork_sdpa"),
    "olmoe, 4": ("olmoe", 4, "groundwork_sdpa"),
}
"""{name: (model, processes per sequence, attention)}."""


def ids_of_documents() -> torch.Tensor:
    """Returns random token IDs, (4, LENGTH + 1), with END at the start of each document."""
    ids = torch.randint(
        END + 1, SHAPE["vocab_size"], (len(DOCUMENTS), LENGTH + 1), generator=torch.Generator().manual_seed(0)
    )
    for row, lengths in enumerate(DOCUMENTS):
        ids[row, np.cumsum((0, *lengths[:-1]))] = END
    return ids


def batch_of(ids: torch.Tensor, attention: str, document_mask: bool = True) -> dict:
    window = WindowSpec(LENGTH, document_mask)
    return model_inputs(ids.numpy(), window, end_of_document_id=END, device=torch.device("cpu"), attention=attention)


def away(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def compare(name: str) -> dict[str, float]:
    kind, parts, attention = CASES[name]
    os.environ["PARALLELISM_CONFIG_CP_SIZE"] = str(parts)
    config = AutoConfig.for_model(**MODELS[kind])
    strategy = MeshStrategy("fp32", SimpleNamespace(batch=SimpleNamespace(no_sync=False)))
    causal_lm = build_meta_model(config, attention=attention)
    checkpoint_activations(causal_lm, "full" if "recomputed" in name else "none")
    settings = SimpleNamespace(name="adamw", learning_rate=0.0)
    scales = {name: VISIBLE for name, parameter in causal_lm.named_parameters() if parameter.dim() > 1}
    weights = InitialWeights(seed=0, scales=scales)
    model = strategy.prepare(LanguageModelLoss(causal_lm), weights, adamw(settings, causal_lm))
    whole = LanguageModelLoss(build_model(config, seed=0, attention=attention))
    torch._foreach_mul_([p.data for name, p in whole.causal_lm.named_parameters() if name in scales], VISIBLE)
    ids, differences = ids_of_documents(), {}
    rows = len(ids) // strategy.data_ranks
    mine = ids[strategy.data_rank * rows :][:rows]
    for document_mask in (True, False):
        model.train()
        whole.zero_grad()
        wanted, _ = whole(**batch_of(ids, attention, document_mask))
        wanted.backward()
        with strategy.accumulate(is_last=True):
            loss, found = model(**batch_of(mine, attention, document_mask))
            strategy.backward(loss)
        dist.all_reduce(found)
        suffix = "" if document_mask else " without document_mask"
        differences[f"loss{suffix}"] = away(found / strategy.ranks.count, wanted.detach())
        gradients = {strategy.name_of[p]: p.grad.full_tensor() for p in strategy.name_of}
        expected = {n: p.grad for n, p in whole.causal_lm.named_parameters()}
        assert gradients.keys() == expected.keys()
        differences[f"gradients{suffix}"] = max(away(gradients[n], expected[n]) for n in gradients)
        strategy.optimizer.zero_grad()
    differences["documents alone"] = max(of_documents(strategy, model, whole, mine, attention))
    return differences


@torch.no_grad()
def of_documents(strategy, model, whole, ids: torch.Tensor, attention: str):
    """Yields the difference between each document's loss within its window and its loss when run separately."""
    model.eval()
    documents = DOCUMENTS[strategy.data_rank * len(ids) :][: len(ids)]
    most = max(map(len, DOCUMENTS))
    for number in range(most):
        batch, alone, length = batch_of(ids, attention), 0.0, 0
        for row, lengths in enumerate(documents):
            start = sum(lengths[:number])
            where = slice(start, start + (lengths[number] if number < len(lengths) else 0))
            kept = batch["targets_BT"][row, where].clone()
            batch["targets_BT"][row] = IGNORED
            batch["targets_BT"][row, where] = kept
            if len(kept):
                logits = whole.causal_lm(input_ids=ids[row : row + 1, where], use_cache=False).logits
                alone, length = alone + F.cross_entropy(logits[0], kept, reduction="sum"), length + len(kept)
        _, found = model(**batch)
        part = batch["targets_BT"].unflatten(1, (strategy.sequence_parts, -1))[:, strategy.part]
        total = found * (part != IGNORED).sum()
        dist.all_reduce(total, group=strategy.mesh.data.get_group("cp"))
        yield abs(total - alone).item() / max(1, length)


class PlainAdamW(OPTIMIZERS["adamw"]):
    """AdamW with a single parameter group."""

    def make(self, parameters, settings, learning_rate, seed, device_type):
        return torch.optim.AdamW([parameter for _, parameter in parameters], lr=learning_rate)


def adamw(settings, causal_lm):
    return OptimizerBuilder(PlainAdamW(ModelShapes.of(causal_lm)), settings, settings.learning_rate, 0, "cpu")


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = {}
    for name in CASES:
        os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        found = [None] * int(os.environ["WORLD_SIZE"])
        differences = compare(name)
        dist.all_gather_object(found, differences)
        results[name] = {key: max(one[key] for one in found) for key in differences}
        AcceleratorState._reset_state(True)
    if os.environ["RANK"] == "0":
        Path(sys.argv[1]).write_text(json.dumps(results))
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)
