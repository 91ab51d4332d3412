"""Optimizers, and learning rate and batch size by step.

Schedules are pure functions of the step and keep no state. A new schedule is one function and one line in
learning_rate (docs/training.md); a new optimizer one entry in optimizers.

    optimizers: what decays, which optimizers there are, their state by name
    muon: Muon
    learning_rate: schedules
    batch_ramp: sequences per step
    gradient_norm: norms of gradients wherever they are
"""
