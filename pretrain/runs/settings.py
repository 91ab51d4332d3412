"""What a run was told, as its folder records it."""

from pathlib import Path
from typing import Any

import yaml

from pretrain.recipe import Loader


def read_config(run: Path) -> dict[str, Any]:
    """config.yaml as plain values: also that of a run which another version of the schema wrote; {} if unreadable."""
    try:
        values = yaml.load((run / "config.yaml").read_text(encoding="utf-8"), Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}
