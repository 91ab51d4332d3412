"""Models: parameters and forward pass, on one process.

Knows nothing of distribution, optimizers or data. A new model is a JSON in model_configs/; a new architecture is a
file in architectures/ (docs/models.md).

    architectures/: local architectures
    model_config: from a JSON, folder or Hub id to a checked configuration
    build: from a configuration to counts, a model and its initial weights
    pretrained: weights from files
    published_names: tensors as save_pretrained writes them, each expert by itself
    attention, cpu_attention: kernels, document mask, the model's arguments
    kernels: those that a GPU run uses, in words
    positions: rotary positions that change within a run
    loss: the loss without whole logits
    compile, fp8: how layers are compiled; fp8 layers
    routers: mixtures of experts
    width_roles: what of a parameter grows with the width
    small_copy: a small copy of any architecture, and what the library computes with it
"""
