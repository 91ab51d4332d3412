"""What the loop in train.py calls.

The loop stays in train.py; nothing here calls back into it. All ranks take every decision alike.

    run_plan: the numbers that follow from a recipe, and the checks of the whole
    prefetch: the next micro-batch
    probe: tests the architecture before it trains
    build: model and optimizer
    experts: mixtures of experts: balance and load
    cautions, task_names: warnings with figures; whether benchmarks exist
    housekeeping: the work between steps, and the end
    validation: loss on held-out windows
    samples: text from the model
    metrics, trackers, run_records: logging
    attempt, resume: one launch; resuming and rollback
    continued_plan: what a run does from a checkpoint on, whatever has changed in its recipe
    supervisor, time_budget: requests, guard, agreement; the clock
    step_reports: what all ranks know of a step
    guard: NaN, spikes, divergence
    watchdog: signals, heartbeats, hangs
    background_jobs: evaluation, upload and mirror beside the run
"""
