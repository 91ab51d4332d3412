"""Compares the predicted and measured peak memory of a step for many strategies and options.

    python bench/memory.py                    # all cases; a few minutes on two cores
    python bench/memory.py --only fsdp2       # only cases whose names contain this
    python bench/memory.py --markdown         # the table in docs/measurements_memory.md

Only live tensors are counted. On a CPU, every allocation in the process is recorded (bench/steps.py). On a GPU,
torch's allocator reports the peak. Strategies that need two processes use gloo if there are fewer than two GPUs.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SHAPES = {
    "llama 1.3M": (128, 352, 4, 4, 2, 2048),
    "llama 5M": (256, 704, 6, 8, 4, 2048),
    "llama 25M": (512, 1408, 8, 8, 4, 4096),
}
"""Shapes by name: hidden size, intermediate size, layers, heads, key-value heads, vocabulary size."""
BUCKET_ELEMENTS = 1_000_000
"""Size of DeepSpeed's buckets. Those in the shipped configs would dominate the memory of such small models."""
TOLERANCE = 0.15
"""Maximum relative error of a prediction."""


@dataclass(frozen=True)
class Case:
    """Training setup."""

    strategy: str
    shape: str
    precision: str = "fp32"
    sequences: int = 4
    micro_steps: int = 1
    settings: dict = field(default_factory=dict)
    """Recipe settings with dotted names."""

    @property
    def name(self) -> str:
        words = [self.strategy, self.shape, self.precision, f"{self.sequences} x {self.length}"]
        words += [f"{self.micro_steps} micro-steps"] if self.micro_steps > 1 else []
        return ", ".join([*words, *(f"`{key}: {value}`" for key, value in self.settings.items())])

    @property
    def length(self) -> int:
        return int(self.settings.get("data.sequence_length", 512))

    @property
    def processes(self) -> int:
        return 1 if self.strategy == "single" else 2


