"""The memory model: predicts what a process will hold.

Formulas for what has shapes, a trace of the model's own code for activations; nothing here touches a GPU
(docs/strategies.md). tests/memory compares it with real tensors.

    parts: weights, gradients, optimizer, loss, of which every strategy makes its footprint
    activations, compiled: traced activations; those of compiled layers
"""
