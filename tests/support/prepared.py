"""Documents in several file formats, and helpers for tests of prepare_data.py."""

import csv
import io
import json
import os
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import zstandard

from pretrain.data.shards import open_shards
from support.project import ROOT

END = "<|endoftext|>"
PROSE = (
    "The old mill by the river was built in the last century and it has been closed for many years. People of the "
    "village say that the miller left one winter night with all of his flour. Nobody knows where he went, but they "
    "have many stories to tell. Children play near the wheel in summer. In autumn the leaves cover everything that "
    "is left of the garden, and the owls come back to the roof."
)
"""Text that passes every filter."""


def texts(count=400):
    rng = np.random.default_rng(1)
    words = ["loss", "falls", "the", "model", "learns", "naïve", "漢字", "123", END, "\0", "don't", "\n"]
    return [f"{n} " + " ".join(rng.choice(words, int(rng.integers(1, 60)))) for n in range(count)]


def write_jsonl(path, documents, extra=()):
    lines = [json.dumps({"text": text}).encode() for text in documents] + list(extra)
    path.write_bytes(b"\n".join(lines) + b"\n")


def make_parts_small(monkeypatch, size):
    """Makes prepare_data.py split input every `size` bytes and slices every `size` tokens."""
    for name in ("documents.formats.PART_BYTES", "documents.sources.PART_BYTES", "slices.TOKENS_PER_PART"):
        monkeypatch.setattr(f"pretrain_tools.preparation.{name}", size)
    monkeypatch.setattr("pretrain_tools.preparation.documents.byte_stream.READ_BYTES", size)


def content_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def stream_of(folder, split):
    reader = open_shards(folder, split)
    ids = np.zeros(reader.tokens, dtype=np.int64)
    reader.read(0, ids)
    return ids


def as_jsonl_zst(documents):
    # One frame per line, because a single small frame would be decompressed in one piece.
    return b"".join(zstandard.compress(json.dumps({"text": text}).encode() + b"\n") for text in documents)


def as_parquet(documents):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), file, row_group_size=7)
    return file.getvalue()


def as_csv(documents):
    file = io.StringIO()
    csv.writer(file).writerows([["text"], *([text.replace("\0", "")] for text in documents)])
    return file.getvalue().encode()


WRITERS = {"jsonl.zst": as_jsonl_zst, "parquet": as_parquet, "csv": as_csv}


# Runs prepare_data.py with tiny parts and a commit after each, and kills it with SIGKILL at the n-th fsync or at the
# first fsync of a file whose path contains the given string.
KILLED = """
import os, signal, sys
from pretrain_tools.preparation.documents import byte_stream
from pretrain_tools.preparation.documents import formats
from pretrain_tools.preparation import prepare as preparation
from pretrain_tools.preparation.documents import sources
byte_stream.READ_BYTES, formats.PART_BYTES, sources.PART_BYTES, preparation.COMMIT_SECONDS = 500, 1000, 1000, 0.0
at, sync = sys.argv.pop(1), os.fsync
remaining = int(at) if at.isdigit() else 0
def fsync(descriptor):
    global remaining
    sync(descriptor)
    remaining -= 1
    if remaining == 0 or not at.isdigit() and at in os.readlink(f"/proc/self/fd/{descriptor}"):
        import psutil
        print(*[child.pid for child in psutil.Process().children()], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = fsync
import prepare_data
from pretrain.errors import run_script
run_script(prepare_data.main)
"""


def run_killed(at, *arguments, **environment):
    command = [sys.executable, "-c", KILLED, str(at), *map(str, arguments)]
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
