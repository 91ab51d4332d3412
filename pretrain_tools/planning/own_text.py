"""Implements train.py --text: prepares text files and writes a recipe for this machine and a time limit.

After an interruption, the same command continues where it stopped. The recipe is written last, with the command in its
first line. Once the recipe exists, the command only trains.
"""

import argparse
import itertools
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from pretrain.data.manifest import MANIFEST_FILE
from pretrain.data.shards import open_shards, read_manifest
from pretrain.data.tokenizer import load_decoder
from pretrain.errors import CRASHED, EXIT_BAD_INPUT, EXIT_INTERRUPTED, InputError, Problems, leave, shortened
from pretrain.files import ROOT, shown
from pretrain.hardware import DTYPES, measured_matrix_flops, memory_bytes, peak_flops, use_all_cores
from pretrain.model.model_config import padded_vocabulary
from pretrain.optim.optimizers import OPTIMIZERS
from pretrain.parallel.strategy import device_type, resolve_precision
from pretrain.processes import status_after
from pretrain.recipe import read_command_line
from pretrain.runs.run_folder import read_json
from pretrain.units import bytes_text, counted, duration_text
from pretrain_tools.planning.budget import ENOUGH_TOKENS
from pretrain_tools.planning.families import Shape
from pretrain_tools.planning.sizing import MOST_EPOCHS, OF_THE_DEMO, Sizing, choose_sizing, vocabulary_for
from pretrain_tools.planning.step_time import mfu_of_size
from pretrain_tools.planning.text_files import TextFiles, find_text_files
from pretrain_tools.planning.texts import MADE_BY, RecipePlace, lines_of, render
from pretrain_tools.preparation.collector import UNFINISHED_FOLDER
from pretrain_tools.preparation.documents.sources import Files, expected_bytes
from pretrain_tools.preparation.plan import source_differences
from pretrain_tools.preparation.tokenizer_training import RECORD_FILE
from pretrain_tools.runs.child_processes import signals_passed_on

SMALLEST_TEXT_BYTES = 20_000
LARGEST_FILE_BYTES = 250_000_000
"""Larger plain-text files are split into paragraphs, because documents are limited to 256 MiB."""
VALIDATION_FRACTIONS = ((2e5, 0.1), (1e7, 0.05), (1e8, 0.02), (math.inf, 0.01))
"""(limit on the text size in bytes, fraction held out for validation below it)."""
STOPPED = "stopped; run the same command again to continue"
ANOTHER_NAME = "use a different name with --output runs/NAME"
SHARE_OF_TIME = 0.85
"""Fraction of the time spent on training steps. The rest is for validation, samples, checkpoints and export."""
START_SECONDS = 5.0
LEAST_SHARE_OF_TIME = 0.4
"""Minimum fraction of the time spent on training steps, for very short runs."""
BYTES_PER_PARAMETER = 24
"""Bytes per parameter for weights, gradients, optimizer state and a checkpoint copy."""
MEMORY_SHARE = 0.5
"""Fraction of memory for BYTES_PER_PARAMETER. The rest is for activations."""
VALIDATION_SHARE = 0.05
"""FLOPs of five validations as a fraction of the training FLOPs."""
PROMPT_TOKENS = 12
COMPILED_FROM_MINUTES = 5.0
"""Minimum duration of GPU runs that are compiled. Compilation takes most of a minute."""


@dataclass(frozen=True)
class OwnText:
    """Command-line arguments for --text."""

    patterns: list[str]
    minutes: float
    output: Path
    rest: list[str]
    """Other arguments for train.py."""
    exclude: list[str]

    @cached_property
    def place(self) -> RecipePlace:
        name = self.output.name
        recipe = Path("recipes", f"{name}.yaml")
        return RecipePlace(recipe, Path("data", name), self.output, tokenizer=str(Path("tokenizers", name)))

    @property
    def command(self) -> str:
        """The command recorded in the recipe, without train.py's other arguments."""
        words = ["--text", *self.patterns, *(["--exclude", *self.exclude] if self.exclude else [])]
        words += ["--minutes", f"{self.minutes:g}", "--output", str(self.output)]
        return typed(["train.py", *words])


