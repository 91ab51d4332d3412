"""Optimizers, learning-rate and batch-size schedules, and weight averaging.

Schedules are pure functions of the step. To add a schedule, see learning_rate. To add an optimizer, write a class and
register it in pretrain/registry.py (see docs/optimizers.md).

    optimizers: optimizer interface, AdamW, parameter groups, optimizer state and gradient norm
    adafactor, muon, adamw_8bit: Adafactor, Muon, and AdamW with 8-bit moments
    matrix_exchange: gathers sharded matrices for the update
    tiles: index ranges of tensor shards
    learning_rate: learning-rate schedules
    scaling_laws: values for `auto` settings
    batch_ramp: batch-size schedule
    averaging: weight averaging
"""
