"""Maps old setting names to new ones, for old recipes, command lines and checkpoints."""

from collections.abc import Mapping
from typing import Any

RENAMED = {
    "batch.reduce_once": "batch.no_sync",
    "cadence": "interval_scale",
    "checkpoint.at_end": "checkpoint.save_final",
    "checkpoint.in_background": "checkpoint.async_save",
    "checkpoint.milestones_every": "checkpoint.keep_every",
    "checkpoint.pause_at": "checkpoint.stop_at_step",
    "energy.grid_grams_per_kwh": "energy.carbon_grams_per_kwh",
    "evaluation": "benchmarks",
    "guard.alert_above": "guard.spike_warn_factor",
    "guard.compare_copies_every_steps": "guard.replica_check_every_steps",
    "guard.distance": "guard.rollback_steps",
    "guard.divergence": "guard.divergence_threshold",
    "guard.roll_back": "guard.on_spike",
    "guard.roll_back_above": "guard.spike_factor",
    "guard.roll_back_sigmas": "guard.spike_sigma",
    "guard.speed_drop": "guard.throughput_drop",
    "guard.window": "guard.loss_window",
    "optim.base_learning_rate": "optim.learning_rate_per_sequence",
    "optim.base_width": "optim.mup_base_width",
    "optim.decay_shape": "optim.decay_type",
    "optim.final_ratio": "optim.min_lr_ratio",
    "optim.muon.blocks": "optim.muon.split_matrices",
    "optim.muon.coefficients": "optim.muon.ns_coefficients",
    "optim.muon.iterations": "optim.muon.ns_steps",
    "optim.width_transfer": "optim.parametrization",
    "pipeline.microbatch_scale": "pipeline.microbatches_per_stage",
}
"""{old path of a setting or section: new path}. Both paths are in the same section."""
RENAMED_VALUES = {
    "benchmarks.where": {"same": "blocking"},
    "optim.parametrization": {"none": "standard"},
    "samples.temperature": {None: 0},
}
"""{new path of a setting: {old value: new value}}"""


def current_path(path: str) -> str:
    """Returns the new path of a setting or section."""
    for old, new in RENAMED.items():
        if path == old or path.startswith(f"{old}."):
            return new + path.removeprefix(old)
    return path


def current_value(path: str, value: Any) -> Any:
    """Returns the new value of a setting. path: its new path."""
    return RENAMED_VALUES.get(path, {}).get(value, value) if isinstance(value, str | None) else value


def with_current_names(values: Mapping[str, Any], section: str = "") -> tuple[dict[str, Any], list[str]]:
    """Returns a recipe's values with new setting names, and a notice for each renamed setting.

    If a recipe contains both the old and the new name, keeps both, so that validation rejects it.
    """
    found: dict[str, Any] = {}
    notices: list[str] = []
    for key, value in values.items():
        now = RENAMED.get(f"{section}{key}", "").rpartition(".")[2]
        if now and now not in values:
            notices.append(f"{section}{key} is now {section}{now}")
            key = now
        path = f"{section}{key}"
        if isinstance(value, dict):
            value, inside = with_current_names(value, f"{path}.")
            notices += inside
        else:
            value = current_value(path, value)
        found[key] = value
    # The only setting that moved to another section.
    tracking = found.get("tracking") or {}
    if not section and "group" in found and isinstance(tracking, dict) and "group" not in tracking:
        found["tracking"] = {**tracking, "group": found.pop("group")}
        notices.append("group is now tracking.group")
    return found, notices
