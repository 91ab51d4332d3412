"""Checkpoints, mirrors and model export.

Tensors are saved in safetensors files under their Hugging Face parameter names. Checkpoints from earlier versions can
be resumed (docs/checkpoints.md).

    checkpoints: saving, verifying and pruning checkpoints
    mirror_store, mirror_copy, mirror_fetch: accessing a run's mirror, copying to it, and starting from it
    mirror_lease: ensuring that only one machine trains a mirrored run
    tensor_files: safetensors files and CPU staging buffers
    run_state: step, token count, rollbacks and other state that isn't a tensor
    export, export_check: writing and verifying final/
    average_folder: loading averaged weights with from_pretrained
"""
