"""Why a run is slow: `train.py --profile`, and `runs.py profile` on a live one.

Nothing here is on the path of a step unless a profile is being taken.

    step_profile: takes a profile of some steps, on all ranks
    recording: what one rank records of them
    phases: marks the parts of a step
    sync_lines: lines of code that wait for the device
    trace_events: from torch.profiler's events to waiting, work and kernels
    expected_step: what a plan expects of a step
    causes: what slows a run down: the rules
    report: the verdict in words, and its files
    gantt: the ranks' steps as a picture
"""
