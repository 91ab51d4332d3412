"""Configurations for all causal language models in transformers, and how each model trains.

`PYTHONPATH=. python tests/support/causal_models.py` writes the table in docs/architectures.md.
"""

import re
from pathlib import Path

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from pretrain.model.own_code import register_all

register_all()

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
BEGIN, END = "<!-- table of architectures: begin -->", "<!-- table of architectures: end -->"
NAMES = {"groundwork_sdpa": "sdpa", "groundwork_eager": "eager"}
COMPLETED = {
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "full_attention"]},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "xlstm": {"hidden_size": 64, "num_heads": 4, "num_hidden_layers": 2},
}
"""Settings for models whose default configuration is incomplete or doesn't work."""


def causal_models() -> list[str]:
    """Returns the model_type of every model that AutoModelForCausalLM can build."""
    return sorted({config_class.model_type for config_class in MODEL_FOR_CAUSAL_LM_MAPPING})


def config_of(model_type: str) -> PreTrainedConfig:
    """Returns the model's default configuration, updated with COMPLETED."""
    return CONFIG_MAPPING[model_type](**COMPLETED.get(model_type, {}))


def outcome(model_type: str, document_mask: bool) -> str:
    """Returns the attention and loss that the model trains with, or 'refused: ' and the reason."""
    from pretrain.config import WindowSpec
    from pretrain.errors import InputError
    from pretrain.model.attention import classes_in_rows, without_rows
    from pretrain.model.model_config import refuse_composites
    from pretrain.training.probe import probe

    try:
        config = config_of(model_type)
    except Exception as error:  # can be any type of error
        return f"refused: no default configuration ({type(error).__name__})"
    try:
        refuse_composites(model_type, config)
        found = probe(config, attention="auto", window=WindowSpec(64, document_mask))
    except InputError as error:
        return "refused: " + "; ".join(error.problems)
    logits = "" if found.from_hidden_states else ", whole logits"
    rows = " and rows" if classes_in_rows(found.attention) else ""
    attention = without_rows(found.attention)
    return NAMES.get(attention, f"the library's {without_windows(attention)}") + rows + logits


def table() -> str:
    """Returns a Markdown table of the architectures, grouped by outcome."""
    works: dict[tuple[str, str], list[str]] = {}
    refused: dict[str, list[str]] = {}
    for model_type in causal_models():
        on, off = outcome(model_type, True), outcome(model_type, False)
        if off.startswith("refused"):
            refused.setdefault(reason_of(off), []).append(model_type)
        else:
            works.setdefault(("rejected" if on.startswith("refused") else on, off), []).append(model_type)
    rows = ["| with document_mask | without | architectures |", "|---|---|---|"]
    for (on, off), names in sorted(works.items(), key=lambda item: -len(item[1])):
        rows.append(f"| {on} | {off} | {' '.join(names)} |")
    rows += ["", "| reason for rejection | architectures |", "|---|---|"]
    for reason, names in sorted(refused.items(), key=lambda item: -len(item[1])):
        rows.append(f"| {reason} | {' '.join(names)} |")
    return "\n".join(rows)


def without_windows(attention: str) -> str:
    return re.sub(r"\+masks\(.*\)", "+masks", attention)


def reason_of(refusal: str) -> str:
    """Shortens a message for the table."""
    for pattern, words in {
        "is not causal": "it sees later tokens",
        "get no gradient": "some parameters get no gradient (cross-attention, or parts trained separately)",
        "does not initialize": "some parameters get no initial values",
        "is multimodal": "it's multimodal",
        "no default configuration": "it has no working default configuration",
        "does not run with only token IDs as input": "its default configuration needs more inputs than token IDs",
    }.items():
        if pattern in refusal:
            return words
    return refusal


def table_on_page() -> dict[str, tuple[str, ...]]:
    """Returns {model_type: the other cells in its row} from docs/architectures.md."""
    lines = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")]
    return {name: tuple(row[:-1]) for row in cells for name in row[-1].split()}


if __name__ == "__main__":
    text = PAGE.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")
