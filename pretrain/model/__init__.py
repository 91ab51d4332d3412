"""Models: parameters and forward pass, on one process.

Independent of distribution, optimizers and data. A new model is a JSON in model_configs/; a new architecture is a
file in architectures/ (docs/own_model.md).

    architectures/: local architectures
    own_code: registers local architectures, and model folders with their own code
    model_config: reads a JSON, folder or Hub ID into a checked configuration
    build: builds a model from a configuration, counts it and initializes its weights
    pretrained: loads weights from files
    published_names: save_pretrained's tensor names, with each expert separately
    attention, cpu_attention: kernels, document mask, the model's keyword arguments
    largest_logits: the largest attention logit of every head
    document_rows: separates documents in mixers other than attention
    kernels: names the kernels of a GPU run
    positions: rotary positions that change within a run
    loss: next-token loss that never materializes all logits
    loss_terms: extensions' loss terms
    compile, fp8: compiled layers, fp8 layers
    routers: MoE routing and its losses
    width_roles: finds which dimensions of a parameter grow with the width
    small_copy: a small copy of any architecture, and transformers' reference results
"""
