"""Presents the average in a checkpoint as a model folder that from_pretrained loads."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pretrain.errors import InputError
from pretrain.files import SEAL_FILE


def require_average(name: str, checkpoint: Path) -> None:
    """Raises InputError for a checkpoint without an average. name: the user's name for the checkpoint."""
    if not any(checkpoint.glob("average*.safetensors")):
        raise InputError(
            f"{name}: there is no average in {checkpoint}; checkpoints of runs with averaging.kind: ema or tail have "
            "one from the first steps that are averaged on: give RUN@STEP, or --weights raw"
        )


@contextmanager
def average_folder(checkpoint: Path) -> Iterator[Path]:
    """Creates a temporary folder of links to the checkpoint's files, with the average as the model."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / f"{checkpoint.name}-average"
        folder.mkdir()
        for path in checkpoint.iterdir():
            is_tensors = ".safetensors" in path.suffixes
            if path.name == SEAL_FILE or (is_tensors and not path.name.startswith("average")):
                continue
            # An index refers to its files by their existing names, so only the index or a single file is renamed.
            whole = path.name in ("average.safetensors", "average.safetensors.index.json")
            name = path.name.replace("average", "model", 1) if whole else path.name
            (folder / name).symlink_to(path.resolve())
        yield folder
