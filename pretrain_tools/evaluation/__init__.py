"""evaluate.py: from a model's address to a table of results (docs/runs.md).

Nothing here trains.

    evaluate: one or many models
    shard_loss: loss on prepared shards
    lm_harness: lm-eval's tasks, and bits per byte of their right answers
    core: DCLM's CORE
    task_names: do the benchmarks exist
    task_scores: scores, their means and standard errors
    interactive: continues what is typed
    results: tables, JSON, pictures
"""
