"""Runs `accelerate config` with scripted answers to its questions."""

import builtins
import re
from pathlib import Path

from accelerate.commands.config.config import get_user_input
from accelerate.commands.menu import BulletMenu

TWO_GPUS = {"type of machine": "multi-GPU", "How many GPU": "2"}
FSDP2 = {"FullyShardedDataParallel": "yes", "FSDP version": "2", "_no_split_modules": "yes"}
DEEPSPEED = {"use DeepSpeed": "yes"}


def accelerate_config(path: Path, answers: dict[str, str], monkeypatch) -> Path:
    """Writes the config file to `path`. Questions that match no pattern in `answers` get the default answer."""

    def answer(question: str) -> str | None:
        return next((given for pattern, given in answers.items() if re.search(pattern, question)), None)

    def choose(menu: BulletMenu, default_choice: int = 0) -> int:
        chosen = answer(menu.prompt)
        return default_choice if chosen is None else [str(choice) for choice in menu.choices].index(chosen)

    monkeypatch.setattr(builtins, "input", lambda question="": answer(question) or "")
    monkeypatch.setattr(BulletMenu, "run", choose)
    get_user_input().to_yaml_file(path)
    return path
