"""Approximate formula for activation memory, used instead of traces, which take seconds each."""

from pretrain_tools.planning import memory
from pretrain_tools.planning.activations import Activations, Line


def use_quick_traces(monkeypatch) -> None:
    def trace(model_config, call):
        per_sequence = call.window.sequence_length * model_config.hidden_size * 2.0
        budget = getattr(call.activation_checkpointing, "memory_budget", 1.0)
        kept = 2.0 if call.activation_checkpointing == "full" else 34.0 * budget
        lines = (Line([0.0, factor * per_sequence]) for factor in (2.0, 2.0, kept, 0.0, 60.0, 60.0, kept + 60.0, 2.0))
        return Activations(*lines, recomputed=(1.0 - budget) / 2)

    monkeypatch.setattr(memory, "trace_activations", trace)