FULL = {"activation_checkpointing": "full"}
CASES = (
    Case("single", "llama 1.3M", "fp32", 8, 2),
    Case("single", "llama 1.3M", "fp32", 4, 1, FULL),
    Case("single", "llama 5M", "fp32"),
    Case("single", "llama 5M", "bf16", 4, 2),
    Case("single", "llama 5M", "bf16", 2, 1, FULL),
    Case("single", "llama 25M", "bf16", 1, 2),
    Case("single", "llama 25M", "fp32", 4, 1, FULL),
    Case("single", "llama 5M", "fp32", 4, 1, {"attention": "eager"}),
    Case("single", "llama 5M", "bf16", 4, 1, {"loss.backend": "logits"}),
    Case("single", "llama 5M", "bf16", 4, 2, {"optim.name": "muon"}),
    Case("single", "llama 5M", "fp32", 4, 2, {"optim.name": "adafactor"}),
    Case("single", "llama 5M", "bf16", 4, 1, {"compile": "regional"}),
    Case("ddp", "llama 5M", "fp32", 4, 1),
    Case("ddp", "llama 5M", "bf16", 4, 2),
    Case("ddp", "llama 25M", "bf16", 1, 1),
    Case("ddp", "llama 5M", "bf16", 4, 1, {"compile": "regional"}),
    Case("fsdp2", "llama 5M", "fp32", 4, 1),
    Case("fsdp2", "llama 5M", "bf16", 4, 2),
    Case("fsdp2", "llama 25M", "bf16", 2, 1, FULL),
    Case("zero1", "llama 5M", "fp32", 4, 2),
    Case("zero1", "llama 5M", "bf16", 4, 1),
    Case("zero2", "llama 5M", "bf16", 4, 2),
    Case("zero2", "llama 25M", "fp32", 1, 1),
    Case("zero3", "llama 5M", "fp32", 4, 2),
    Case("tp", "llama 5M", "fp32", 4, 1),
    Case("pp", "llama 5M", "fp32", 4, 1),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only run cases whose names contain this")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        return measure_here(CASES[arguments.case], arguments.folder)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(CASES):
            if arguments.only in case.name:
                rows.append((case, *measured_and_predicted(number, Path(folder))))
                print(row_text(rows[-1], arguments.markdown), flush=True)
    off = [ratio(row) for row in rows]
    if rows:
        print(f"\n{len(rows)} cases, predicted / measured {min(off):.2f} to {max(off):.2f}")
    return int(any(abs(value - 1) > TOLERANCE for value in off))


def ratio(row: tuple[Case, float, float]) -> float:
    return row[2] / row[1]


def row_text(row: tuple[Case, float, float], markdown: bool) -> str:
    case, measured, predicted = row
    cells = (case.name, f"{measured / 1e6:,.1f}", f"{predicted / 1e6:,.1f}", f"{ratio(row):.2f}")
    if markdown:
        return f"| {' | '.join(cells)} |"
    return f"{cells[0]:<70} measured {cells[1]:>8} MB  predicted {cells[2]:>8} MB  ratio {cells[3]}"


def measured_and_predicted(number: int, folder: Path) -> tuple[float, float]:
    """Trains a case in separate processes. Returns (measured, predicted) peak bytes per process."""
    case = CASES[number]
    command = [sys.executable]
    if case.processes > 1:
        command += ["-m", "accelerate.commands.launch", "--config_file", str(launcher_file(case.strategy, folder))]
        command += ["--num_processes", str(case.processes), "--main_process_port", "0"]
    command += [__file__, "--case", str(number), "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = [json.loads(text) for text in re.findall(r'\{"measured".*?\}', result.stdout)]
    # Each process prints one line, so fewer lines mean that a process failed.
    if len(found) != case.processes:
        raise SystemExit(f"{case.name}: {result.stdout[-2000:]}\n{result.stderr[-2000:]}")
    return max(value["measured"] for value in found), found[0]["predicted"]


def launcher_file(strategy: str, folder: Path) -> Path:
    """Returns the shipped accelerate config, or for DeepSpeed a copy with smaller buckets."""
    shipped = ROOT / "accelerate_configs" / f"{strategy}.yaml"
    if not strategy.startswith("zero"):
        return shipped
    name = f"ds_configs/{strategy}.json"
    settings = json.loads((ROOT / name).read_text())
    for key in ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"):
        if key in settings["zero_optimization"]:
            settings["zero_optimization"][key] = BUCKET_ELEMENTS
    (folder / f"{strategy}.json").write_text(json.dumps(settings))
    path = folder / f"{strategy}.yaml"
    path.write_text(shipped.read_text().replace(name, str(folder / f"{strategy}.json")))
    return path


def measure_here(case: Case, folder: Path) -> int:
    """Measures and predicts this process's peak memory, and prints both."""
    from bench.steps import measure_peak
    from pretrain.config import RunConfig
    from pretrain.parallel.registry import make_strategy
    from pretrain_tools.planning.footprints import planned_memory

    config: RunConfig = config_of(case, folder)
    strategy = make_strategy(config)
    predicted = planned_memory(strategy, config)
    measured = measure_peak(config, strategy, case.micro_steps)
    sys.stdout.write(json.dumps({"measured": measured, "predicted": predicted.total}) + "\n")
    sys.stdout.flush()
    strategy.ranks.exit(0)
    return 0


def config_of(case: Case, folder: Path):
    """Writes the recipe and the model JSON for a case, and returns the config."""
    import yaml

    from pretrain.recipe import read_run_config

    width, intermediate, layers, heads, key_heads, vocabulary = SHAPES[case.shape]
    model = folder / f"{os.getpid()}.json"
    shape = {"model_type": "llama", "hidden_size": width, "intermediate_size": intermediate, "vocab_size": vocabulary}
    shape |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": key_heads}
    model.write_text(json.dumps({**shape, "max_position_embeddings": 2048, "tie_word_embeddings": layers != 8}))
    recipe = folder / f"{os.getpid()}.yaml"
    # Tensor-parallel ranks train on the same sequences, so they don't increase the tokens per step.
    ranks = 1 if case.strategy == "tp" else case.processes
    values = {
        "model": str(model),
        "output": str(folder / "run"),
        "precision": case.precision,
        "data": {"train": [{"shards": str(folder / "none")}], "sequence_length": case.length},
        "budget": {"steps": 10},
        "batch": {
            "tokens_per_step": case.sequences * case.length * ranks * case.micro_steps,
            "sequences_per_micro_batch": case.sequences,
        },
        "optim": {"learning_rate": 1e-3},
        "compile": "none",
    }
    recipe.write_text(yaml.safe_dump(values))
    return read_run_config(recipe, [(key, str(value)) for key, value in case.settings.items()])


if __name__ == "__main__":
    sys.exit(main())
