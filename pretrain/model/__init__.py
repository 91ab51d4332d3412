"""Models and their forward pass in a single process.

This package doesn't depend on parallelism, optimizers or data. To add a model, write a JSON file in model_configs/. To
add an architecture, write a file in architectures/ (see docs/own_model.md).

    architectures/: local architectures
    own_code: registers local architectures, and model folders with custom code
    model_config: loads and validates configurations from JSON files, folders or Hub IDs
    build: builds models, counts their parameters and initializes their weights
    pretrained: loads weights from files
    published_names: tensor names as written by save_pretrained, with separate experts
    attention, cpu_attention: attention implementations and document masks
    bf16_cpu_attention: calls the C++ kernel of the same name
    largest_logits: each head's largest attention logit
    document_rows: separates documents in mixers other than attention
    kernels: reports which kernels a GPU run uses
    positions: changes rotary positions during a run
    loss: next-token loss that doesn't materialize all logits
    loss_terms: loss terms from extensions
    compile, fp8: compiled layers and fp8 layers
    routers: MoE routing and its losses
    width_roles: parameter dimensions that grow with the model's width
    small_copy: small copies of any architecture, and transformers' reference results
"""
