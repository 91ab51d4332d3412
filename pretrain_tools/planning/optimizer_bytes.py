"""Predicts an optimizer's state, temporary memory and communication from a model's shapes.

Optimizers not covered here are assumed to need only their `state_shapes`.
"""

import math
from dataclasses import replace

from pretrain.hardware import missing_bf16
from pretrain.optim.adafactor import DRAWN_TOGETHER, AdafactorSpec
from pretrain.optim.adamw_8bit import AdamW8bitSpec, block_count, has_blocks
from pretrain.optim.matrix_exchange import BUCKET_ELEMENTS
from pretrain.optim.muon import BATCH_ELEMENTS, MuonSpec
from pretrain.optim.optimizers import ModelShapes, OptimizerSpec

FP32 = 4
BF16 = 2


def with_experts_in_parts(model: ModelShapes, shares: int) -> ModelShapes:
    """Returns the shapes with 1/shares of every layer's experts, or without experts if `shares` is 0."""
    shapes = {
        name: ((shape[0] // shares if shares else 0), *shape[1:]) if name in model.experts else shape
        for name, shape in model.shapes.items()
    }
    return replace(model, shapes=shapes)


def state_elements(spec: OptimizerSpec) -> float:
    """Returns the size of the state in fp32 elements."""
    if isinstance(spec, AdamW8bitSpec):  # ignores the shared table of code values
        return sum(
            math.prod(shape) * 2 / FP32 + 2 * block_count(shape) if has_blocks(shape) else 2 * math.prod(shape)
            for shape in spec.model.shapes.values()
        )
    shapes = (shape for name in spec.model.shapes for shape in spec.state_shapes(name).values())
    return sum(math.prod(shape) for shape in shapes if shape)


def update_bytes(spec: OptimizerSpec, device_type: str, weights_in_bf16: bool, form: str, processes: int) -> float:
    """Returns the temporary memory of an update in bytes.

    Args:
        form: how the parameters are stored (see `OptimizerSpec.takes`).
        processes: number of processes that share the parameters.
    """
    if isinstance(spec, AdafactorSpec):
        elements = list(map(math.prod, spec.model.shapes.values()))
        share = processes if form == "sharded" else 1
        # Squared gradients, and full rows gathered from flat shards.
        squares = FP32 * max(elements) / share * (2 if form == "pieces" else 1)
        if not weights_in_bf16:
            return squares
        # fp32 copies of a weight and its gradient, or of all gradients if reduction is deferred.
        copies = (sum(elements) if share > 1 else max(elements)) / share + max(elements) / share
        drawn = 24 * min(DRAWN_TOGETHER, max(elements) / share)
        return FP32 * copies + max(squares, BF16 * max(elements) / share + drawn)
    if not isinstance(spec, MuonSpec):
        return 0.0
    # A batch of matrices and four matmul results of the same shape.
    hidden = _hidden_elements(spec)
    largest = max(hidden, default=0)
    multiplied = FP32 if device_type == "cpu" and missing_bf16("cpu") else BF16
    products = 5 * max(largest, min(BATCH_ELEMENTS, sum(hidden)))
    if processes == 1 or form == "stage":
        return multiplied * products
    # Per bucket, a process holds either all results, or its own shards, the received shards and the full matrices.
    bucket = max(largest, min(BUCKET_ELEMENTS, sum(hidden) / processes))
    return multiplied * (products + bucket * (processes + 1 if form == "whole" else 3))


def exchanged_bytes(spec: OptimizerSpec, form: str, processes: int) -> float:
    """Returns the bytes that each process sends per update on GPUs."""
    if isinstance(spec, AdafactorSpec) and form not in ("whole", "stage"):
        return 2 * FP32 * state_elements(spec) * (processes - 1) / processes
    if isinstance(spec, MuonSpec) and form != "stage":
        part = sum(_hidden_elements(spec)) / processes
        return BF16 * part * (processes - 1) / (1 if form == "whole" else processes / 2)
    return 0.0


def _hidden_elements(spec: MuonSpec) -> list[int]:
    """Returns the number of elements of each hidden matrix."""
    hidden = [shape for name, shape in spec.model.shapes.items() if spec.model.is_hidden_matrix(name)]
    return [math.prod(shape[-2:]) for shape in hidden for _ in range(math.prod(shape[:-2]))]
