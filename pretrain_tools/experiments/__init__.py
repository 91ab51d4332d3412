"""Experiments that train many runs: runs.py parity, sweep, mixture and ladder (docs/sweeps.md).

Each run is a separate train.py process with its own run folder, so all tools for runs also work here.

    parity: one recipe with every strategy, or every mesh
    small_runs: trains many runs, in parallel on several devices; recovers after a kill
    sweep, sweep_plan: grid or search over settings; all runs are checked before any starts
    sweep_report: table, JSON, figure and best recipe of a sweep
    mixture: proposes weights for data sources from runs on many data mixtures
    scaling_law: fits the loss as a function of parameters and tokens
    ladder, ladder_report: fit a scaling law to runs of several sizes, predict larger runs, report
"""
