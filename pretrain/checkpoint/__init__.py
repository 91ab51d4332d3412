"""Saved state: complete or absent, by Hugging Face parameter name, without pickle.

The format is stable: checkpoints of earlier versions can be resumed (docs/checkpoints.md).

    checkpoints: saving, verifying, pruning
    mirror_store, mirror_copy, mirror_fetch: the run's remote copy: its content, copying, starting from it
    mirror_lease: which machine trains a run that has such a copy
    tensor_files: named tensors on disk, and their copies in CPU memory before that
    run_state: the position and history of a run
    export, export_check: the finished model, and the check that it is the trained one
    average_folder: the average in a checkpoint
"""
