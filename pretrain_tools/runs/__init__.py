"""Tools that read run folders and control live runs, mainly for runs.py.

They can read folders left behind by a crash, don't import heavy libraries, and change live runs only through
pretrain.runs.control.

    history: reads metrics.jsonl and drops lines superseded by repeated steps
    addresses: finds the model folder for RUN@STEP, a folder or a Hub ID
    status: shows a run's state, progress and time left
    comparison: compares runs in a table
    plots: plots runs' curves as a PNG
    commands: sends commands to a live run
    step_documents: shows a step's training documents
    merge: averages several models
    child_processes: sends signals to child processes
"""
