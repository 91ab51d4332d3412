"""Plans a run before launch: memory, time, cost and strategy; or makes a recipe of a budget. Needs no GPU.

python plan.py --config recipes/llama_1b.yaml --gpus 8 --gpu h100
python plan.py --config recipes/llama_1b.yaml --gpus 64 --gpu h100 --machines 8 --mfu 0.45
python plan.py --config recipes/llama_125m.yaml --gpus 1 --gpu mine --gpu_memory 48GB --peak_tflops 210
python plan.py --config recipes/demo.yaml --calibrate        # measures time and memory of 20 steps on this machine
python plan.py --config recipes/llama_1b.yaml --gpus 8 --gpu h100 --json
Any setting of the recipe can be changed by its path, as with train.py: --batch.sequences_per_micro_batch 4

python plan.py --hours 2 --gpus 8 --gpu h100 --family qwen3 --vocabulary tokenizers/mine --write recipes/mine.yaml
python plan.py --hours 1 --gpu cpu --data data/mine --write recipes/mine.yaml
"""

import argparse
import re
import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from pretrain.errors import InputError, Problems, run_script
from pretrain.gpus import CPU, Gpu, find_gpu, gpu_called
from pretrain.recipe import named_recipe, pair_up, read_run_config
from pretrain.terminal import begin
from pretrain_tools.planning.budget_request import add_budget_options, asks_for_recipe, read_budget_request

if TYPE_CHECKING:
    from pretrain_tools.planning.step_time import Hardware

