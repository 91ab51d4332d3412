"""Windows of a split that are read alike every time: spread evenly, as rows of token ids."""

import numpy as np

from pretrain.config import WindowSpec
from pretrain.data.shards import ShardReader


def windows_of(reader: ShardReader, window: WindowSpec, sequences: int) -> np.ndarray:
    """First tokens of at most `sequences` windows, spread evenly over the split."""
    windows = window.count_in(reader.tokens)
    count = min(sequences, windows)
    return np.arange(count) * windows // count * window.sequence_length


def read_windows(reader: ShardReader, starts: np.ndarray, window: WindowSpec, rows: int) -> np.ndarray:
    """Token ids (rows, sequence_length + 1) of the windows; where there are fewer than rows, the split's first window.

    Not zeros: 0 may be the end of a document, and a window of nothing else is compiled anew.
    """
    ids = np.empty((rows, window.sequence_length + 1), dtype=np.int64)
    for row in range(rows):
        reader.read(int(starts[row]) if row < len(starts) else 0, ids[row])
    return ids
