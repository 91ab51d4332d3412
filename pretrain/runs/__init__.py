"""Run folders: history, status and control (runs.py).

Copes with what a crash left behind, imports nothing heavy, and changes a run only through control.

    run_folder: paths in a run folder; its small files
    history: its metrics
    status: state, progress, time left
    curves, plots, comparison: pictures and tables
    live_log, live_table: all runs while they are written, in the terminal
    live_page, live_curves: the same on a page
    control, commands: commands to a live run: the trainer's side, the sender's
    hub: settings of the Hub; publish.py beside a run
    step_documents: what a step was trained on
    parity: one recipe under every strategy
    addresses: from RUN@STEP, folder or Hub id to a model folder
"""
