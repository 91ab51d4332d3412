"""Compares the full cleaning pipeline with preparation without cleaning, for bench/data.py.

Cleaning here means filters, near-duplicate removal and decontamination. The input repeats one file's documents until
it reaches `megabytes`. From the second pass on, a quarter of each document's words are replaced with other words from
the document, so that it counts as a new one. In each pass, 5% of the documents occur twice, the second time with 2% of
the words replaced. 200 documents that pass the filters each get one of 10,000 made-up benchmark items.

The input and the measurements stay in `folder`, so that you can continue an interrupted benchmark.
"""

import hashlib
import json
import random
import shutil
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from bench.preparing import (
    LARGEST_MEMORY,
    SLOWEST_CLEANING_MB_PER_CORE_SECOND,
    TIMES_AS_FAST_AS_DATATROVE,
    Measured,
    cpu_seconds_of_children,
    has_datatrove,
    prepare,
    run_measured,
)

NEAR_COPIES = 0.05
CHANGED_WORDS = 0.02
CHANGED_OF_ANOTHER_TIME = 0.25
ITEMS = 10_000
PLANTED = 200
ITEM_WORDS = (15, 60)
ROWS_PER_ROW_GROUP = 1000
DATATROVE_MEGABYTES = 20
"""Megabytes of text for datatrove, which is about a hundred times slower and would need hours for the full input."""

# Uses datatrove's default parameters, except for the hash function, because the default fails with xxhash versions
# that reject str. The language filter is left out, because it downloads a model. Indexing the items isn't timed.
DATATROVE_CLEANING = """
import json, os, sys, time
import numpy as np
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.decont import NGramsDecontConfig, NGramsDecontFilter
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.filters import (
    C4QualityFilter, FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter
)
from datatrove.pipeline.formatters import PIIFormatter
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.pipeline.writers import ParquetWriter
from datatrove.utils.hashing import HashConfig
from datatrove.utils.text import ngrams, simplify_text
tokenizer, input, items, output = sys.argv[1:]
hashing, cores = HashConfig(hash_fc="sha1", precision=64), os.cpu_count()
decontamination = NGramsDecontConfig(n_grams=13, hash_config=hashing)
config = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8, hash_config=hashing)
index, filtered, signatures, buckets, removed = (
    f"{output}/{name}" for name in ("index", "filtered", "signatures", "buckets", "removed")
)
os.makedirs(index)
contamination = NGramsDecontFilter(index, decontamination)
hashes = set()
for line in open(items):
    words = contamination.tokenizer.word_tokenize(simplify_text(json.loads(line), decontamination.norm_config))
    hashes |= {contamination.hash_func(" ".join(run)) for run in ngrams(words, 13)}
np.array(sorted(hashes), hashing.np_descr).tofile(index + "/items.index.hashes")
began = time.perf_counter()
filters = [
    GopherRepetitionFilter(), GopherQualityFilter(), C4QualityFilter(filter_no_terminal_punct=False),
    FineWebQualityFilter(), PIIFormatter(), contamination,
]
tokens = DocumentTokenizer(
    output + "/tokens", tokenizer, eos_token="<|endoftext|>", batch_size=1000, shuffle_documents=False
)
for number, (tasks, steps) in enumerate([
    (cores, [ParquetReader(input), *filters, ParquetWriter(filtered)]),
    (cores, [ParquetReader(filtered), MinhashDedupSignature(signatures, config=config)]),
    (14, [MinhashDedupBuckets(signatures, buckets, config=config)]),
    (1, [MinhashDedupCluster(buckets, removed, config=config)]),
    (cores, [ParquetReader(filtered), MinhashDedupFilter(removed), tokens]),
]):
    executor = LocalPipelineExecutor(steps, tasks=tasks, workers=cores, logging_dir=f"{output}/logs{number}")
    statistics = executor.run()
print("tokens", statistics.stats[-1].stats["tokens"].total, "seconds", time.perf_counter() - began)
"""


def with_changed_words(text: str, share: float, rng: random.Random) -> str:
    """Returns the text with a fraction of its words replaced with other words from it."""
    words = text.split(" ")
    for place in rng.sample(range(len(words)), round(share * len(words))):
        words[place] = words[rng.randrange(len(words))]
    return " ".join(words)


