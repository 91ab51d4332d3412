"""Measures the cost of weight averaging: CPU seconds per step with and without it. Prints Markdown.

    OMP_NUM_THREADS=1 python bench/averaging.py --config recipes/demo.yaml --every_steps 10

Alternates between measurements with and without averaging. Each runs --every_steps steps of the recipe. With
averaging, it also updates the average once. CPU seconds aren't affected by other load. On a GPU, wall time is measured
instead.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.steps import FIRST_STEPS, Steps  # noqa: E402
from pretrain.errors import run_script  # noqa: E402
from pretrain.parallel.registry import make_strategy  # noqa: E402
from pretrain.recipe import pair_up, read_run_config  # noqa: E402


def seconds_of(work, is_cuda: bool) -> float:
    """Returns how many CPU seconds `work` takes. On a GPU, returns the wall time, including kernels."""
    import torch

    clock = time.perf_counter if is_cuda else time.process_time
    start = clock()
    work()
    if is_cuda:
        torch.cuda.synchronize()
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("recipes/demo.yaml"))
    parser.add_argument("--every_steps", type=int, default=10, help="steps between updates (default: 10)")
    parser.add_argument("--turns", type=int, default=8, help="number of measurements of each kind (default: 8)")
    given, changes = parser.parse_known_args()
    config = read_run_config(given.config, pair_up(changes))
    strategy = make_strategy(config)
    steps = Steps(config, strategy)
    is_cuda = strategy.device.type == "cuda"
    sequences = config.batch.sequences_per_micro_batch
    micro_steps = max(1, config.batch.tokens_per_step // (sequences * config.data.sequence_length))
    # The first steps compile and create the optimizer state, and the first update allocates the average.
    for number in range(FIRST_STEPS):
        steps.step(number, micro_steps)
    strategy.update_average(1.0)
    turns: dict[bool, list[float]] = {False: [], True: []}
    updates = []
    for number in range(2 * given.turns):
        # Alternate, so that changes in the machine's speed affect both equally.
        averages = number % 2 == 1
        first = FIRST_STEPS + number * given.every_steps
        work = [lambda n=n: steps.step(n, micro_steps) for n in range(first, first + given.every_steps)]
        seconds = sum(seconds_of(step, is_cuda) for step in work)
        if averages:
            updates.append(seconds_of(lambda: strategy.update_average(0.1), is_cuda))
            seconds += updates[-1]
        turns[averages].append(seconds / given.every_steps)
    without, with_average = (statistics.median(turns[averages]) for averages in (False, True))
    update = statistics.median(updates)
    print(f"{given.config}, {steps.plan.parameters:,} parameters, {config.batch.tokens_per_step:,} tokens per step\n")
    print("| | seconds per step |\n|---|---|")
    print(f"| no averaging | {without:.4f} |\n| averaging every {given.every_steps} steps | {with_average:.4f} |")
    print(f"\nAn update takes {1e3 * update:.2f} ms and adds {update / given.every_steps / without:.2%} to each step.")


if __name__ == "__main__":
    run_script(main)
