"""Continues text that the user types, or each line of standard input if it isn't a terminal."""

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import suppress

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from pretrain.errors import InputError
from pretrain.training.samples import Sampling, encode_prompt, generate_text

HELP = """Type some text and press Enter; \\n is a new line. The model continues your text as if it were a document.
  :more     continue the last text
  :quit     or Ctrl-D. Ctrl-C stops generation. See also --temperature, --top_k, --top_p and --max_new_tokens"""
MOST_TOKENS = 1_000_000
"""Number of positions of a model without a limit."""


def interact(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, first: str | None = None
) -> None:
    """Continues text until `:quit` or the end of the input. Increases the seed by 1 after each generation.

    first: optional prompt.
    """
    most = (getattr(model.config, "max_position_embeddings", None) or MOST_TOKENS) - sampling.max_new_tokens
    if most < 1:
        raise InputError(
            f"--max_new_tokens {sampling.max_new_tokens}: must be less than the model's "
            f"{most + sampling.max_new_tokens:,} positions"
        )
    print(HELP, flush=True)
    text = ""
    for line in lines(first):
        if line == ":quit":
            return
        if line.startswith(":") and not (line == ":more" and text):
            print(f"{line}: unknown, or there is no text yet\n{HELP}", file=sys.stderr)
        elif line:
            text = text if line == ":more" else line.replace("\\n", "\n")
            text = continued(model, tokenizer, text, sampling, most)
            sampling = dataclasses.replace(sampling, seed=sampling.seed + 1)
        if not sys.stdin.isatty():
            print(flush=True)


def continued(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, sampling: Sampling, most: int
) -> str:
    """Prints the continuation of `text` as it is generated, until Ctrl-C. Returns the whole text.

    most: number of tokens that leave room for the continuation. If the text is longer, only its end is used.
    """
    ids_BT = encode_prompt(tokenizer, text)[:, -most:]
    try:
        return generate_text(model, tokenizer, ids_BT, sampling, TextStreamer(tokenizer, skip_special_tokens=True))
    except KeyboardInterrupt:
        print()
        return text


def lines(first: str | None) -> Iterator[str]:
    """Yields `first`, then lines from standard input. In a terminal, line editing and history are available."""
    if first is not None:
        yield first
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
