"""Finds out why a run is slow: `train.py --profile`.

The run continues to train, and its losses stay the same.

    step_profile: takes a profile of several steps, on all ranks
    recording: records the steps on one rank, with marks for the phases of a step
    sync_lines: finds lines of code that wait for the device
    trace_events: turns torch.profiler's events into work, waiting and kernels
    causes: rules that find what slows a run down
    report: the verdict as text, and its files
"""
