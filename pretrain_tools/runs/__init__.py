"""The tools of runs.py, which read run folders and steer live runs.

Copes with what a crash left behind, imports nothing heavy, and changes a run only through control.

    history: metrics.jsonl, every curve single-valued
    addresses: from RUN@STEP, folder or Hub id to a model folder
    status: state, progress, time left
    comparison: runs as text, side by side, as a table
    curves, plots: the curves of runs, as a picture
    page: the same on a page, of a plot or of live runs
    live_log, watch: all runs while they are written, in the terminal and on a page
    commands: asks a live run for something, and waits for the answer
    step_documents: what a step was trained on
    parity: one recipe under every strategy
    merge: the mean of several models
"""
