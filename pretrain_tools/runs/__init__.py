"""What runs.py shows and asks of run folders.

Copes with what a crash left behind, imports nothing heavy, and changes a run only through control.

    addresses: from RUN@STEP, folder or Hub id to a model folder
    status: state, progress, time left
    curves, plots, comparison: pictures and tables
    live_log, live_table: all runs while they are written, in the terminal
    live_page, live_curves: the same on a page
    commands: asks a live run for something, and waits for the answer
    step_documents: what a step was trained on
    parity: one recipe under every strategy
    merge: the mean of several models
"""
