"""Generates text with a loaded model, or with the model being trained, under any strategy."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from pretrain import config
from pretrain.errors import InputError
from pretrain.model.build import build_meta_model
from pretrain.parallel.strategy import Strategy


@dataclass(frozen=True)
class Sampling:
    """Sampling settings for text generation."""

    max_new_tokens: int
    temperature: float = 0.0
    """0 for greedy decoding."""
    top_k: int | None = None
    """Sample from this many of the most likely tokens; None for all."""
    seed: int = 0
    top_p: float | None = None
    """Nucleus sampling (Holtzman et al., arXiv 1904.09751): sample from the top tokens with this total probability."""


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> torch.Tensor:
    """Tokenizes a prompt to (1, T), like `pipeline("text-generation")`. An empty prompt starts a new document."""
    ids = tokenizer(prompt)["input_ids"]
    if not ids:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise InputError(
                "--prompt '': this tokenizer has no token to start a document with; pass a non-empty prompt"
            )
        ids = [start]
    return torch.tensor([ids])


@torch.no_grad()
def generate_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids_BT: torch.Tensor,
    sampling: Sampling,
    streamer: TextStreamer | None = None,
) -> str:
    """Returns the prompt and continuation as text. The same seed gives the same text on the same device.

    streamer: prints the text as it is generated.
    """
    ids_BT = ids_BT.to(model.device)
    devices = [model.device] if model.device.type == "cuda" else []
    # These override the model's generation config, except its special token IDs.
    choice = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if sampling.temperature:
        limits = {"top_p": sampling.top_p or 1.0, "top_k": sampling.top_k or 0}
        choice = {"do_sample": True, "temperature": sampling.temperature, **limits}
    eos = model.generation_config.eos_token_id
    pad = model.generation_config.pad_token_id
    if pad is None:
        pad = eos[0] if isinstance(eos, list) else eos
    with torch.random.fork_rng(devices):
        torch.manual_seed(sampling.seed)
        output_BT = model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            max_new_tokens=sampling.max_new_tokens,
            pad_token_id=pad,
            streamer=streamer,
            **choice,
        )
    return tokenizer.decode(output_BT[0], skip_special_tokens=True)


def sample_texts(
    strategy: Strategy,
    model_config: PreTrainedConfig,
    tokenizer_folder: Path,
    settings: config.Samples,
    *,
    seed: int,
    beat: Callable[[], None],
) -> list[tuple[str, str]]:
    """Returns (prompt, prompt with continuation) for each of the recipe's prompts on the main rank, [] on other ranks.

    The main rank gathers the weights tensor by tensor and generates alone: on the device if it already holds the whole
    model, otherwise on the CPU. Texts end at the model's last position. A collective call.
    """
    group = strategy.model_tensors()
    tensors = {name: group.fetch(name, strategy.ranks.is_main) for name in group.shapes}
    # On GPUs, torch has no deterministic kernel for top_p's cumulative sum.
    is_here = strategy.holds_whole_model and not (settings.top_p and torch.are_deterministic_algorithms_enabled())
    device = strategy.device if is_here else torch.device("cpu")

    def continue_prompts() -> list[tuple[str, str]]:
        from pretrain.model.pretrained import TensorsInMemory

        model = build_meta_model(model_config)
        TensorsInMemory(tensors).fill(model, "")
        model.tie_weights()  # `fill` skips tied parameters
        model.eval().to(device)
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        texts = []
        longest = getattr(model_config, "max_position_embeddings", None) or math.inf
        for prompt in settings.prompts:
            ids_BT = encode_prompt(tokenizer, prompt)
            # A learned position embedding has no further rows, and a GPU would report only a device-side assert.
            new_tokens = min(settings.max_new_tokens, longest - ids_BT.shape[1])
            if new_tokens < 1:
                texts.append((prompt, f"{prompt} [too long for the model's {longest:,} positions]"))
                continue
            sampling = Sampling(new_tokens, settings.temperature, settings.top_k, seed, settings.top_p)
            texts.append((prompt, generate_text(model, tokenizer, ids_BT, sampling)))
        return texts

    return strategy.ranks.by_main(continue_prompts, beat) or []
