"""Writes and checks provenance.json: the SHA-256 of every file in a published folder, and the model's origin.

provenance.json also contains its own hash (`seal`), computed with 64 zeros in place of the hash. This detects
accidental changes, but not tampering: anyone with write access can write a new provenance.json.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from pretrain.files import PROVENANCE_FILE, SIGNATURE_FILE, damage_of_file, files_of, seal
from pretrain_tools.publishing.card import CARD_MEASURES, statements, without_folders
from pretrain_tools.publishing.facts import Facts

PROVENANCE_FORMAT = {"format": "groundwork-provenance", "version": 1}
UNSEALED = "0" * 64


def write_provenance(facts: Facts, folder: Path, *, signed: bool = False) -> None:
    """Writes a reproducible provenance.json to a folder that is otherwise complete.

    signed: True if the folder will be signed afterwards.
    """
    files = {name: seal(path) for name, path in sorted(files_of(folder).items())}
    contents = {"seal": UNSEALED, **PROVENANCE_FORMAT, "signed": signed, **provenance_of(facts), "files": files}
    # Hash the text with zeros as a placeholder for the hash, then replace the first occurrence.
    text = json.dumps(contents, indent=1, ensure_ascii=False, default=str) + "\n"
    (folder / PROVENANCE_FILE).write_text(text.replace(UNSEALED, digest_of(text.encode()), 1), encoding="utf-8")


def provenance_of(facts: Facts) -> dict[str, Any]:
    """Collects a model's origin from the run's files. Missing values are None."""
    return {
        "model": {
            "run": facts.run_name,
            "repository": facts.offer.repository,
            "revision": facts.offer.revision,
            "step": facts.step,
            "tokens": facts.tokens,
            "parameters": facts.parameters,
        },
        "code_commit": facts.environment.get("commit"),
        "packages": facts.environment.get("packages"),
        "data": [
            {**dataclasses.asdict(source), "contamination": len(source.contamination)} for source in facts.sources
        ],
        "lineage": statements("lineage", facts),
        "validation": [
            {"source": source, "step": event["step"], **{name: event.get(name) for name in CARD_MEASURES}}
            for source, event in facts.validation.items()
        ],
        "evaluations": [dataclasses.asdict(score) for score in facts.scores],
        "recipe": without_folders(facts.config),
    }


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def provenance_problems(folder: Path) -> list[str]:
    """Lists all files in a published folder that were changed, added or removed."""
    try:
        content = (folder / PROVENANCE_FILE).read_bytes()
        contents = json.loads(content)
        recorded = {
            name: {key: entry[key] for key in ("bytes", "sha256")} for name, entry in contents["files"].items()
        }
        origin_text(contents)  # raises an error if a value has the wrong type
        is_whole = digest_of(content.replace(contents["seal"].encode(), UNSEALED.encode(), 1)) == contents["seal"]
    except FileNotFoundError:
        return [f"{PROVENANCE_FILE} is missing; without it, no other file can be checked"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"can't be read ({type(error).__name__}: {error})"
        return [f"{PROVENANCE_FILE} was changed: it {why}; without it, no other file can be checked"]
    problems = []
    if not is_whole:
        problems.append(f"{PROVENANCE_FILE} was changed: it doesn't match its own SHA-256 hash (seal)")
    elif {key: contents.get(key) for key in PROVENANCE_FORMAT} != PROVENANCE_FORMAT:
        return [
            f"{PROVENANCE_FILE} isn't in format {PROVENANCE_FORMAT['format']} version {PROVENANCE_FORMAT['version']}"
        ]
    # files_of ignores links to folders.
    links = [path for path in folder.rglob("*") if path.is_symlink() and not path.is_file()]
    present = files_of(folder) | {path.relative_to(folder).as_posix(): path for path in links}
    # `is not`, because only True and False are valid.
    if contents.get("signed") is not (folder / SIGNATURE_FILE).exists():
        problems.append(f"{SIGNATURE_FILE} {'is missing' if contents.get('signed') else 'was added'}")
    problems += [f"{name} was added" for name in sorted(present.keys() - recorded)]
    problems += [f"{name} is missing" for name in sorted(recorded.keys() - present)]
    for name in sorted(recorded.keys() & present):
        found = damage_of_file(present[name], name, recorded[name])
        problems += [f"{name} was changed: it {problem.removeprefix(name + ' ')}" for problem in found]
    return problems


def provenance_text(folder: Path) -> str:
    """Summarizes a published folder's provenance in one line."""
    content = (folder / PROVENANCE_FILE).read_bytes()
    contents = json.loads(content)
    made = origin_text(contents)
    return f"{len(contents['files'])} files and {PROVENANCE_FILE} are unchanged: {made}; sha256 {digest_of(content)}"


def origin_text(contents: dict[str, Any]) -> str:
    model = contents["model"]
    return f"step {model['step']:,} of {model['run']}, code {contents['code_commit'] or 'not recorded'}"


def printable(text: str) -> str:
    """Escapes control characters, with which a published folder could forge the output."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
