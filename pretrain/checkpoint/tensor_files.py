"""Reads and writes named tensors in safetensors files, in parallel across ranks.

HostMemory stages tensors in CPU memory, so that a thread can write them while training continues.
"""

import itertools
import json
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pretrain.files import Beat, seal
from pretrain.model.published_names import PublishedNames, TensorsOnDisk, shapes_in_files
from pretrain.parallel.tensor_group import Shape, TensorGroup

MAX_FILE_BYTES = 4 * 1024**3
ALIGNMENT = 64
"""Alignment of tensors in HostMemory, in bytes."""


class SavedTensors(TensorsOnDisk):
    """Mapping from names to tensors in a folder's `<prefix>*.safetensors` files. Tensors are loaded on access.

    beat: called for every tensor, so that a slow disk isn't reported as a hang.
    """

    def __init__(self, folder: Path, prefix: str, beat: Beat = lambda: None):
        self._beat = beat
        self.places: dict[str, Path] = {}
        for path in sorted(folder.glob(f"{prefix}*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self.places |= dict.fromkeys(file.keys(), path)

    def __getitem__(self, name: str) -> torch.Tensor:
        self._beat()
        with safe_open(self.places[name], framework="pt") as file:
            return file.get_tensor(name)

    def shapes(self) -> dict[str, Shape]:
        """Returns {name: shape} without reading the tensors."""
        return shapes_in_files(self.places.values())


def plan_files(group: TensorGroup, prefix: str) -> dict[str, list[str]]:
    """Assigns tensors to files with HF-style names. Returns {file name: tensor names}."""
    sizes = {name: tensor_bytes(shape, group.dtypes[name]) for name, shape in group.shapes.items()}
    pattern = f"{prefix}{{suffix}}.safetensors"
    plan = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern=pattern, max_shard_size=MAX_FILE_BYTES
    )
    return plan.filename_to_tensors


def tensor_index(
    group: TensorGroup,
    prefix: str,
    dtypes: Mapping[str, torch.dtype] | None = None,
    published: PublishedNames | None = None,
) -> dict[str, dict]:
    """Returns {file name: contents} of HF's index file, or {} if there is only one safetensors file."""
    files = plan_files(group, prefix)
    if len(files) <= 1:
        return {}
    pieces = published.pieces if published else {}
    weight_map = {piece: file for file, names in files.items() for name in names for piece in pieces.get(name, [name])}
    index = {"metadata": {"total_size": bytes_of(group, dtypes)}, "weight_map": weight_map}
    return {f"{prefix}.safetensors.index.json": index}


def shares(
    prefix: str,
    group: TensorGroup,
    rank: int,
    ranks: int,
    beat: Beat,
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yields (file, name, tensor) for each tensor that this rank writes.

    The tensors are on the device and may share memory with parameters.

    A collective call, because gathering a tensor may need all ranks. Files are assigned to ranks round-robin, starting
    at different ranks for the model and the optimizer.

    beat: called for every tensor.
    """
    first = {"model": 0, "optimizer": ranks - 1}.get(prefix, (ranks - 1) // 2)
    for number, (file, names) in enumerate(plan_files(group, prefix).items()):
        mine = (first + number) % ranks == rank
        for name in names:
            beat()
            if (tensor := group.whole(name, mine)) is not None:
                yield file, name, tensor


def write_group(
    folder: Path,
    prefix: str,
    group: TensorGroup,
    rank: int,
    ranks: int,
    dtypes: Mapping[str, torch.dtype] | None = None,
    beat: Beat = lambda: None,
    published: PublishedNames | None = None,
) -> dict[str, dict]:
    """Writes this rank's files and returns {file: {bytes, sha256}} for them. A collective call.

    If a file can't be written, raises its error after the last tensor, because the other ranks gather until then.

    Args:
        dtypes: {name: dtype to convert to}. Other tensors aren't converted.
        beat: called for every tensor, so that a slow disk isn't reported as a hang.
        published: splits tensors and renames them for the export.
    """
    written = {}
    problem = None
    for file, entries in itertools.groupby(shares(prefix, group, rank, ranks, beat), key=lambda entry: entry[0]):
        tensors = {}
        for _, name, tensor in entries:
            tensor = tensor.to("cpu").to((dtypes or {}).get(name, tensor.dtype)).contiguous()
            tensors |= published.split(name, tensor) if published else {name: tensor}
        try:
            save_file(tensors, folder / file, metadata={"format": "pt"})
            written[file] = seal(folder / file)
        except (OSError, SafetensorError) as error:
            problem = problem or error
    if problem is not None:
        raise problem
    if rank == 0:
        for file, index in tensor_index(group, prefix, dtypes, published).items():
            (folder / file).write_text(json.dumps(index, indent=1))
    return written


def tensor_bytes(shape: Shape, dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def bytes_of(group: TensorGroup, dtypes: Mapping[str, torch.dtype] | None = None) -> int:
    """Returns the size of a group's tensors on disk, in bytes."""
    dtypes = {**group.dtypes, **(dtypes or {})}
    return sum(tensor_bytes(shape, dtypes[name]) for name, shape in group.shapes.items())


class HostMemory:
    """Contiguous CPU memory for named tensors. It is page-locked when the first GPU tensor is copied to it.

    Copies from a GPU to page-locked memory are several times faster. We don't use pin_memory(), because it rounds
    sizes up to a power of two: a 155 MB tensor would need 268 MB.
    """

    def __init__(self, layout: dict[str, tuple[Shape, torch.dtype]]):
        self.layout = layout
        """{name: (shape, dtype)}."""
        spans = {}
        end = 0
        for name, (shape, dtype) in layout.items():
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + tensor_bytes(shape, dtype)
            spans[name] = slice(start, end)
        self._bytes = torch.empty(end, dtype=torch.uint8)
        self._tensors = {
            name: self._bytes[spans[name]].view(dtype).view(shape) for name, (shape, dtype) in layout.items()
        }
        self._tried_to_lock = False

    def hold(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a tensor to this memory and returns the copy. For a GPU tensor, synchronize before reading it."""
        if tensor.is_cuda and not self._tried_to_lock:
            self._tried_to_lock = True
            if lock(self._bytes, tensor.device):
                weakref.finalize(self, unlock, self._bytes.data_ptr()).atexit = False
        return self._tensors[name].copy_(tensor, non_blocking=True)


def lock(memory: torch.Tensor, device: torch.device) -> bool:
    """Page-locks CPU memory. Returns False if the system doesn't allow that much locked memory."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    with suppress(RuntimeError):  # clears the error, which CUDA would otherwise report in a training step
        torch.ones(1, device=device)
    return False


def unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
