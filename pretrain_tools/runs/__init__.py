"""Tools that read run folders and control live runs, mainly for runs.py.

They can handle folders left by a crash, import no heavy libraries, and change live runs only through
pretrain.runs.control.

    history: reads metrics.jsonl and drops lines superseded by repeated steps
    addresses: resolves RUN@STEP, a folder or a Hub ID to a model folder
    status: state, progress and time left
    comparison: compares runs in a table
    curves, plots: plot curves as a PNG
    commands: sends a command to a live run and waits for the answer
    step_documents: shows a step's training documents
    merge: averages several models
"""
