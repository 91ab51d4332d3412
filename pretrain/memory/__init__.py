"""The memory model: predicts what a process will hold.

Formulas for what has shapes, a trace of the model's own code for activations; nothing here touches a GPU
(docs/planning.md). tests/memory compares it with real tensors.

    parts: weights, gradients, optimizer, loss
    footprint: what each strategy makes of them
    activations, compiled: traced activations; those of compiled layers
    advice: what to change when memory runs out
"""
