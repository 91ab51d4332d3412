"""Saves state atomically, by Hugging Face parameter name, without pickle.

The format is stable, so a run can resume from an earlier version's checkpoints (docs/checkpoints.md).

    checkpoints: saving, verifying, pruning
    mirror_store, mirror_copy, mirror_fetch: the run's remote copy: its content, copying, starting from it
    mirror_lease: ensures that only one machine trains a run with a remote copy
    tensor_files: named tensors on disk, and their staging buffers in CPU memory
    run_state: a run's position and history
    export, export_check: the finished model, and its comparison with the trained one
    average_folder: a checkpoint's average as a model folder
"""
