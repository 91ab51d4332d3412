"""Tests that prepare_data.py with all cleaning steps writes the same bytes after being killed at random moments."""

import os
import random
import signal
import time

import psutil
import pytest

from support.faults import EVERYTHING, tell
from support.prepared import PROSE, content_of, write_jsonl
from support.project import start_script

KILLS = 20
# prepare_data.py with small partitions and a commit every 20 ms, so that the work is divided as for large inputs.
IN_SMALL_PARTS = """
from pretrain_tools.preparation import near_duplicate_search
from pretrain_tools.preparation.documents import byte_stream, formats, sources
from pretrain_tools.preparation import prepare, slices
byte_stream.READ_BYTES = formats.PART_BYTES = sources.PART_BYTES = 30_000
prepare.COMMIT_SECONDS, slices.TOKENS_PER_PART = 0.02, 20_000
near_duplicate_search.RUN_DOCUMENTS, near_duplicate_search.KEYS_AT_ONCE = 256, 128
import prepare_data
from pretrain.errors import run_script
run_script(prepare_data.main)
"""


def documents(rng, count):
    """Returns documents with boilerplate, near duplicates, benchmark items, addresses, and text that the filters
    remove."""
    words = PROSE.replace(".", "").split()
    made = []
    for number in range(count):
        own = [" ".join(rng.choices(words, k=14)).capitalize() + "." for _ in range(rng.randint(8, 40))]
        text = "\n".join([*own, "Home | About | Contact"] if number % 3 else own)
        if number % 7 == 0 and made:
            text = rng.choice(made).replace("village", "town")
        if number % 11 == 0:
            text += (
                f" Which of the millers had number {number % 5} of the seven mills by the river in his last century?"
            )
        if number % 13 == 0:
            text += f" Write to miller{number}@example.com now."
        made.append(f"buy {number} now " * 60 if number % 17 == 0 else text)
    return made


@pytest.mark.skipif(not EVERYTHING, reason="two minutes: FAULTS=all; kills at chosen moments are in tests/preparation")
@pytest.mark.parametrize("workers", [1, 2])
def test_kills_at_random_moments_of_a_cleaning_change_no_byte(tmp_path, tokenizer, workers):
    """Killing the process group, the main process or a worker twenty times at random doesn't change the output."""
    seed = int(os.environ.get("KILL_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"KILL_SEED={seed}")
    rng = random.Random(seed)
    for number in range(4):
        write_jsonl(tmp_path / f"{number}.jsonl", documents(random.Random(number), 500))
    items = [
        f"Which of the millers had number {n} of the seven mills by the river in his last century?" for n in "013"
    ]
    (tmp_path / "items.txt").write_text("\n".join(items))
    command = [
        "-c", IN_SMALL_PARTS, "--input", tmp_path / "*.jsonl", "--tokenizer", tokenizer, "--workers", workers,
        "--clean", "--decontaminate", tmp_path / "items.txt", "--validation_fraction", 0.1,
    ]  # fmt: skip

    def started(name):
        """Starts a run and returns (process, time when it began working), so that it isn't killed during imports."""
        process = start_script(*command, "--output", tmp_path / name, fresh=True, start_new_session=True)
        lock = tmp_path / name / ".unfinished/lock"
        while process.poll() is None and not (lock.exists() and f'"pid": {process.pid},' in lock.read_text()):
            time.sleep(0.002)
        return process, time.monotonic()

    process, began = started("whole")
    assert process.wait(300) == 0
    whole = time.monotonic() - began
    expected = content_of(tmp_path / "whole")
    finished = 0
    hit = []
    while len(hit) < KILLS:
        name = f"broken-{finished}"
        process, began = started(name)
        delay = rng.uniform(0, whole)
        kind = rng.choice(["all", "main", "worker"] if workers > 1 else ["all", "main"])
        time.sleep(delay)
        children = [] if process.poll() is not None else psutil.Process(process.pid).children()
        if process.poll() is None and (children or kind != "worker"):
            if kind == "all":
                os.killpg(process.pid, signal.SIGKILL)
            else:
                os.kill(rng.choice(children).pid if kind == "worker" else process.pid, signal.SIGKILL)
            code = process.wait(60)
            # The run may have just finished. A run whose worker dies exits with an error.
            assert code in (-signal.SIGKILL, 0, *([2] if kind == "worker" else []))
            stages = sorted(path.name for path in (tmp_path / name).glob(".unfinished/*"))
            if code:
                hit.append(kind)
                print(f"{kind} after {delay:.2f} of {whole:.2f} s, with {' '.join(stages)}")
        process.wait(300)
        if (tmp_path / name / "manifest.json").exists() and not (tmp_path / name / ".unfinished").exists():
            assert content_of(tmp_path / name) == expected, f"KILL_SEED={seed}"
            finished += 1
    process, _ = started(f"broken-{finished}")
    assert process.wait(300) == 0
    assert content_of(tmp_path / f"broken-{finished}") == expected, f"KILL_SEED={seed}"
    manifest = expected["manifest.json"]
    for said in (b"near_duplicate_documents", b"items.txt", b"gopher_repetition"):
        assert said in manifest
    tell("29", f"{KILLS} kills at random moments of a whole cleaning, {workers} workers", "the same bytes each time")