def typed(words: Sequence[str]) -> str:
    """Formats a command. Escapes file names that aren't encoded in UTF-8."""
    return f"python {shlex.join(map(shown, words))}"


def with_own_text(arguments: list[str]) -> list[str]:
    """Creates the tokenizer, shards and recipe if necessary, and replaces --text with --config.

    Returns arguments without --text unchanged. Raises InputError for unusable text or existing files with the same
    names. Exits with the preparation's status if it fails or is interrupted.
    """
    if {"--help", "-h"} & set(arguments) or not any(word.split("=")[0] == "--text" for word in arguments):
        return arguments
    asked = read_own_text(arguments)
    recipe = asked.place.recipe
    is_one_of_several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    started = ["--config", str(recipe), *asked.rest]
    if recipe.exists():
        refuse_another_command(asked)
        if not is_one_of_several:
            files = find_text(asked)
            refuse_other_text(asked, files)
            if files.left_out:
                print(files.left_out)
            print(f"{recipe}: already created by this command; continuing with it", flush=True)
        return started
    if is_one_of_several:
        raise InputError(
            "--text: the data must be prepared in a single process, but several were launched; first run "
            f"{asked.command} --check, then launch train.py --config {recipe}"
        )
    problems = Problems()
    # Check everything before the first slow step, so that all problems are reported together.
    files = problems.attempt(find_text, asked)
    problems.attempt(refuse_files_in_the_way, asked)
    # The recipe doesn't exist yet, so check the settings with the demo's.
    problems.attempt(read_command_line, ["--config", str(ROOT / "recipes" / "demo.yaml"), *asked.rest], "")
    problems.stop_if_any()
    try:
        make_recipe(asked, files)
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        leave(EXIT_INTERRUPTED)
    return started


def read_own_text(arguments: Sequence[str]) -> OwnText:
    """Parses `--text FILES... [--exclude FILES...] [--minutes M] [--output FOLDER]`. Raises InputError or exits.

    Other arguments are passed on to train.py.
    """
    usage = "train.py --text 'mine/*.txt' --minutes 10 --output runs/mine"
    parser = argparse.ArgumentParser("train.py", usage=usage, add_help=False, allow_abbrev=False)
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--exclude", nargs="+", default=[])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--config")
    given, rest = parser.parse_known_args(arguments)
    if given.config:
        raise InputError(f"--text creates a new recipe, so omit --config {given.config}")
    if not 0 < given.minutes < 1e6:
        raise InputError(f"--minutes {given.minutes:g}: must be more than 0 and less than 1,000,000 minutes")
    output = given.output or Path("runs", run_name_of(given.text[0]))
    # The name is used in file paths and shell commands.
    if not re.fullmatch(r"\w[\w.-]*", output.name):
        raise InputError(
            f"--output {output}: the run name may contain only letters, digits, '_', '-' and '.', as in runs/mine"
        )
    return OwnText(given.text, given.minutes, output, rest, given.exclude)


def run_name_of(pattern: str) -> str:
    """Returns 'mine' for 'mine/*.txt', 'alice' for 'books/alice.txt', or 'own_text' if no part is usable."""
    parts = Path(pattern).parts
    fixed = [part for part in parts if not any(sign in part for sign in "*?[")]
    last = fixed[-1].split(".")[0] if len(fixed) == len(parts) and fixed else fixed[-1] if fixed else Path.cwd().name
    return re.sub(r"\W+", "_", last).strip("_") or "own_text"