def write_documents(file: str, megabytes: float, folder: Path) -> dict[str, Any]:
    """Writes the documents, a subset of them for datatrove, and the items. Returns the amounts written."""
    import pyarrow as pa
    from pyarrow import parquet

    from pretrain_tools.preparation.cleaning.filters import read_cleaning
    from pretrain_tools.preparation.documents.records import Reading, Record
    from pretrain_tools.preparation.documents.sources import find_sources, records_of

    rng = random.Random(0)
    cleaning = read_cleaning([], clean=True)
    originals = [record.text.decode() for record in records_of(*find_sources([file]), Reading()) if record.text]
    times = max(1, round(megabytes * 1e6 / sum(len(text.encode()) for text in originals)))
    vocabulary = sorted({word for text in originals[:200] for word in text.split() if word.isalpha()})
    items = [" ".join(rng.choices(vocabulary, k=rng.randint(*ITEM_WORDS))) for _ in range(ITEMS)]
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    cores = psutil.cpu_count()
    written = {"bytes": 0, "part_bytes": 0, "documents": 0, "copies": 0}
    schema = pa.schema({"text": pa.string()})
    for name in ("all", "part"):
        (folder / name).mkdir()
    writers = [
        parquet.ParquetWriter(folder / f"all/{core}.parquet", schema, compression="zstd") for core in range(cores)
    ]
    parts = [
        parquet.ParquetWriter(folder / f"part/{core}.parquet", schema, compression="zstd") for core in range(cores)
    ]
    for time in range(times):
        texts = (
            [with_changed_words(text, CHANGED_OF_ANOTHER_TIME, rng) for text in originals] if time else originals[:]
        )
        records = [Record(number, text.encode()) for number, text in enumerate(texts)]
        # Only plant items in documents that pass the filters, because the others never reach decontamination.
        stay = [record.place for record in cleaning.clean(records)[0]]
        places = iter(rng.sample(stay, len(stay)))
        for number in range(time, PLANTED, times):
            for place in places:
                head, _, tail = texts[place].partition(" ")
                planted = f"{head} {items[number]} {tail}"
                # The document must still pass the filters with the item.
                if cleaning.clean([Record(0, planted.encode())])[0]:
                    texts[place] = planted
                    break
        copied = rng.sample(texts, int(NEAR_COPIES * len(texts)))
        texts += [with_changed_words(text, CHANGED_WORDS, rng) for text in copied]
        rng.shuffle(texts)
        for core, writer in enumerate(writers):
            writer.write_table(pa.table({"text": texts[core::cores]}, schema), row_group_size=ROWS_PER_ROW_GROUP)
        written["bytes"] += sum(len(text.encode()) for text in texts)
        written["documents"] += len(texts)
        written["copies"] += len(copied)
        for number, text in enumerate(texts if time == 0 else ()):
            if written["part_bytes"] < DATATROVE_MEGABYTES * 1e6:
                parts[number % cores].write_table(pa.table({"text": [text]}, schema))
                written["part_bytes"] += len(text.encode())
    for writer in (*writers, *parts):
        writer.close()
    return written


def prepared(files: list[str], tokenizer: str, *options: str, folder: Path) -> tuple[Measured, dict[str, Any]]:
    """Runs prepare_data.py once. Returns the measurements and what was removed according to the manifest."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    measured = prepare(files, tokenizer, *options, folder=str(folder))
    manifest = json.loads((folder / "out/manifest.json").read_text())
    shutil.rmtree(folder)
    cleaning = manifest.get("cleaning", {})
    removed = {rule: amounts["documents"] for rule, amounts in cleaning.get("removed", {}).items()}
    copies = manifest["skipped"].get("near_duplicate_documents", 0)
    return measured, {"removed": removed, "near_copies": copies, "found": cleaning.get("found", {})}


def datatrove_cleaning(documents: Path, tokenizer: str, items: Path, folder: Path) -> Measured:
    """Measures datatrove's filters, decontamination, MinHash and tokenizer on all cores."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    before = cpu_seconds_of_children()
    command = [sys.executable, "-c", DATATROVE_CLEANING, f"{tokenizer}/tokenizer.json"]
    _, peak, told = run_measured([*command, str(documents), str(items), str(folder)])
    shutil.rmtree(folder)
    tokens, seconds = told.rpartition("tokens ")[2].split(" seconds ")
    return Measured(int(tokens), float(seconds), peak, cpu_seconds=cpu_seconds_of_children() - before)


def times_alone(rounds: dict[str, Any], repeat: int) -> float:
    """Returns how many times longer preparation takes with cleaning, as the median over rounds."""
    seconds = {name: measured["seconds"] for name, (measured, _) in rounds.items()}
    return statistics.median(
        seconds[f"with the cleaning, {number}"] / seconds[f"preparation alone, {number}"] for number in range(repeat)
    )


