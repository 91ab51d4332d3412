"""Evaluates models (evaluate.py).

See docs/evaluate.md.

    evaluate: runs all requested evaluations, and continues text that the user types
    shard_loss: measures the loss on prepared shards
    lm_harness: runs lm-evaluation-harness tasks, and computes bits per byte
    answers: tokenizes benchmark questions and answers for in-loop evaluation
    core: computes the CORE metric from DCLM
    task_names: checks that benchmarks exist
    results: stores and prints scores
"""
