"""Optimizers, and schedules for the learning rate and the batch size.

Schedules are pure functions of the step and keep no state. To add a schedule, write one function and one line in
learning_rate. To add an optimizer, write one class and one line in pretrain/registry.py (see docs/optimizers.md).

    optimizers: optimizer declarations, AdamW, weight decay, state by name, norms
    adafactor, muon, adamw_8bit: Adafactor, Muon, and AdamW with 8-bit moments
    matrix_exchange: gathers sharded matrices for an update
    tiles: parts of a tensor as index ranges
    learning_rate: learning-rate schedules
    scaling_laws: values for `auto`
    batch_ramp: sequences per step
    averaging: a running mean of the weights
"""
