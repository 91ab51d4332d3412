"""Saved state: complete or absent, by Hugging Face parameter name, without pickle.

The format is a promise: checkpoints of earlier versions can be resumed (docs/training.md).

    checkpoints: saving, verifying, pruning
    mirror_store, mirror_copy, mirror_fetch: the run elsewhere: what is there, copying, a start without a disk
    tensor_files: named tensors on disk, and in host memory before that
    run_state: where a run stands
    export, export_check: the finished model; is it the trained one
    average_folder: the average in a checkpoint
"""