def bench_cleaning(file: str, tokenizer: str, megabytes: float, repeat: int, folder: Path) -> list[str]:
    """Measures and prints the cost of full cleaning. Returns the missed requirements."""
    from pretrain.data.data_record import numbers_in

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "measured.json"
    tokenizer_hash = hashlib.sha256(Path(tokenizer, "tokenizer.json").read_bytes()).hexdigest()
    what = {"file": file, "megabytes": megabytes, "tokenizer": tokenizer_hash}
    known = json.loads(path.read_text()) if path.is_file() else {}
    if known.get("what") != what:
        for name in ("all", "part"):
            shutil.rmtree(folder / name, ignore_errors=True)
        print(f"writing {megabytes:,.0f} MB of documents", flush=True)
        known = {"what": what, "written": write_documents(file, megabytes, folder), "rounds": {}}
        path.write_text(json.dumps(known))
    written = known["written"]
    items = folder / "items.jsonl"
    files = sorted(map(str, (folder / "all").iterdir()))
    passing = folder / "passing"
    cleaning = ("--clean", "--decontaminate", str(items))

    def in_rounds(name: str, contestant: Any) -> None:
        """Measures a program unless its result already exists."""
        if name not in known["rounds"]:
            measured, removed = contestant()
            known["rounds"][name] = [asdict(measured), removed]
            # Save after each measurement, so that an interrupted benchmark can continue.
            path.write_text(json.dumps(known))
            told = f"{measured.seconds:.2f} s, {measured.cpu_seconds:.2f} s of CPU time, {measured.peak / 1e6:,.0f} MB"
            print(f"  {name:<30} {told}", flush=True)

    print(f"{written['bytes'] / 1e6:,.0f} MB, {written['documents']:,} documents, {written['copies']:,} near copies")
    for number in range(repeat):
        in_rounds(f"preparation alone, {number}", lambda: prepared(files, tokenizer, folder=passing))
        in_rounds(f"with the cleaning, {number}", lambda: prepared(files, tokenizer, *cleaning, folder=passing))
    if has_datatrove():
        in_rounds("datatrove", lambda: (datatrove_cleaning(folder / "part", tokenizer, items, passing), {}))
    best = {}
    for name, (measured, removed) in known["rounds"].items():
        contestant = name.partition(",")[0]
        if contestant not in best or measured["seconds"] < best[contestant][0].seconds:
            best[contestant] = Measured(**measured), removed
    alone = best["preparation alone"][0]
    ours, removed = best["with the cleaning"]
    rate = written["bytes"] / ours.seconds / 1e6
    times = times_alone(known["rounds"], repeat)
    found = sum(len(numbers_in(of_list["entries"])) for of_list in removed["found"].values())
    print(f"preparation alone, {alone.tokens:,} tokens    {alone.seconds:8.2f} s")
    print(
        f"  --clean --decontaminate       {ours.seconds:8.2f} s, {rate:.1f} MB/s; {times:.2f} times as long (median)"
    )
    per_core = written["bytes"] / ours.cpu_seconds / 1e6
    print(f"    CPU time                    {ours.cpu_seconds:8.2f} s, {per_core:.1f} MB per CPU second")
    print(f"    near copies removed         {removed['near_copies']:8,} documents")
    print(f"    items found                 {found:8,} of {PLANTED} planted")
    print(f"    removed by rule             {removed['removed']}")
    is_slow = per_core < SLOWEST_CLEANING_MB_PER_CORE_SECOND
    missed = [f"cleaning: {per_core:.1f} MB per CPU second"] if is_slow else []
    missed += [f"cleaning: {found} of {PLANTED} planted items found"] if found != PLANTED else []
    missed += [f"cleaning: {ours.peak / 1e6:,.0f} MB of memory"] if ours.peak > LARGEST_MEMORY else []
    if "datatrove" not in best:
        print("  datatrove                     not installed: pip install datatrove orjson spacy")
        return missed
    theirs = written["part_bytes"] / best["datatrove"][0].seconds / 1e6
    part = f"datatrove, {written['part_bytes'] / 1e6:,.0f} MB"
    print(f"  {part:<29} {theirs:8.2f} MB/s; we are {rate / theirs:.0f} times as fast")
    missed += [f"cleaning: {rate / theirs:.1f} times datatrove"] if rate < TIMES_AS_FAST_AS_DATATROVE * theirs else []
    return missed
