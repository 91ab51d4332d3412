"""Implements all scripts except train.py, and train.py's `--text`, `--check`, `--smoke` and `--profile`.

This package imports pretrain, never the other way around (tests/test_closure.py). Each subpackage may only import from
the ones before it: preparation, runs, publishing, planning, profiling, evaluation, experiments.
"""
