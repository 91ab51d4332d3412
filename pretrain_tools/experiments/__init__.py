"""Experiments of many runs: runs.py sweep, mixture and ladder (docs/runs.md).

Each run is a train.py of its own in a folder of its own, so whatever reads runs reads these too.

    small_runs: trains many, side by side where there are devices; found again after a kill
    sweep, sweep_plan: a grid or a search over settings; what is to be trained, checked before anything starts
    sweep_report: table, JSON, picture and best recipe
    mixture: weights of sources, from runs on many mixtures
    scaling_law: loss by size and tokens, fitted
    ladder, ladder_report: from runs of several sizes to predictions; what is said of them
"""
