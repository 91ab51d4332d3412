"""Continues text typed at a prompt. A base model completes text but doesn't answer questions.

A line that begins with a colon is a command (`:help`). Text appears as it is generated. Ctrl-C stops the text, and
Ctrl-D ends the session. If standard input isn't a terminal, the model continues each of its lines.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from pretrain.errors import InputError, did_you_mean
from pretrain.hardware import emulation_of_bf16
from pretrain.training.samples import Sampling, encode_prompt, generation_arguments

HELP = """Type a beginning and press Enter; \\n is a new line. The model continues your text like a document.
  :more     continue the last text        :again    sample another continuation of the last beginning
  :reload   load the newest checkpoint    :help     show this help
  :quit     or Ctrl-D. Ctrl-C stops a text. Set sampling by --temperature, --top_k, --top_p and --max_new_tokens"""
COMMANDS = ("more", "again", "reload", "help", "quit")

LoadModel = Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase, str]]
"""Loads a model, its tokenizer and its name from disk."""


class Session:
    """A session with one model.

    Args:
        load: loads the model; called again for `:reload`.
        sampling: sampling settings. The seed increases by 1 with each text.
    """

    def __init__(self, load: LoadModel, sampling: Sampling, device: torch.device):
        self._load = load
        self._device = device
        self.sampling = sampling
        self.beginning = ""
        self.text = ""
        self.reload()

    def reload(self) -> None:
        self.model, self.tokenizer, self.name = self._load()
        if emulation_of_bf16(self._device):
            self.model.float()
        self.model.eval().to(self._device)
        print(f"{self.name} · :help lists the commands", flush=True)

    def answer(self, line: str) -> bool:
        """Processes a line. Returns False at the end of the session. Raises InputError for an unknown command."""
        if not line.startswith(":"):
            if line:
                self.beginning = line.replace("\\n", "\n")
                self.generate(self.beginning)
            return True
        name = line[1:].strip()
        if name not in COMMANDS:
            raise InputError(f":{name}: unknown{did_you_mean(name, COMMANDS)}")
        if name in ("more", "again"):
            if not self.text:
                raise InputError(f":{name}: no text yet; type a beginning")
            self.generate(self.text if name == "more" else self.beginning)
        elif name == "reload":
            self.reload()
        elif name == "help":
            print(HELP)
        return name != "quit"

    def generate(self, text: str) -> None:
        """Prints `text` and its continuation token by token, until Ctrl-C."""
        # Keep only the newest tokens, because a text may exceed the model's positions.
        room = self.sampling.max_new_tokens
        positions = getattr(self.model.config, "max_position_embeddings", None) or room + 1_000_000
        if room >= positions:
            raise InputError(f"--max_new_tokens {room}: this model has {positions:,} positions")
        ids_BT = encode_prompt(self.tokenizer, text, max_new_tokens=room, max_positions=None)[:, room - positions :]
        printed = Collector(self.tokenizer)
        devices = [self._device] if self._device.type == "cuda" else []
        with suppress(KeyboardInterrupt), torch.no_grad(), torch.random.fork_rng(devices):
            # Fork and seed the random state, because loading a model must not change the next sample.
            torch.manual_seed(self.sampling.seed)
            self.model.generate(
                ids_BT.to(self._device), streamer=printed, **generation_arguments(self.model, ids_BT, self.sampling)
            )
        if not printed.ended:
            printed.end()
        # Keep the part of a long text that the model no longer sees.
        seen = self.tokenizer.decode(ids_BT[0], skip_special_tokens=True)
        self.text = text.removesuffix(seen) + "".join(printed.parts)
        self.sampling = dataclasses.replace(self.sampling, seed=self.sampling.seed + 1)


class Collector(TextStreamer):
    """Prints text word by word, and stores it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        super().__init__(tokenizer, skip_special_tokens=True)
        self.parts: list[str] = []
        self.ended = False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.parts.append(text)
        self.ended = stream_end
        super().on_finalized_text(text, stream_end)


def lines() -> Iterator[str]:
    """Yields the typed lines. A terminal has editing and history."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):  # arrow keys and history; some Pythons lack it
            import readline  # noqa: F401
    while True:
        try:
            yield input("> " if is_terminal else "")
        except KeyboardInterrupt:
            print()
        except EOFError:
            if is_terminal:
                print()
            return


def interact(load: LoadModel, sampling: Sampling, device: torch.device, first: str | None = None) -> None:
    """Runs a session until `:quit` or the end of the input. `first` is optional text to continue first."""
    session = Session(load, sampling, device)
    if first is not None:
        session.answer(first)
    for line in lines():
        try:
            if not session.answer(line):
                return
        except InputError as error:
            print(error, file=sys.stderr)
        if not sys.stdin.isatty():
            print(flush=True)
