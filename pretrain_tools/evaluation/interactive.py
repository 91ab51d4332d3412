"""Continues text that the user types, or each line of standard input if it isn't a terminal.

Lines that begin with a colon are commands (`:help`). Ctrl-C stops generation, and Ctrl-D ends the session.
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

HELP = """Type some text and press Enter; \\n is a new line. The model continues your text as if it were a document.
  :more     continue the last text        :again    sample another continuation of your text
  :reload   load the newest checkpoint    :help     show this help
  :quit     or Ctrl-D. Ctrl-C stops generation. See also --temperature, --top_k, --top_p and --max_new_tokens"""
COMMANDS = ("more", "again", "reload", "help", "quit")

LoadModel = Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase, str]]
"""Loads a model. Returns (model, tokenizer, name)."""


class Session:
    """An interactive session.

    Args:
        load: loads the model; called again for `:reload`.
        sampling: sampling settings. The seed is increased by 1 after each generation.
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
        """Processes a line of input. Returns False for `:quit`. Raises InputError for an unknown command."""
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
                raise InputError(f":{name}: no text yet; type some text first")
            self.generate(self.text if name == "more" else self.beginning)
        elif name == "reload":
            self.reload()
        elif name == "help":
            print(HELP)
        return name != "quit"

    def generate(self, text: str) -> None:
        """Prints the continuation of `text` as it is generated, until Ctrl-C."""
        # If the text is too long for the model's positions, use only its end.
        room = self.sampling.max_new_tokens
        positions = getattr(self.model.config, "max_position_embeddings", None) or room + 1_000_000
        if room >= positions:
            raise InputError(f"--max_new_tokens {room}: must be less than the model's {positions:,} positions")
        ids_BT = encode_prompt(self.tokenizer, text, max_new_tokens=room, max_positions=None)[:, room - positions :]
        printed = Collector(self.tokenizer)
        devices = [self._device] if self._device.type == "cuda" else []
        with suppress(KeyboardInterrupt), torch.no_grad(), torch.random.fork_rng(devices):
            # Use a separate random state, so that samples depend only on the seed.
            torch.manual_seed(self.sampling.seed)
            self.model.generate(
                ids_BT.to(self._device), streamer=printed, **generation_arguments(self.model, ids_BT, self.sampling)
            )
        if not printed.ended:
            printed.end()
        # Also keep the beginning of a long text, which the model no longer sees.
        seen = self.tokenizer.decode(ids_BT[0], skip_special_tokens=True)
        self.text = text.removesuffix(seen) + "".join(printed.parts)
        self.sampling = dataclasses.replace(self.sampling, seed=self.sampling.seed + 1)


class Collector(TextStreamer):
    """Prints text as it is generated, and stores it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        super().__init__(tokenizer, skip_special_tokens=True)
        self.parts: list[str] = []
        self.ended = False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.parts.append(text)
        self.ended = stream_end
        super().on_finalized_text(text, stream_end)


def lines() -> Iterator[str]:
    """Yields lines from standard input. In a terminal, line editing and history are available."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):  # not available in every Python
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
    """Runs a session until `:quit` or the end of the input. first: optional prompt."""
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
