"""Flat token ids in HDF5, as pipelines for the Pile write them: one row of integers, in a dataset that can grow.

Known writers call the dataset `tokens` and store int32 (FareedKhan-dev/train-llm-from-scratch,
scripts/prepare_pretrain_data.py); any name is read if the file holds no other dataset.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pretrain.data.manifest import id_dtype
from pretrain.errors import InputError

if TYPE_CHECKING:
    import h5py

HDF5_SUFFIXES = (".h5", ".hdf5")
USUAL_NAME = "tokens"


def open_ids(path: Path, dtype: str) -> "np.ndarray | h5py.Dataset":
    """The ids of a file as a 1-d array that is read when sliced. dtype: of a raw file; HDF5 has its own."""
    if path.suffix in HDF5_SUFFIXES:
        return hdf5_ids(path)
    # A view as a plain array: np.memmap's own slicing costs several times more per read.
    return np.memmap(path, id_dtype(dtype), mode="r").view(np.ndarray)


def ids_bytes(path: Path, dtype: str) -> int:
    """Bytes of the ids in a file when stored raw in `dtype`; of a raw file, its size."""
    return len(hdf5_ids(path)) * id_dtype(dtype).itemsize if path.suffix in HDF5_SUFFIXES else path.stat().st_size


def hdf5_ids(path: Path) -> "h5py.Dataset":
    """The dataset of ids in an HDF5 file. Raises InputError where there is none, or more than one without a name."""
    import h5py

    try:
        # Without HDF5's lock, which many network file systems refuse.
        file = h5py.File(path, "r", locking=False)
    except OSError as error:
        raise InputError(f"{path}: not readable as HDF5 ({error}); restore the file") from None
    found: dict[str, h5py.Dataset] = {}
    file.visititems(lambda name, item: found.update({name: item}) if isinstance(item, h5py.Dataset) else None)
    ids = found.get(USUAL_NAME) if len(found) != 1 else next(iter(found.values()))
    if ids is None:
        raise InputError(
            f"{path}: holds {', '.join(sorted(found)[:8]) or 'no datasets'}; token ids must be its only dataset, or "
            f"the one called {USUAL_NAME}"
        )
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(
            f"{path}: dataset {ids.name!r} holds {ids.dtype} of shape {ids.shape}, must be a row of integers; text "
            "is turned into shards by prepare_data.py"
        )
    return ids
