"""Tools for runs.py, which read run folders and control live runs.

They read whatever a crash left in the folder, import no heavy libraries, and change a live run only through
pretrain.runs.control.

    history: metrics.jsonl, without lines superseded by repeated steps
    addresses: resolves RUN@STEP, a folder or a Hub ID to a model folder
    status: state, progress, time left
    comparison: runs side by side, as a table
    curves, plots: curves as a PNG
    commands: sends a command to a live run and waits for its answer
    step_documents: a step's training documents
    merge: the mean of several models
"""
