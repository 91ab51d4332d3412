"""Plans a run before launch (memory, time, cost and strategy), or makes a recipe for a budget. Needs no GPU.

python plan.py --config recipes/llama_1b.yaml --gpus 8 --gpu h100
python plan.py --config recipes/llama_1b.yaml --gpus 64 --gpu h100 --machines 8 --mfu 0.45
python plan.py --config recipes/llama_125m.yaml --gpus 1 --gpu mine --gpu_memory 48GB --peak_tflops 210
python plan.py --config recipes/demo.yaml --gpu cpu
python plan.py --config recipes/llama_1b.yaml --gpus 8 --gpu h100 --json
Override any recipe setting, as in train.py, for example --batch.sequences_per_micro_batch 4

python plan.py --hours 2 --gpus 8 --gpu h100 --family qwen3 --vocabulary tokenizers/mine --write recipes/mine.yaml
python plan.py --hours 1 --gpu cpu --data data/mine --write recipes/mine.yaml
"""

import shlex
import sys

from pretrain.errors import run_script
from pretrain.recipe import named_recipe, pair_up, read_run_config
from pretrain.terminal import announce_loading
from pretrain_tools.planning.plan_options import (
    asks_for_recipe,
    gpu_of,
    hardware_of,
    option_problems,
    parse_arguments,
    read_budget_request,
)


def main() -> None:
    options, rest = parse_arguments(__doc__, named_recipe(sys.argv[1:]))
    problems = option_problems(options)
    gpu = problems.attempt(gpu_of, options)
    # Check the options before importing torch, which is slow.
    if asks_for_recipe(options):
        request = read_budget_request(options, rest, problems, gpu)
        announce_loading()
        from pretrain_tools.experiments.ladder import read_ladder
        from pretrain_tools.planning.budget import recipe_of_budget

        predict = read_ladder(options.ladder).predict if options.ladder else None
        recipe_of_budget(request, hardware_of(options, gpu), shlex.join(["plan.py", *sys.argv[1:]]), predict)
        return
    if options.config is None:
        problems.append("--config: pass the recipe to plan, or use --hours, --dollars or --flops to make one")
        problems.stop_if_any()
    overrides = problems.attempt(pair_up, rest) or []
    config = problems.attempt(read_run_config, options.config, overrides)
    problems.stop_if_any()
    announce_loading()
    from pretrain_tools.planning.report import build_plan, comment_of, plan_json, print_plan

    hardware = hardware_of(options, gpu)
    plan = build_plan(config, options.config, overrides, hardware, mfu=options.mfu)
    if options.json:
        print(plan_json(plan))
    elif options.comment:
        print(comment_of(plan, shlex.join(["plan.py", *(word for word in sys.argv[1:] if word != "--comment")])))
    else:
        print_plan(plan)


if __name__ == "__main__":
    run_script(main)
