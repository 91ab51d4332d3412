"""Optimizers, and learning rate and batch size by step.

Schedules are pure functions of the step and keep no state. A new schedule is one function and one line in
learning_rate, a new optimizer one class and one line in optimizers (docs/training.md).

    optimizers: which optimizers there are, what each keeps and needs, what decays, their state by name, norms
    adafactor, muon: Adafactor and Muon
    matrix_exchange: matrices in parts on several processes, put together for an update
    learning_rate: schedules
    scaling_laws: what `auto` stands for
    batch_ramp: sequences per step
    averaging: a running mean of the weights
"""
