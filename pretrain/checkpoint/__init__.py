"""Saves state atomically, by Hugging Face parameter name, without pickle.

The format is stable, so checkpoints of earlier versions can be resumed (docs/checkpoints.md).

    checkpoints: saving, verifying, pruning
    mirror_store, mirror_copy, mirror_fetch: the run's remote copy: its content, copying, starting from it
    mirror_lease: ensures that only one machine trains a run with a remote copy
    tensor_files: named tensors on disk, and their copies in CPU memory before that
    run_state: the position and history of a run
    export, export_check: the finished model, and its comparison with the trained one
    average_folder: the average in a checkpoint
"""
