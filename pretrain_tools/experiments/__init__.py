"""Experiments with many runs: runs.py parity, sweep, mixture and ladder (docs/sweeps.md).

Each run is a separate train.py process with its own run folder.

    parity: compares losses across strategies and meshes
    small_runs: trains many runs in parallel and resumes killed ones
    sweep, sweep_plan: grid search and Optuna search over settings
    sweep_report: sweep results as a table, JSON and the best recipe
    mixture: proposes data mixture weights based on small runs
    scaling_law: fits the loss as a function of model size and token count
    ladder, ladder_report: fit a scaling law to runs of several sizes and predict larger runs
"""
