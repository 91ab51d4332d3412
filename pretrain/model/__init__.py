"""Models: parameters and forward pass in one process.

This package doesn't depend on distribution, optimizers or data. To add a model, write a JSON in model_configs/. To add
an architecture, write a file in architectures/ (see docs/own_model.md).

    architectures/: local architectures
    own_code: registers local architectures, and model folders with their own code
    model_config: reads a JSON, folder or Hub ID into a checked configuration
    build: builds a model from a configuration, counts its parameters and initializes its weights
    pretrained: loads weights from files
    published_names: tensor names as in save_pretrained, with separate experts
    attention, cpu_attention: kernels, document mask, the model's keyword arguments
    largest_logits: each head's largest attention logit
    document_rows: separates documents in mixers other than attention
    kernels: names a GPU run's kernels
    positions: rotary positions that change within a run
    loss: next-token loss that never materializes all logits
    loss_terms: loss terms from extensions
    compile, fp8: compiled layers, fp8 layers
    routers: MoE routing and its losses
    width_roles: finds the dimensions of a parameter that grow with the width
    small_copy: a small copy of any architecture, and transformers' reference results
"""
