"""Run folders: what the trainer writes there, and what it reads again.

Copes with what a crash left behind, and imports nothing heavy.

    run_folder: paths in a run folder; its small files
    event_log: its metrics.jsonl
    control: commands to a live run, the trainer's side
    hub: settings of the Hub; publish.py beside a run
"""
