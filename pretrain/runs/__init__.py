"""Run folders: what the trainer writes there, and what it reads again.

Handles what a crash left behind, and imports nothing heavy.

    run_folder: paths in a run folder; its small files
    event_log: its metrics.jsonl
    control: commands to a live run, the trainer's side
    hub: settings of the Hub; starts publish.py for a run
"""
