"""Trains a baseline in its own process and writes the time of every step.

    python -m bench.peers plain --shape JSON --shards DIR --steps_file FILE [--compile]

The baselines are a hand-written GPT (plain), the Transformers model in a minimal training loop (bare), and the
Transformers Trainer with its defaults (trainer). All use bf16 autocast or fp32, AdamW, gradient clipping at norm 1,
and random sequences from the same shards.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from bench.shapes import Shape
from pretrain.errors import run_script


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=["plain", "bare", "trainer"])
    parser.add_argument("--shape", type=lambda text: Shape(**json.loads(text)), required=True, help="a Shape as JSON")
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--steps_file", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument(
        "--report_every", type=int, default=1, help="steps between log lines; a GPU is synchronized only then"
    )
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args(arguments)


class StepsFile:
    """Writer for lines {"event": "train", "step": n, "time": ...}, as in metrics.jsonl."""

    def __init__(self, path: Path, every: int, device: str):
        self._file = path.open("w")
        self._step = 0
        self._every = every
        self._device = device

    def step_done(self) -> None:
        import torch

        self._step += 1
        if self._step % self._every:
            return
        line = {"event": "train", "step": self._step}
        # Without synchronization, only the kernel launches would be timed.
        if self._device == "cuda":
            torch.cuda.synchronize()
            line["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        self._file.write(json.dumps(line | {"time": time.time()}) + "\n")
        self._file.flush()


class Windows:
    """Training sequences: a map-style dataset for the Trainer, random batches for the other baselines."""

    def __init__(self, shards: Path, shape: Shape):
        from pretrain.data.shards import open_shards

        self.shape = shape
        self.reader = open_shards(shards, "train")

    def __len__(self) -> int:
        return (self.reader.tokens - 1) // self.shape.sequence_length

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.ids(index * self.shape.sequence_length, self.shape.sequence_length)
        return {"input_ids": ids, "labels": ids}

    def ids(self, start: int, length: int) -> Any:
        import numpy as np
        import torch

        ids = np.empty(length, np.int64)
        self.reader.read(start, ids)
        return torch.from_numpy(ids)

    def batch(self, device: Any) -> tuple[Any, Any]:
        """Returns (input IDs, targets) from random offsets, both int64 of shape (sequences, sequence_length)."""
        import torch

        length = self.shape.sequence_length
        starts = torch.randint(self.reader.tokens - length, (self.shape.sequences,)).tolist()
        ids = torch.stack([self.ids(start, length + 1) for start in starts])
        if torch.device(device).type == "cuda":
            ids = ids.pin_memory().to(device, non_blocking=True)
        return ids[:, :-1], ids[:, 1:]


def hf_model(shape: Shape) -> Any:
    """Builds the shape's Transformers model in fp32 with its default initialization."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = shape.model_json()
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    return AutoModelForCausalLM.from_config(config)


def train_loop(arguments: argparse.Namespace) -> None:
    """Trains the plain or bare baseline in a minimal loop."""
    import torch

    from pretrain.parallel.strategy import device_type

    device = device_type()
    torch.manual_seed(0)
    if arguments.peer == "plain":
        from bench.plain_gpt import PlainGPT

        model = PlainGPT(arguments.shape).to(device)
        loss_of = model
    else:
        model = hf_model(arguments.shape).to(device).train()

        def loss_of(input_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            # The model shifts the labels itself, so each sequence has one fewer target.
            return model(input_ids=input_ids, labels=input_ids, use_cache=False).loss

    if arguments.compile:
        model.compile(dynamic=False)
    # As in nanoGPT, weight decay only applies to matrices and embeddings, not to biases and norms.
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    windows = Windows(arguments.shards, arguments.shape)
    steps_file = StepsFile(arguments.steps_file, arguments.report_every, device)
    for _ in range(arguments.steps):
        input_ids, targets = windows.batch(device)
        with torch.autocast(device, torch.bfloat16, enabled=arguments.precision == "bf16"):
            loss = loss_of(input_ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps_file.step_done()


def train_with_trainer(arguments: argparse.Namespace) -> None:
    """Trains with the Transformers Trainer and its defaults, except for the precision, and without saving."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from pretrain.parallel.strategy import device_type

    device = device_type()
    steps_file = StepsFile(arguments.steps_file, arguments.report_every, device)

    class Times(TrainerCallback):
        def on_step_end(self, *_, **__) -> None:
            steps_file.step_done()

    settings = TrainingArguments(
        output_dir=str(arguments.steps_file.parent / "trainer"),
        per_device_train_batch_size=arguments.shape.sequences,
        max_steps=arguments.steps,
        bf16=arguments.precision == "bf16",
        use_cpu=device == "cpu",
        torch_compile=arguments.compile,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = Windows(arguments.shards, arguments.shape)
    Trainer(hf_model(arguments.shape), settings, train_dataset=data, callbacks=[Times()]).train()


def main() -> int:
    """Trains until all steps are done or the process is killed."""
    arguments = parse_arguments()
    if arguments.peer == "trainer":
        train_with_trainer(arguments)
    else:
        train_loop(arguments)
    return 0


def command_of(
    peer: str, shape: Shape, shards: Path, steps_file: Path, compiles: bool, report_every: int, precision: str = "bf16"
) -> list[str]:
    """Returns a baseline's command line, without the interpreter."""
    given = ["--shape", json.dumps(dataclasses.asdict(shape)), "--shards", shards, "--steps_file", steps_file]
    given += ["--report_every", report_every, "--precision", precision]
    return ["-m", "bench.peers", peer, *map(str, given), *(["--compile"] if compiles else [])]


if __name__ == "__main__":
    run_script(main)
