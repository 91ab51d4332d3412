"""Functions called by the training loop in train.py.

All ranks make the same decisions.

    starting: locks the run folder, detects crash loops, records how the run ends
    run: state shared by the training functions
    auto_settings: resolves `auto` settings
    run_plan: derives steps, batch and schedule from a recipe, and checks the recipe
    probe: tests the architecture before training
    continued_plan: plans how a run continues from a checkpoint
    resuming: loads checkpoints and rolls back
    build: builds the model and optimizer
    experts: MoE load balancing
    qk_clip: QK-clip for attention logits
    steps: starts each step and syncs decisions across ranks
    prefetch: reads micro-batches ahead
    step_reports: step metrics across all ranks
    guard: detects NaN, loss spikes and divergence
    time_budget: enforces budget.minutes
    watchdog: signals, heartbeats, hangs
    between_steps: logging, validation, checkpoints, evaluation, samples
    validation: validation loss
    samples: text generation
    benchmarks: lm-evaluation-harness tasks on the training ranks
    diagnostics: per-layer statistics
    background_jobs: background evaluation, publishing and mirroring
    metrics, trackers: logging
    run_records: run files, startup banner, warnings
    ending: exports the model
"""
