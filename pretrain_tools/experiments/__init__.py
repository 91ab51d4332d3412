"""Experiments with many runs: runs.py parity, sweep, mixture and ladder (docs/sweeps.md).

Each run is a separate train.py process with its own run folder.

    parity: compares losses across strategies and meshes
    small_runs: starts runs in separate processes and reads their outcomes
    sweep, sweep_plan: grid search and Optuna search over settings, which resume killed runs
    mixture: proposes data mixture weights based on small runs
    scaling_law: fits the loss as a function of model size and token count
    ladder: fits a scaling law to runs of several sizes and predicts larger runs
"""
