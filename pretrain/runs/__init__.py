"""Reads and writes files in run folders, even after a crash.

Imports nothing heavy.

    run_folder: paths in a run folder; its small files
    event_log: its metrics.jsonl
    control: commands to a live run, the trainer's side
    hub: settings of the Hub; starts publish.py for a run
"""
