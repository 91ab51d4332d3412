"""Reads and writes files in run folders, even after a crash.

This package imports quickly.

    run_folder: paths in a run folder, and its small files
    event_log: events in metrics.jsonl
    control: the trainer's side of commands to a live run
    hub: checks of Hub settings, and background publishing
"""
