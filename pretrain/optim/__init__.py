"""Optimizers, and learning rate and batch size by step.

Schedules are pure functions of the step and keep no state. A new schedule is one function and one line in
learning_rate, a new optimizer one class and one line in pretrain/registry.py (docs/optimizers.md).

    optimizers: declarations of optimizers, AdamW, weight decay, state by name, norms
    adafactor, muon, adamw_8bit: Adafactor, Muon, and AdamW with 8-bit moments
    matrix_exchange: gathers sharded matrices for an update
    tiles: parts of a tensor as index ranges
    learning_rate: schedules
    scaling_laws: values of `auto`
    batch_ramp: sequences per step
    averaging: a running mean of the weights
"""
