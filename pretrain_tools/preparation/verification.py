"""Verifies the hashes of a prepared folder, local or at a URL."""

import errno
import hashlib
from pathlib import Path

from pretrain.data.shards import read_manifest
from pretrain.errors import InputError
from pretrain.files import shown
from pretrain.urls import open_file


def verify_shards(folder: str | Path) -> list[str]:
    """Lists all missing and changed files of a prepared folder, local or at a URL. Hashes every file."""
    try:
        manifest = read_manifest(folder)
    except InputError as error:
        return error.problems
    place = manifest.url or manifest.folder
    problems = _hash_problems(f"{manifest.tokenizer_folder}/tokenizer.json", manifest.tokenizer_sha256)
    for shard in manifest.shards:
        for name, sha256 in {shard.file: shard.sha256, **shard.beside}.items():
            problems += _hash_problems(f"{place}/{name}", sha256)
    return problems


def _hash_problems(path: str, sha256: str) -> list[str]:
    """Returns [problem] if a file is missing or its hash differs, otherwise []."""
    try:
        with open_file(path) as file:
            now = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        return [f"{shown(path)}: is missing; restore it, or remove the folder and prepare it again"]
    if now == sha256:
        return []
    return [f"{shown(path)}: its content has changed (sha256 differs from the manifest's); restore it"]
