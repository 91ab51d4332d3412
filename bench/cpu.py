"""Compares the speed of train.py with baselines on this machine's CPU. Prints Markdown.

    python bench/cpu.py                             # what `make bench` runs: Llama and GPT-2 with 14M parameters
    python bench/cpu.py --shapes long --contestants groundwork,bare_compiled --rounds 5 --steps 4

Contestants:
    groundwork                     train.py with its defaults, speed from metrics.jsonl
    groundwork_documents           train.py with a document mask
    groundwork_all_on              train.py with two micro-steps per step, tensorboard and wandb (offline)
    bare_compiled, bare_eager      the same Transformers model in a minimal training loop
    trainer, trainer_compiled      the Transformers Trainer
    plain_compiled, plain_eager    a hand-written GPT
All run in bf16 if the CPU has bf16 instructions, otherwise in fp32. MFU is (6 N + 12 L d T) x tokens/s / peak. The
peak is measured with matmuls in the same precision, before and after the benchmark.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.contest import Contestant, hold, table  # noqa: E402
from bench.peers import command_of  # noqa: E402
from bench.shapes import CPU_SHAPES, Shape, write_model, write_shards  # noqa: E402
from pretrain.errors import InputError, did_you_mean, run_script  # noqa: E402

PEERS = {
    "bare_compiled": ("bare", True),
    "bare_eager": ("bare", False),
    "trainer": ("trainer", False),
    "trainer_compiled": ("trainer", True),
    "plain_compiled": ("plain", True),
    "plain_eager": ("plain", False),
}
"""Baselines by name: (peer in bench.peers, True if compiled)."""
OWN = {
    "groundwork": {},
    "groundwork_documents": {"data.document_mask": "true"},
    "groundwork_all_on": {"trackers": "[tensorboard, wandb]"},
}
"""Settings added to `recipe`, by name."""
MICRO_STEPS = {"groundwork_all_on": 2}
"""Micro-steps per step, for contestants with more than one."""
REPORT_EVERY = {"tiny": 10}
"""Steps between reports, for shapes whose steps are so short that reporting each of them would slow them down."""
SHARD_TOKENS = 2_000_000


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line. Raises InputError for unknown names and invalid values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama,gpt2", help=f"comma-separated: {', '.join(CPU_SHAPES)}")
    parser.add_argument(
        "--contestants", default=",".join([*OWN, *PEERS]), help="comma-separated; the first is the reference"
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of turns per contestant")
    parser.add_argument("--steps", type=int, default=8, help="number of steps per turn")
    parser.add_argument(
        "--precision", default="auto", choices=["auto", "bf16", "fp32"], help="precision of all contestants"
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="SETTING=VALUE", help="settings for Groundwork's recipe"
    )
    given = parser.parse_args(arguments)
    given.shapes = given.shapes.split(",")
    given.contestants = given.contestants.split(",")
    problems = [f"--shapes: {n!r}{did_you_mean(n, CPU_SHAPES)}" for n in given.shapes if n not in CPU_SHAPES]
    known = [*OWN, *PEERS]
    problems += [f"--contestants: {n!r}{did_you_mean(n, known)}" for n in given.contestants if n not in known]
    problems += [f"--set: {text!r} must be SETTING=VALUE" for text in given.set if "=" not in text]
    problems += [f"--{n}: must be at least 1" for n in ("rounds", "steps") if getattr(given, n) < 1]
    if problems:
        raise InputError(*problems)
    return given


def recipe(
    shape: Shape, model: Path, shards: Path, output: Path, report_every: int = 1, precision: str = "bf16"
) -> str:
    """Returns a recipe that trains the shape as the baselines do, without validation or checkpoints."""
    return f"""\
model: {model}
output: {output}
precision: {precision}
data: {{train: [{{shards: {shards}}}], sequence_length: {shape.sequence_length}, document_mask: false}}
budget: {{steps: 1000000}}
batch: {{tokens_per_step: {shape.tokens_per_step}, sequences_per_micro_batch: {shape.sequences}}}
optim: {{learning_rate: 3e-4, warmup_steps: 100}}
logging: {{every_steps: {report_every}}}
"""


def contestants_of(
    names: list[str],
    shape: Shape,
    folder: Path,
    settings: list[str],
    report_every: int = 1,
    precision: str = "bf16",
    *,
    strategy: str = "single",
    processes: int = 1,
) -> list[Contestant]:
    """Returns the contestants for a shape. All their files are in `folder`.

    Args:
        strategy: name of the accelerate config for Groundwork.
        processes: number of processes, each with the shape's batch size.
    """
    model = write_model(shape, folder)
    contestants = []
    shards = write_shards(folder / "shards", shape.vocabulary_size, SHARD_TOKENS)
    for name in names:
        steps_file = folder / f"{name}.jsonl"
        tokens_per_step = shape.tokens_per_step * MICRO_STEPS.get(name, 1) * processes
        if name in OWN:
            run = folder / name
            path = folder / f"{name}.yaml"
            path.write_text(recipe(shape, model, shards, run, report_every, precision))
            command = ["train.py", "--config", str(path)]
            own = {**OWN[name], "batch.tokens_per_step": tokens_per_step}
            for setting in [f"{key}={value}" for key, value in own.items()] + settings:
                command += [f"--{setting.partition('=')[0]}", setting.partition("=")[2]]
            if processes > 1:
                launcher = ["-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{strategy}.yaml"]
                command = [*launcher, "--num_processes", str(processes), "--main_process_port", "0", *command]
            run.mkdir()
            steps_file = run / "metrics.jsonl"
        else:
            peer, compiles = PEERS[name]
            command = command_of(peer, shape, shards, steps_file, compiles, report_every, precision)
        contestants.append(Contestant(name, command, steps_file, tokens_per_step))
    return contestants


def flops_per_token(shape: Shape) -> float:
    """Computes 6 N + 12 L d T for the shape. N excludes the embedding lookup, as in train.py's MFU."""
    from transformers import AutoConfig

    from pretrain.model.build import matrix_parameters

    values = shape.model_json()
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    return 6 * matrix_parameters(config) + 12 * shape.layers * shape.hidden_size * shape.sequence_length


def main() -> int:
    """Prints one table per shape."""
    given = parse_arguments()
    import torch

    from pretrain.hardware import DTYPES, measured_matrix_flops
    from pretrain.parallel.strategy import resolve_precision

    precision = resolve_precision(given.precision)
    dtype = DTYPES[precision]
    for name in given.shapes:
        shape = CPU_SHAPES[name]
        with tempfile.TemporaryDirectory(prefix="groundwork-bench-") as folder:
            every = REPORT_EVERY.get(name, 1)
            contestants = contestants_of(given.contestants, shape, Path(folder), given.set, every, precision)
            # Measure before and after, because the clock speed may change during the benchmark.
            peaks = [measured_matrix_flops(dtype)]
            hold(contestants, ROOT, rounds=given.rounds, reports=max(1, given.steps // every))
            peaks.append(measured_matrix_flops(dtype))
        peak = statistics.mean(peaks)
        print(f"\n{name}: {shape.in_words()}; {precision} matmul {peak / 1e12:.2f} TFLOP/s on ", end="")
        print(f"{torch.get_num_threads()} threads\n")
        print("\n".join(table(contestants, flops_per_token(shape), peak)), flush=True)
    return 0


if __name__ == "__main__":
    run_script(main)
