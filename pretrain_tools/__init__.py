"""The tools: all scripts except train.py, and train.py's `--text`, `--check`, `--smoke` and `--profile`.

They import the trainer, pretrain, which never imports them (tests/test_closure.py). Each package imports only from
earlier ones in this order: preparation, runs, publishing, planning, profiling, evaluation, experiments.
"""
