"""Run folders: history, status and control (runs.py).

Reads what a crash may have left, imports nothing heavy, and never changes a run but through control.

    run_folder, settings: what lies where; what the run was told
    history: its metrics
    status: is it alive, how far, how long
    curves, plots, comparison: pictures and tables
    control: commands to a live run
    step_documents: what a step was trained on
    parity: one recipe under every strategy
    addresses: from what a user writes to a model folder
"""
