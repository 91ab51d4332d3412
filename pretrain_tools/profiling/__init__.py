"""Implements train.py --profile, which diagnoses slow runs.

Training continues during the profile, with the same losses.

    step_profile: profiles several steps on all ranks
    recording: records the steps and their phases on one rank
    sync_lines: finds lines of code that wait for the device
    trace_events: breaks down steps into work, waiting time and kernels
    causes: rules that diagnose a slow run
    report: formats and writes the report
"""
