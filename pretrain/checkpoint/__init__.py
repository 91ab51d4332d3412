"""Checkpoints, mirrors and model export.

Tensors are saved in safetensors files under their Hugging Face parameter names. Checkpoints from earlier versions can
be resumed (docs/checkpoints.md).

    checkpoints: saving, verifying and pruning checkpoints
    mirror_store, mirror_copy, mirror_fetch: access to a run's mirror, copying to it, and starting from it
    mirror_lease: ensures that only one machine trains a mirrored run
    tensor_files: safetensors files and their staging buffers in CPU memory
    run_state: step, token count, rollbacks and other state without tensors
    export, export_check: writing and verifying final/
    average_folder: loads averaged weights with from_pretrained
"""