SIZE = re.compile(r"^([0-9]+(?:\.[0-9]+)?)\s*(GB|GiB|G|TB|TiB|T|MB|MiB|M)?$", re.IGNORECASE)
SIZE_UNITS = {"m": 2**20, "g": 2**30, "t": 2**40, None: 2**30}


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(own options, the recipe's settings as they stand on the command line)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", metavar="RECIPE", help="the recipe to plan")
    parser.add_argument("--gpus", type=int, default=1, help="total number of GPUs [1]")
    parser.add_argument("--gpu", help="GPU model: h100, a100, rtx4090 ...; cpu: this machine's processors; any other "
                        "name with --gpu_memory and --peak_tflops [h100; with --calibrate: what is here]")  # fmt: skip
    parser.add_argument("--machines", type=int, help="number of machines [8 GPUs each]")
    parser.add_argument("--gpu_memory", metavar="80GB", help="memory of one GPU; GB is 2^30 bytes")
    parser.add_argument("--peak_tflops", type=float, help="dense bf16 peak of one GPU in TFLOP/s")
    parser.add_argument("--price_per_gpu_hour", type=float, metavar="USD", help="price per GPU-hour")
    parser.add_argument("--network_gbits", type=float, help="network bandwidth between machines per GPU, in Gbit/s")
    parser.add_argument("--mfu", type=float, help="expected MFU, above 0 and at most 1 [by model size]")
    parser.add_argument("--calibrate", action="store_true", help="time 20 steps here and plan with that speed")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--comment", action="store_true", help="print the plan as a recipe's header comment")
    add_budget_options(parser)
    return parser.parse_known_args(argv)


def main() -> None:
    arguments, rest = parse_arguments(named_recipe(sys.argv[1:]))
    problems = option_problems(arguments)
    memory = problems.attempt(parse_size, arguments.gpu_memory)
    given = given_figures(arguments, memory)
    gpu = problems.attempt(gpu_of, arguments, given)
    if asks_for_recipe(arguments):
        request = read_budget_request(arguments, rest, problems, gpu)
        begin()
        from pretrain_tools.experiments.ladder_report import read_ladder
        from pretrain_tools.planning.budget_report import recipe_of_budget

        expect = read_ladder(arguments.ladder).expect if arguments.ladder else None
        recipe_of_budget(request, hardware_of(arguments, gpu, given), shlex.join(["plan.py", *sys.argv[1:]]), expect)
        return
    if arguments.config is None:
        problems.append("--config: name the recipe to plan, or give --hours, --dollars or --flops to make one")
        problems.stop_if_any()
    overrides = problems.attempt(pair_up, rest) or []
    config = problems.attempt(read_run_config, arguments.config, overrides)
    problems.stop_if_any()
    begin()
    # Here and not above: --help and a mistyped option answer before torch is imported.
    from pretrain_tools.planning.report import build_plan, comment_of, plan_json, print_plan

    hardware = hardware_of(arguments, gpu, given)
    plan = build_plan(
        config, arguments.config, overrides, hardware, mfu=arguments.mfu, with_calibration=arguments.calibrate
    )
    if arguments.json:
        print(plan_json(plan))
    elif arguments.comment:
        print(comment_of(plan, " ".join(["plan.py", *(word for word in sys.argv[1:] if word != "--comment")])))
    else:
        print_plan(plan)


def option_problems(arguments: argparse.Namespace) -> Problems:
    """What is wrong with plan.py's own options."""
    problems, gpus, machines = Problems(), arguments.gpus, arguments.machines
    if gpus < 1:
        problems.append(f"--gpus {gpus}: at least 1")
    if machines is not None and (machines < 1 or (gpus > 0 and gpus % machines)):
        problems.append(f"--machines {machines}: {gpus} GPUs cannot be divided equally; give a divisor of the GPUs")
    if machines is None and gpus > 8 and gpus % 8:
        problems.append(f"--gpus {gpus}: is not a multiple of 8 GPUs per machine; set --machines")
    if arguments.mfu is not None and not 0 < arguments.mfu <= 1:
        problems.append(f"--mfu {arguments.mfu}: must be above 0 and at most 1; 40 % is 0.4")
    for name in ("peak_tflops", "network_gbits", "price_per_gpu_hour"):
        value = getattr(arguments, name)
        if value is not None and (value < 0 or (value == 0 and name != "price_per_gpu_hour")):
            problems.append(f"--{name} {value}: must be above 0")
    return problems


def parse_size(text: str | None) -> float | None:
    """'80GB' -> bytes, with GB as GPUs are sold: 2^30 bytes."""
    if text is None:
        return None
    match = SIZE.match(text.strip())
    if match is None or float(match[1]) <= 0:
        raise InputError(f"--gpu_memory {text}: a size such as 80GB")
    return float(match[1]) * SIZE_UNITS[match[2][0].lower() if match[2] else None]


def given_figures(arguments: argparse.Namespace, memory: float | None) -> dict[str, float]:
    """Fields of Gpu that the command line states."""
    figures = {
        "memory_bytes": memory,
        "bf16_flops": arguments.peak_tflops and arguments.peak_tflops * 1e12,
        "price_per_hour": arguments.price_per_gpu_hour,
        "network_bytes_per_second": arguments.network_gbits and arguments.network_gbits * 1e9 / 8,
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def gpu_of(arguments: argparse.Namespace, given: dict[str, float]) -> Gpu | None:
    """None for this machine's own, which torch has to find."""
    if arguments.gpu == CPU or (arguments.gpu is None and arguments.calibrate):
        return None
    return find_gpu(arguments.gpu or "h100", **given)


def hardware_of(arguments: argparse.Namespace, gpu: Gpu | None, given: dict[str, float]) -> "Hardware":
    from pretrain_tools.planning.step_time import Hardware

    gpu = gpu or own_gpu(arguments, given)
    return Hardware(gpu, arguments.gpus, arguments.machines or -(-arguments.gpus // 8))


def own_gpu(arguments: argparse.Namespace, given: dict[str, float]) -> Gpu:
    """The GPU of this machine, or its processors where they were asked for or are all that it has.

    Raises InputError for a GPU that torch cannot use.
    """
    import torch

    from pretrain.hardware import cpu_as_gpu
    from pretrain.parallel.strategy import device_type

    if arguments.gpu == CPU or device_type() == "cpu":
        return replace(cpu_as_gpu(arguments.gpus), **given)
    name = torch.cuda.get_device_name()
    if (known := gpu_called(name)) is not None:
        return replace(known, **given)
    return find_gpu(name, **{"memory_bytes": torch.cuda.get_device_properties(0).total_memory, **given})


if __name__ == "__main__":
    run_script(main)
