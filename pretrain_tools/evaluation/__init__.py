"""Evaluates models for evaluate.py, from a model's address to a table of results (docs/evaluate.md).

This package never trains.

    evaluate: one or many models
    shard_loss: loss on prepared shards
    lm_harness: lm-eval's tasks, and bits per byte of their correct answers
    answers: questions and answers as token IDs, for benchmarks on the training processes
    core: DCLM's CORE
    task_names: checks that the benchmarks exist
    interactive: continues typed text
    results: scores, their means and standard errors; tables and JSON
"""