def find_text(asked: OwnText) -> TextFiles:
    """Finds the files. Raises InputError if there is no text or too little, or if a named file isn't text."""
    try:
        files = find_text_files(asked.patterns, asked.exclude)
    except InputError as error:
        rename = "; rename text files to end with .txt"
        told = (problem.replace(", or set --input_format", rename) for problem in error.problems)
        raise InputError(*(problem.replace("--input", "--text") for problem in told)) from None
    total = sum(map(expected_bytes, files.sources))
    if total < SMALLEST_TEXT_BYTES:
        raise InputError(
            f"--text {' '.join(asked.patterns)}: got only {total:,} bytes in {counted(len(files.sources), 'file')}; "
            f"use at least {SMALLEST_TEXT_BYTES:,} bytes, preferably a million"
        )
    return files


def refuse_another_command(asked: OwnText) -> None:
    """Raises InputError if a different command made the recipe."""
    recipe = asked.place.recipe
    first = recipe.read_text(encoding="utf-8", errors="replace").split("\n", 1)[0]
    if first == MADE_BY + asked.command:
        return
    if not first.startswith(MADE_BY):
        raise InputError(f"{recipe}: already exists, but wasn't made by train.py --text; {ANOTHER_NAME}")
    raise InputError(
        f"{recipe}: was made by a different command: {first.removeprefix(MADE_BY)}\nTo continue that run, repeat that "
        f"command. To start a new run, {ANOTHER_NAME}. To train the old run for longer, use python train.py --config "
        f"{recipe} --budget.steps N"
    )


def refuse_files_in_the_way(asked: OwnText) -> None:
    """Raises InputError if files with the same names exist, but weren't made by this command.

    Accepts any prepared tokenizer and shards, because prepare_data.py rejects those from other commands.
    """
    place = asked.place
    # {path: files whose presence means that this command may have made it}
    own = {
        place.model: (),
        Path(place.tokenizer): (RECORD_FILE,),
        place.shards: (MANIFEST_FILE, UNFINISHED_FOLDER),
        place.output: (),
    }
    Problems(
        f"{path}: already exists, but wasn't made by this command; {ANOTHER_NAME}"
        for path, names in own.items()
        if path.exists() and not any((path / name).exists() for name in names)
    ).stop_if_any()


def refuse_other_text(asked: OwnText, files: TextFiles) -> None:
    """Raises InputError if the text has changed since preparation."""
    before = (read_json(asked.place.shards / MANIFEST_FILE) or {}).get("sources", [])
    changes = source_differences(before, Files(files.sources).description())
    if changes:
        raise InputError(
            f"{asked.place.shards}: the text has changed since preparation: {shortened('; '.join(changes))}. To "
            f"train on the new text, {ANOTHER_NAME}. To continue with the old text, use python train.py "
            f"--config {asked.place.recipe}"
        )


def make_recipe(asked: OwnText, files: TextFiles) -> None:
    """Chooses the settings, prepares the data and writes the recipe. Prints each choice and its reason."""
    text_bytes = sum(map(expected_bytes, files.sources))
    fraction = next(share for limit, share in VALIDATION_FRACTIONS if text_bytes < limit)
    amount = f"{counted(len(files.sources), 'file')}, {bytes_text(text_bytes)}"
    row("text", f"{amount}; {fraction:.0%} is held out for validation")
    if files.left_out:
        row("", files.left_out)
    row("machine", "measuring ...")
    machine = Machine.measured(asked.minutes)
    row("", machine.in_words())
    place = asked.place
    # Keep an existing tokenizer's vocabulary size, because a second measurement may suggest a different one.
    trained = read_json(Path(place.tokenizer, RECORD_FILE)) or {}
    vocabulary = trained.get("vocabulary_size") or vocabulary_for(text_bytes, machine.flops(OF_THE_DEMO))
    row("vocabulary", f"{vocabulary:,} IDs, based on the amount of text and the model size that fits the time budget")
    commands = preparation_commands(asked, files, vocabulary, fraction)
    for command in commands:
        run_to_its_end(command)
    prepared = Prepared.read(place.shards)
    sizing = choose_sizing(
        machine.flops, prepared.training_tokens, padded_vocabulary(prepared.vocabulary), machine.most_parameters
    )
    recipe = SizedRecipe(place.output, place.model, place.shards, machine, prepared, sizing)
    place.write(sizing.shape.json_text, recipe.text(MADE_BY + asked.command))
    print()
    for name, value in recipe.reasons().items():
        row(name, value)
    row("written", f"{place.tokenizer}, {place.shards}, {place.model}, {place.recipe}")
    print("\nTo run these steps by hand, then plot the losses and sample from the model:")
    commands += [
        ["train.py", "--config", str(place.recipe)],
        ["runs.py", "plot", str(place.output)],
        ["evaluate.py", "--model", str(place.output), "--interactive"],
    ]
    for command in commands:
        print(f"  {typed(command)}")
    print(flush=True)


