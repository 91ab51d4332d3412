"""Text that the model in training continues, under every strategy."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedConfig

from pretrain import config
from pretrain.model.build import build_model, library_attention
from pretrain.parallel.strategy import Strategy
from pretrain.training.generation import Sampling, encode_prompt, generate_text


def sample_texts(
    strategy: Strategy,
    model_config: PreTrainedConfig,
    tokenizer_folder: Path,
    settings: config.Samples,
    seed: int,
    beat: Callable[[], None],
) -> list[tuple[str, str]]:
    """(prompt, prompt and continuation) of every prompt of the recipe, on the main rank; [] on the others.

    All ranks call together. The main rank gathers a copy of the weights, tensor by tensor, in its host's memory, since
    under most strategies no process could continue a text alone; it generates on the device where that holds the whole
    model anyway.
    """
    group = strategy.model_tensors()
    tensors = {name: group.fetch(name, strategy.is_main) for name in group.shapes}
    device = strategy.device if strategy.name in ("single", "ddp") else torch.device("cpu")

    def continue_prompts() -> list[tuple[str, str]]:
        return _continue_prompts(model_config, tensors, tokenizer_folder, settings, seed, device)

    return strategy.by_main(continue_prompts, beat) or []


def _continue_prompts(
    model_config: PreTrainedConfig,
    tensors: dict[str, torch.Tensor],
    tokenizer_folder: Path,
    settings: config.Samples,
    seed: int,
    device: torch.device,
) -> list[tuple[str, str]]:
    model = build_model(copy.deepcopy(model_config), seed=0, attention=library_attention(model_config))
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    model.eval().to(device)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    sampling = Sampling(settings.max_new_tokens, settings.temperature, settings.top_k, seed)
    texts = []
    for prompt in settings.prompts:
        ids_BT = encode_prompt(tokenizer, prompt, max_new_tokens=settings.max_new_tokens, max_positions=None)
        texts.append((prompt, generate_text(model, tokenizer, ids_BT, sampling)))
    return texts
