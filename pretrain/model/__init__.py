"""Models: parameters and forward pass, on one process.

Knows nothing of distribution, optimizers or data. A new model is a JSON in model_configs/; a new architecture is a
file in architectures/ (docs/models.md).

    architectures/: local architectures
    model_config, build: from JSON to model
    initial_weights, pretrained: initial weights unit by unit, from the seed or from files
    published_names: tensors as save_pretrained writes them, each expert by itself
    inputs: token ids to what the model takes
    attention, cpu_attention: kernels, document mask
    kernels: those that a run uses, in words
    positions: rotary positions that change within a run
    loss: the loss without whole logits
    compile, fp8: how layers are compiled; fp8 layers
    routers, expert_products: routers of mixtures of experts; their products in the run's precision
    flops: what a token costs
    width_roles: what of a parameter grows with the width
    small_copy, reference: a small copy of any architecture, and what the library computes with it
    model_values: values that no model has
"""
