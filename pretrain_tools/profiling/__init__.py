"""`train.py --profile`, and `runs.py profile` on a live run: the reasons why it is slow.

Nothing here is on the path of a step unless a profile is being taken.

    step_profile: takes a profile of some steps, on all ranks
    recording: records them on one rank, with marks for the parts of a step
    sync_lines: lines of code that wait for the device
    trace_events: from torch.profiler's events to waiting, work and kernels
    expected_step: the step that a plan expects
    causes: rules for what slows a run down
    report: the verdict in words, its files, and a picture of the ranks
"""
