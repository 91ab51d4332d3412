"""The tools: all other scripts, and what train.py does for `--text`, `--check`, `--smoke` and `--profile`.

They import the trainer, pretrain, which never imports them (tests/test_closure.py). A package imports only from those
named before it: preparation, runs, publishing, planning, profiling, evaluation, experiments.
"""
