"""Llama that reads a tensor's value in every forward pass, like a leftover debugging check."""

import warnings

from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel


class ReadingLlamaConfig(LlamaConfig):
    model_type = "reading_llama"


class ReadingLlamaModel(LlamaModel):
    config_class = ReadingLlamaConfig

    def forward(self, *arguments, **named):
        outputs = super().forward(*arguments, **named)
        largest = outputs.last_hidden_state.detach().abs().max()
        if largest.device.type != "meta" and largest.item() > 1e6:
            raise ValueError("hidden states explode")
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)  # reads the value: torch warns on a GPU
        return outputs


class ReadingLlamaForCausalLM(LlamaForCausalLM):
    config_class = ReadingLlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = ReadingLlamaModel(config)
        self.post_init()
