"""The recipe and the model JSON of a text of one's own, for the machine as measured: shape, tokens, batch, rate."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from pretrain.data.shards import open_shards, read_manifest
from pretrain.data.tokenizer import load_decoder
from pretrain.hardware import DTYPES, measured_matrix_flops, memory_bytes, peak_flops, use_all_cores
from pretrain.optim.optimizers import OPTIMIZERS
from pretrain.parallel.strategy import device_type, resolve_precision
from pretrain.units import count_text, duration_text
from pretrain_tools.planning.families import Shape
from pretrain_tools.planning.sizing import MOST_EPOCHS, TIME_USED, Sizing
from pretrain_tools.planning.step_time import mfu_of_small

SHARE_OF_TIME, START_SECONDS, LEAST_SHARE_OF_TIME = 0.85, 5.0, 0.4
"""Of the minutes, for steps: the rest is validation, samples, saving and export; and the start takes seconds."""
BYTES_PER_PARAMETER, MEMORY_SHARE = 24, 0.5
"""Weights, gradients, optimizer and a copy for checkpoints, in that share of the memory: activations take the rest."""
MICRO_BATCH_TOKENS = {"cpu": 1024, "cuda": 16_384}
VALIDATION_SHARE = 0.05
PROMPT_TOKENS = 12
COMPILED_FROM_MINUTES = 5.0
"""On a GPU; compiling takes most of a minute."""


@dataclass(frozen=True)
class Machine:
    """What this machine computes in the minutes given."""

    device_type: str
    """'cpu' or 'cuda'."""
    name: str
    precision: str
    peak_flops: float
    memory_bytes: int
    minutes: float
    speed: float = 1.0
    """Measured speed of steps, relative to the assumed one."""

    @classmethod
    def measured(cls, minutes: float) -> "Machine":
        """Takes half a second on a CPU and on a GPU that is not listed. Raises InputError for an unusable GPU."""
        device = torch.device(device_type())
        precision = resolve_precision("auto")
        if device.type == "cpu":
            use_all_cores()
        peak, _ = peak_flops(device, precision)
        is_gpu = device.type == "cuda"
        return cls(
            device_type=device.type,
            name=torch.cuda.get_device_name(device) if is_gpu else f"{torch.get_num_threads()} CPU threads",
            precision=precision,
            peak_flops=peak or measured_matrix_flops(DTYPES[precision], device, size=4096),
            memory_bytes=memory_bytes(device),
            minutes=minutes,
        )

    @property
    def seconds(self) -> float:
        """For steps."""
        whole = 60 * self.minutes
        return max(SHARE_OF_TIME * whole - START_SECONDS, LEAST_SHARE_OF_TIME * whole)

    @property
    def most_parameters(self) -> float:
        return MEMORY_SHARE * self.memory_bytes / BYTES_PER_PARAMETER

    def timed(self, shape: Shape, tokens_per_second: float) -> "Machine":
        """The same machine, with the speed that a model of that shape was measured to train at."""
        assumed = mfu_of_small(shape.parameters, self.device_type, self.precision) * self.peak_flops
        return replace(self, speed=shape.flops_per_token * tokens_per_second / assumed)

    def mfu(self, shape: Shape) -> float:
        """The MFU that small models of this size reach, by the speed of the one that was timed."""
        return self.speed * mfu_of_small(shape.parameters, self.device_type, self.precision)

    def flops(self, shape: Shape) -> float:
        """Of all steps, of a model of that shape."""
        return self.peak_flops * self.mfu(shape) * self.seconds

    def in_words(self) -> str:
        peak = f"{self.peak_flops / 1e12:.3g} TFLOP/s in {self.precision}"
        seconds, minutes = duration_text(self.seconds), duration_text(60 * self.minutes)
        return f"{self.name}, {peak}; {seconds} of {minutes} for steps, the rest for start, validation and saving"


@dataclass(frozen=True)
class Prepared:
    """What the shards hold."""

    vocabulary: int
    training_tokens: int
    validation_tokens: int
    prompt: str
    """The beginning of the validation split; of the training split if that is empty."""

    @classmethod
    def read(cls, shards: Path) -> "Prepared":
        manifest = read_manifest(shards)
        training, validation = (manifest.totals(split)[0] for split in ("train", "validation"))
        reader = open_shards(shards, "validation" if validation else "train")
        ids = np.zeros(min(PROMPT_TOKENS, reader.tokens), np.int64)
        reader.read(0, ids)
        document = ids[: int(np.argmax(np.append(ids, manifest.end_of_document_id) == manifest.end_of_document_id))]
        text = load_decoder(manifest.tokenizer_folder).decode(document.tolist())
        return cls(manifest.vocabulary_size, training, validation, text.replace("\ufffd", "").strip())


@dataclass(frozen=True)
class SizedRecipe:
    """A run of the chosen size."""

    output: Path
    model: Path
    shards: Path
    machine: Machine
    prepared: Prepared
    sizing: Sizing

    @property
    def learning_rate(self) -> float:
        """Muon's, to two digits."""
        return float(f"{OPTIMIZERS['muon'].auto_rate(self.sizing.shape.parameters, self.sizing.tokens_per_step):.2g}")

    @property
    def sequences_per_micro_batch(self) -> int:
        tokens = min(MICRO_BATCH_TOKENS[self.machine.device_type], self.sizing.tokens_per_step)
        return max(1, tokens // self.sizing.shape.sequence_length)

    @property
    def quarter(self) -> int:
        """Steps between two validations, checkpoints and samples; the last are at the end."""
        return self.sizing.steps // 4

    @property
    def validation_sequences(self) -> int:
        """So many that five validations of them, forward passes alone, take a twentieth of the training."""
        tokens = VALIDATION_SHARE * self.sizing.tokens * 3 / 5
        return int(min(max(tokens / self.sizing.shape.sequence_length, 4), 128))

    @property
    def has_validation(self) -> bool:
        """Whether it fills a window."""
        return self.prepared.validation_tokens > self.sizing.shape.sequence_length

    def in_words(self) -> str:
        """The model."""
        shape = self.sizing.shape
        return f"{shape.layers} layers x {shape.width}, {count_text(shape.parameters)} parameters"

    def reasons(self) -> dict[str, str]:
        """{what was chosen: what, and why}."""
        sizing, shape, prepared = self.sizing, self.sizing.shape, self.prepared
        mfu = self.machine.mfu(shape)
        rate = mfu * self.machine.peak_flops / shape.flops_per_token
        flops = f"{count_text(rate)} a second as timed, {mfu:.0%} of the peak"
        unique, most = count_text(sizing.unique_tokens), f"{MOST_EPOCHS:.0f}"
        rows = {
            "model": f"{self.in_words()}: the best use of the time for so much text",
            "tokens": f"about {count_text(sizing.tokens)}, {sizing.epochs:.3g} epochs of {unique}: {flops}",
            "steps": f"about {sizing.steps:,} of {sizing.tokens_per_step:,} tokens in windows of "
            f"{shape.sequence_length:,}; Muon at {self.learning_rate:g}",
        }
        seconds = sizing.tokens / rate
        if seconds < TIME_USED * self.machine.seconds:
            rows["time"] = (
                f"about {duration_text(seconds)}, not all that was given: beyond {most} epochs a text is "
                "learned by heart; more text is worth more"
            )
        else:
            rows["time"] = f"{self.machine.minutes:g} min: the learning rate decays when they are nearly over"
        if not self.has_validation:
            rows["warning"] = (
                f"no validation: {prepared.validation_tokens:,} tokens are held out, fewer than one window; "
                "give more text"
            )
        return rows

    def text(self, header: str) -> str:
        """The recipe; its first line is `header`."""
        sizing, shape, machine = self.sizing, self.sizing.shape, self.machine
        comments = "\n".join(f"# {name:<10} {value}" for name, value in self.reasons().items())
        compiled = machine.device_type == "cuda" and machine.minutes >= COMPILED_FROM_MINUTES
        warmup = max(1, min(100, sizing.steps // 50))
        return f"""\
{header}
# The same command continues this run. Change what you like; for another run, give it another output.
# machine    {machine.in_words()}
{comments}
model: {self.model}
output: {json.dumps(str(self.output))}
seed: 42
precision: auto                     # bf16 where the device multiplies in it, else fp32
data:
  train: [{{shards: {json.dumps(str(self.shards))}}}]
  sequence_length: {shape.sequence_length}
  document_mask: true
budget: {{steps: {sizing.most_steps}, minutes: {machine.minutes:g}}}  # whichever is over first
batch: {{tokens_per_step: {sizing.tokens_per_step}, sequences_per_micro_batch: {self.sequences_per_micro_batch}}}
optim:
  name: muon
  learning_rate: {self.learning_rate:g}
  schedule: wsd                     # its decay can begin when the time is nearly out
  warmup_steps: {warmup}
  weight_decay: 0.1
  max_grad_norm: 1.0
compile: {"regional" if compiled else "none"}
validation: {{every_steps: {self.quarter}, sequences: {self.validation_sequences}}}
checkpoint: {{every_steps: {self.quarter}, keep_last: 4, keep_best: 1}}
samples:                            # how the held-out text begins, continued
  every_steps: {self.quarter}
  prompts: [{json.dumps(self.prepared.prompt)}]
  top_k: 50
logging: {{every_steps: 10}}
"""
