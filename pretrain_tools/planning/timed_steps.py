"""Times real steps of a recipe: `python -m pretrain_tools.planning.timed_steps RECIPE SECONDS`.

Prints one line of JSON: {"tokens_per_second"}. In a process of its own, since a process can make one strategy.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from pretrain.errors import InputError, run_script
from pretrain.parallel.launcher import python_path

FEWEST_TIMED_STEPS = 3


def tokens_per_second(recipe: Path, seconds: float) -> float:
    """Runs this module for about so many seconds of steps, beside its start. Raises InputError where it fails."""
    command = [sys.executable, "-m", __name__, str(recipe), str(seconds)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": python_path()}, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise InputError(f"the steps that were to be timed ended with exit status {done.returncode}; see above")
    return float(json.loads(done.stdout.splitlines()[-1])["tokens_per_second"])


def time_steps(recipe: str, seconds: float) -> None:
    """Steps for `seconds`, at least FEWEST_TIMED_STEPS, after those that compile and make the optimizer's state."""
    from pretrain.parallel.registry import make_strategy
    from pretrain.recipe import read_run_config
    from pretrain.training.run_plan import settled
    from pretrain_tools.planning.calibration import FIRST_STEPS, Steps

    config = settled(read_run_config(recipe))
    steps = Steps(config, make_strategy(config))
    window = config.batch.sequences_per_micro_batch * config.data.sequence_length
    micro_steps = max(1, config.batch.tokens_per_step // window)
    for number in range(FIRST_STEPS):
        steps.step(number, micro_steps)
    began, count = time.perf_counter(), 0
    while count < FEWEST_TIMED_STEPS or time.perf_counter() - began < seconds:
        steps.step(FIRST_STEPS + count, micro_steps)
        count += 1
    rate = count * micro_steps * window / (time.perf_counter() - began)
    print(json.dumps({"tokens_per_second": rate}), flush=True)


if __name__ == "__main__":
    run_script(lambda: time_steps(sys.argv[1], float(sys.argv[2])))
