"""Makes a checkpoint's averaged weights loadable with from_pretrained."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pretrain.errors import InputError
from pretrain.files import SEAL_FILE


def require_average(name: str, checkpoint: Path) -> None:
    """Raises InputError if a checkpoint has no averaged weights. name: checkpoint name for the error message."""
    if not any(checkpoint.glob("average*.safetensors")):
        raise InputError(
            f"{name}: no averaged weights in {checkpoint}; runs with averaging.kind: ema or tail save them once "
            "averaging has started. Use a later step (RUN@STEP) or --weights raw"
        )


@contextmanager
def average_folder(checkpoint: Path) -> Iterator[Path]:
    """Creates a temporary folder of links to a checkpoint's files, with the averaged weights as model weights."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / f"{checkpoint.name}-average"
        folder.mkdir()
        for path in checkpoint.iterdir():
            is_tensors = ".safetensors" in path.suffixes
            if path.name == SEAL_FILE or (is_tensors and not path.name.startswith("average")):
                continue
            # The index refers to shards by name, so shards aren't renamed.
            whole = path.name in ("average.safetensors", "average.safetensors.index.json")
            name = path.name.replace("average", "model", 1) if whole else path.name
            (folder / name).symlink_to(path.resolve())
        yield folder
