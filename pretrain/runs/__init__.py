"""Reads and writes files in run folders, even after a crash.

This package has no slow imports.

    run_folder: paths in a run folder, and its small files
    event_log: events in metrics.jsonl
    control: the trainer's side of commands to a live run
    hub: checks of Hub settings, and paths and names for publishing
"""
