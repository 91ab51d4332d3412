"""What the loop in train.py calls.

The loop stays in train.py; nothing here calls back into it. All ranks take every decision alike.

    run: what the functions of a run share
    run_plan: the numbers that follow from a recipe, and the checks of the whole
    prefetch: the next micro-batch
    probe: tests the architecture before it trains
    build: model and optimizer
    experts: mixtures of experts: balance and load
    start_warnings: warnings with figures about the recipe
    resuming: opens a run at its checkpoint, loads it, rolls back
    continued_plan: what a run does from a checkpoint on, whatever has changed in its recipe
    steps: begins the run and each of its steps
    supervision, time_budget: agreement of the ranks after a step, guard, requests; the clock
    step_reports: what all ranks know of a step
    between_steps: logs, validation, saves, evaluations, samples
    ending: the end: export, or to be continued
    validation: loss on held-out windows
    samples: text from the model
    metrics, trackers, run_records: logging
    starting: exclusive use of the folder, crash loops, a recorded end
    guard: NaN, spikes, divergence
    watchdog: signals, heartbeats, hangs
    background_jobs: evaluation, upload and mirror beside the run
"""
