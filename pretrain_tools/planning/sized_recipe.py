"""Measures this machine and writes the recipe for train.py --text."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pretrain.data.shards import open_shards, read_manifest
from pretrain.data.tokenizer import load_decoder
from pretrain.hardware import DTYPES, measured_matrix_flops, memory_bytes, peak_flops, use_all_cores
from pretrain.optim.optimizers import OPTIMIZERS
from pretrain.parallel.strategy import device_type, resolve_precision
from pretrain.units import count_text, counted, duration_text
from pretrain_tools.planning.families import Shape
from pretrain_tools.planning.sizing import MOST_EPOCHS, Sizing
from pretrain_tools.planning.step_time import mfu_of_size
from pretrain_tools.planning.texts import render

SHARE_OF_TIME = 0.85
"""Fraction of the time spent on training steps. The rest is for validation, samples, checkpoints and export."""
START_SECONDS = 5.0
LEAST_SHARE_OF_TIME = 0.4
"""Minimum fraction of the time spent on training steps, for very short runs."""
BYTES_PER_PARAMETER = 24
"""Bytes per parameter for weights, gradients, optimizer state and a checkpoint copy."""
MEMORY_SHARE = 0.5
"""Fraction of memory for BYTES_PER_PARAMETER. The rest is for activations."""
MICRO_BATCH_TOKENS = {"cpu": 1024, "cuda": 16_384}
VALIDATION_SHARE = 0.05
"""FLOPs of five validations as a fraction of the training FLOPs."""
PROMPT_TOKENS = 12
COMPILED_FROM_MINUTES = 5.0
"""Minimum duration of GPU runs that are compiled. Compilation takes most of a minute."""


@dataclass(frozen=True)
class Machine:
    """This machine and the time limit."""

    device_type: str
    """'cpu' or 'cuda'."""
    name: str
    precision: str
    peak_flops: float
    memory_bytes: int
    minutes: float

    @classmethod
    def measured(cls, minutes: float) -> "Machine":
        """Measures this machine. On a CPU or an unlisted GPU, this takes half a second.

        Raises InputError for an unusable GPU.
        """
        device = torch.device(device_type())
        precision = resolve_precision("auto")
        if device.type == "cpu":
            use_all_cores()
        peak, _ = peak_flops(device, precision)
        is_gpu = device.type == "cuda"
        return cls(
            device_type=device.type,
            name=torch.cuda.get_device_name(device) if is_gpu else counted(torch.get_num_threads(), "CPU thread"),
            precision=precision,
            # Unlisted GPUs are measured.
            peak_flops=peak or measured_matrix_flops(DTYPES[precision], device, size=4096),
            memory_bytes=memory_bytes(device),
            minutes=minutes,
        )

    @property
    def seconds(self) -> float:
        """Time available for training steps."""
        whole = 60 * self.minutes
        return max(SHARE_OF_TIME * whole - START_SECONDS, LEAST_SHARE_OF_TIME * whole)

    @property
    def most_parameters(self) -> float:
        return MEMORY_SHARE * self.memory_bytes / BYTES_PER_PARAMETER

    def mfu(self, shape: Shape) -> float:
        """Estimates the MFU for this model size."""
        return mfu_of_size(shape.parameters, self.device_type, self.peak_flops)

    def flops(self, shape: Shape) -> float:
        """Returns the total training FLOPs that the time allows for this shape."""
        return self.peak_flops * self.mfu(shape) * self.seconds

    def in_words(self) -> str:
        peak = f"{self.peak_flops / 1e12:.3g} TFLOP/s in {self.precision}"
        seconds = duration_text(self.seconds)
        minutes = duration_text(60 * self.minutes)
        return f"{self.name}, {peak}; trains for {seconds} of {minutes} (the rest is startup, validation and saving)"


@dataclass(frozen=True)
class Prepared:
    """A summary of prepared shards."""

    vocabulary: int
    training_tokens: int
    validation_tokens: int
    prompt: str
    """Start of the validation split, or of the training split if there is none."""

    @classmethod
    def read(cls, shards: Path) -> "Prepared":
        manifest = read_manifest(shards)
        training, validation = (manifest.totals(split)[0] for split in ("train", "validation"))
        reader = open_shards(shards, "validation" if validation else "train")
        ids = np.zeros(min(PROMPT_TOKENS, reader.tokens), np.int64)
        reader.read(0, ids)
        # If no document ends here, argmax finds the appended sentinel.
        document = ids[: int(np.argmax(np.append(ids, manifest.end_of_document_id) == manifest.end_of_document_id))]
        text = load_decoder(manifest.tokenizer_folder).decode(document.tolist())
        # The last token may end inside a character, which then decodes to U+FFFD.
        return cls(manifest.vocabulary_size, training, validation, text.replace("\ufffd", "").strip())


@dataclass(frozen=True)
class SizedRecipe:
    """A recipe for the chosen model size."""

    output: Path
    model: Path
    shards: Path
    machine: Machine
    prepared: Prepared
    sizing: Sizing

    @property
    def learning_rate(self) -> float:
        """Muon's learning rate, rounded to two digits."""
        return float(
            f"{OPTIMIZERS['muon'].auto_learning_rate(self.sizing.shape.parameters, self.sizing.tokens_per_step):.2g}"
        )

    @property
    def has_validation(self) -> bool:
        """True if the held-out text fills a sequence."""
        return self.prepared.validation_tokens > self.sizing.shape.sequence_length

    def in_words(self) -> str:
        """Describes the model."""
        shape = self.sizing.shape
        return f"{shape.layers} layers x {shape.width}, {count_text(shape.parameters)} parameters"

    def reasons(self) -> dict[str, str]:
        """Returns {name: value and reason} for each choice."""
        sizing = self.sizing
        shape = sizing.shape
        mfu = self.machine.mfu(shape)
        rate = mfu * self.machine.peak_flops / shape.flops_per_token
        flops = f"{count_text(rate)} per second with an assumed MFU of {mfu:.0%}"
        unique = count_text(sizing.unique_tokens)
        rows = {
            "model": f"{self.in_words()}: the best size for this time budget and amount of text",
            "tokens": f"about {count_text(sizing.tokens)} ({sizing.epochs:.3g} epochs of {unique}), at {flops}",
            "steps": f"about {sizing.steps:,} of {sizing.tokens_per_step:,} tokens in sequences of "
            f"{shape.sequence_length:,}; Muon with a learning rate of {self.learning_rate:g}",
        }
        rows["time"] = (
            f"about {duration_text(sizing.tokens / rate)} of training steps, at most {self.machine.minutes:g} min in "
            f"total; beyond {MOST_EPOCHS:.0f} epochs, the model memorizes the text, so add more to train for longer"
        )
        if not self.has_validation:
            rows["warning"] = (
                f"no validation, because only {self.prepared.validation_tokens:,} tokens are held out, less than one "
                "sequence; add more text"
            )
        return rows

    def text(self, header: str) -> str:
        """Formats the recipe. `header` is its first line."""
        machine = self.machine
        sizing = self.sizing
        length = sizing.shape.sequence_length
        is_compiled = machine.device_type == "cuda" and machine.minutes >= COMPILED_FROM_MINUTES
        # Five validations (forward passes only) take VALIDATION_SHARE of the training FLOPs.
        validation_sequences = VALIDATION_SHARE * sizing.tokens * 3 / 5 / length
        return render(
            "own_text.yaml.j2",
            header=header,
            recipe=self,
            machine=machine,
            sizing=sizing,
            sequences_per_micro_batch=max(
                1, min(MICRO_BATCH_TOKENS[machine.device_type], sizing.tokens_per_step) // length
            ),
            warmup_steps=max(1, min(100, sizing.steps // 50)),
            compile="regional" if is_compiled else "none",
            quarter=sizing.steps // 4,  # the last validation, checkpoint and sample come at the end
            validation_sequences=int(min(max(validation_sequences, 4), 128)),
        )