def row(name: str, value: str) -> None:
    print(f"{name:<11} {value}", flush=True)


def preparation_commands(asked: OwnText, files: TextFiles, vocabulary: int, fraction: float) -> list[list[str]]:
    """Returns the commands that train the tokenizer and prepare the shards, without `python`."""
    same = ["prepare_data.py", *files.arguments, "--validation_fraction", f"{fraction:g}"]
    # prepare_data.py reads a plain-text file as one document.
    if any(source.format == "txt" and expected_bytes(source) > LARGEST_FILE_BYTES for source in files.sources):
        same += ["--documents", "paragraph"]
    return [
        [*same, "--train_tokenizer", str(vocabulary), "--output", asked.place.tokenizer],
        [*same, "--tokenizer", asked.place.tokenizer, "--output", str(asked.place.shards)],
    ]


def run_to_its_end(command: list[str]) -> None:
    """Runs one of the project's scripts. Exits if it fails or is interrupted."""
    print(f"\n$ {typed(command)}", flush=True)
    with signals_passed_on() as received:
        words = [sys.executable, str(ROOT / command[0]), *command[1:]]
        status = 0 if received else subprocess.run(words, start_new_session=True).returncode
    if received:
        status = status_after(received[0])
    if status and status != EXIT_BAD_INPUT:
        print(STOPPED, file=sys.stderr)
    if status:
        leave(status if status > 0 else CRASHED)


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
        document = itertools.takewhile(lambda token: token != manifest.end_of_document_id, ids.tolist())
        text = load_decoder(manifest.tokenizer_folder).decode(list(document))
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

    def reasons(self) -> dict[str, str]:
        """Returns {name: value and reason} for each choice."""
        shape = self.sizing.shape
        mfu = self.machine.mfu(shape)
        rate = mfu * self.machine.peak_flops / shape.flops_per_token
        lines = lines_of("own_text.j2", "reasons", self, mfu, rate, MOST_EPOCHS)
        return dict(line.split(" | ", 1) for line in lines)

    def text(self, header: str) -> str:
        """Formats the recipe. `header` is its first line."""
        device_type = self.machine.device_type
        sizing = self.sizing
        length = sizing.shape.sequence_length
        is_compiled = device_type == "cuda" and self.machine.minutes >= COMPILED_FROM_MINUTES
        # Five validations (forward passes only) take VALIDATION_SHARE of the training FLOPs.
        validation_sequences = VALIDATION_SHARE * sizing.tokens * 3 / 5 / length
        return render(
            "own_text.yaml.j2",
            header=header,
            recipe=self,
            sequences_per_micro_batch=max(1, min(ENOUGH_TOKENS[device_type], sizing.tokens_per_step) // length),
            warmup_steps=max(1, min(100, sizing.steps // 50)),
            compile="regional" if is_compiled else "none",
            quarter=sizing.steps // 4,  # the last validation, checkpoint and sample come at the end
            validation_sequences=int(min(max(validation_sequences, 4), 128)),
        )
