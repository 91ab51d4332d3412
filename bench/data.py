"""Measures speed and memory of data preparation and data loading, compared with other libraries.

    python bench/data.py                              # on the Python standard library's source code
    python bench/data.py --input prose.jsonl.zst --tokenizer gpt2 [--copies 8] [--repeat 3] [--long_line]

For each file, and for a Parquet copy of each JSON Lines file, this measures prepare_data.py (with startup), the same
command with the tokenizers library, datatrove's DocumentTokenizer if it is installed (with startup), gigatoken alone
(without startup), and the peak memory of all processes together. The programs alternate, and every number is the best
of --repeat rounds, because other load only adds time.

Preparing 100 MB takes a second, half of which is Python's startup. prepare_data.py and gigatoken therefore also read
--copies copies of each file, and the requirements for memory and gigatoken apply to these measurements. The slower
libraries only read one file.

The --clean filters are measured in one process on --filters documents, and datatrove's filters on 5% of them.

Near-duplicate removal is measured with prepare_data.py, with and without --near_duplicates 0.8, and with datatrove's
four MinHash stages and tokenizer. The input is the first file's documents, 5% of them twice with 2% of the words
changed, in one Parquet file per core.

The module cleaning_rate measures full cleaning of --megabytes of text. If you run only this, with --rows cleaning and
--work, you can continue it after an interruption.

Exits with status 1 if a requirement is missed:
- 10 times the speed of tokenizers and datatrove, 60% of gigatoken's speed, and at most 2 GB of memory
- with near-duplicate removal: 60 MB of text per second, and at most twice the time without it
- with --clean and --decontaminate: 25 MB of text per CPU second
"""

import argparse
import itertools
import json
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.cleaning_rate import bench_cleaning  # noqa: E402
from bench.preparing import (  # noqa: E402
    LARGEST_MEMORY,
    SLOWEST_NEAR_DUPLICATES_MB_PER_S,
    TIMES_A_PREPARATION,
    TIMES_AS_FAST_AS_DATATROVE,
    Measured,
    has_datatrove,
    prepare,
    rounds,
    run_measured,
)

ROWS = ("files", "near_duplicates", "loader", "filters", "cleaning")
LONG_LINE_BYTES = 200_000_000
ROWS_PER_ROW_GROUP = 1000
TIMES_AS_FAST_AS_TOKENIZERS = 10
SHARE_OF_GIGATOKEN = 0.6
FILTERS_SHARE_OF_DATATROVE = 20
"""Ratio of our documents to datatrove's when measuring filters, because datatrove is at least this much slower."""
NEAR_COPIES = 0.05
CHANGED_WORDS = 0.02

GIGATOKEN = """
import sys, time, awkward, gigatoken
tokenizer = gigatoken.Tokenizer(sys.argv[1])
kind = gigatoken.ParquetFileSource if sys.argv[2].endswith("parquet") else gigatoken.JsonlFileSource
began = time.perf_counter()
rows = tokenizer.encode_files(kind(sys.argv[2:]))
seconds = time.perf_counter() - began
print("tokens", awkward.num(rows).to_numpy().sum(), "seconds", seconds)
"""
# Batches have 1,000 documents, because the default of 10,000 needs more than 10 GB for novels. Documents aren't
# shuffled, because prepare_data.py doesn't shuffle them either.
DATATROVE = """
import sys
from pathlib import Path
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader, ParquetReader
from datatrove.pipeline.tokens import DocumentTokenizer
file, output = Path(sys.argv[2]).resolve(), sys.argv[3]
reader = ParquetReader if file.suffix == ".parquet" else JsonlReader
tokenizer = DocumentTokenizer(
    output, sys.argv[1], eos_token="<|endoftext|>", batch_size=1000, shuffle_documents=False
)
steps = [reader(str(file.parent), glob_pattern=file.name), tokenizer]
print("tokens", LocalPipelineExecutor(steps, logging_dir=output + "/logs").run().stats[-1].stats["tokens"].total)
"""

# datatrove's defaults (word 5-grams, 14 bands of 8), except for the hash function, because the default fails with
# xxhash versions that reject str.
DATATROVE_MINHASH = """
import os, sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.utils.hashing import HashConfig
tokenizer, input, output = sys.argv[1:]
hashing, cores = HashConfig(hash_fc="sha1", precision=64), os.cpu_count()
config = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8, hash_config=hashing)
reader = ParquetReader(input)
signatures, buckets, removed = (output + "/" + name for name in ("signatures", "buckets", "removed"))
tokens = DocumentTokenizer(
    output + "/tokens", tokenizer, eos_token="<|endoftext|>", batch_size=1000, shuffle_documents=False
)
for number, (tasks, steps) in enumerate([
    (cores, [reader, MinhashDedupSignature(signatures, config=config)]),
    (14, [MinhashDedupBuckets(signatures, buckets, config=config)]),
    (1, [MinhashDedupCluster(buckets, removed, config=config)]),
    (cores, [reader, MinhashDedupFilter(removed), tokens]),
]):
    executor = LocalPipelineExecutor(steps, tasks=tasks, workers=cores, logging_dir=f"{output}/logs{number}")
    statistics = executor.run()
print("tokens", statistics.stats[-1].stats["tokens"].total)
"""


def gigatoken(files: list[str], tokenizer: str) -> Measured:
    """Measures gigatoken alone on the files, excluding the time to start Python and load the tokenizer."""
    _, peak, told = run_measured([sys.executable, "-c", GIGATOKEN, f"{tokenizer}/tokenizer.json", *files])
    tokens, seconds = re.search(r"tokens (\d+) seconds ([\d.e-]+)", told).groups()
    return Measured(int(tokens), float(seconds), peak)


def datatrove(file: str, tokenizer: str) -> Measured:
    """Measures datatrove's DocumentTokenizer, including startup, writing to a folder as prepare_data.py does."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", DATATROVE, f"{tokenizer}/tokenizer.json", file, folder]
        seconds, peak, told = run_measured(command)
    return Measured(int(re.search(r"tokens (\d+)", told)[1]), seconds, peak)


def copies_of(file: str, copies: int, folder: str) -> list[str]:
    """Creates `copies` links to a file and returns their paths."""
    links = [Path(folder, f"{number:03d}-{Path(file).name}") for number in range(copies)]
    for link in links:
        link.symlink_to(Path(file).resolve())
    return [str(link) for link in links]


def bench_file(file: str, tokenizer: str, copies: int, repeat: int) -> list[str]:
    """Prints the rows for a file. Returns the missed requirements."""
    with tempfile.TemporaryDirectory() as folder:
        many = copies_of(file, copies, folder)
        contestants = {
            "ours": lambda: prepare(many, tokenizer),
            "gigatoken": lambda: gigatoken(many, tokenizer),
            "ours, one": lambda: prepare([file], tokenizer),
            "gigatoken, one": lambda: gigatoken([file], tokenizer),
            "tokenizers": lambda: prepare([file], tokenizer, "--engine", "reference"),
            "datatrove": lambda: datatrove(file, tokenizer),
        }
        if not has_datatrove():
            del contestants["datatrove"]
        measured = rounds(contestants, repeat)
    best = {name: min(runs, key=lambda run: run.seconds) for name, runs in measured.items()}
    ours = best["ours"]
    peak = max(run.peak for run in measured["ours"])
    share = ours.rate / best["gigatoken"].rate
    print(f"{file}, {copies} copies: {ours.tokens:,} tokens")
    print(f"  prepare_data, whole command     {ours.rate:8.2f} Mtok/s   {ours.seconds:.2f} s")
    print(f"    peak memory                   {peak / 1e6:,.0f} MB")
    print(f"  gigatoken alone, no startup     {best['gigatoken'].rate:8.2f} Mtok/s   we reach {share:.0%} of it")
    missed = [f"{file}: {peak / 1e6:,.0f} MB of memory"] if peak > LARGEST_MEMORY else []
    missed += [f"{file}: {share:.0%} of gigatoken"] if share < SHARE_OF_GIGATOKEN else []
    one = best["ours, one"]
    share = one.rate / best["gigatoken, one"].rate
    print(f"one copy: {one.tokens:,} tokens")
    print(f"  prepare_data, whole command     {one.rate:8.2f} Mtok/s   {one.seconds:.2f} s")
    print(f"  gigatoken alone, no startup     {best['gigatoken, one'].rate:8.2f} Mtok/s   we reach {share:.0%} of it")
    for name, label in {
        "tokenizers": "the same with tokenizers",
        "datatrove": "datatrove's DocumentTokenizer",
    }.items():
        if name not in best:
            print(f"  {label:<31} not installed: pip install datatrove orjson")
            continue
        times = one.rate / best[name].rate
        print(f"  {label:<31} {best[name].rate:8.2f} Mtok/s   we are {times:.1f} times as fast")
        missed += [f"{file}: {times:.1f} times {name}"] if times < TIMES_AS_FAST_AS_TOKENIZERS else []
    return missed


def datatrove_minhash(folder: str, tokenizer: str) -> Measured:
    """Measures datatrove with near-duplicate removal on all cores, including startup."""
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, "-c", DATATROVE_MINHASH, f"{tokenizer}/tokenizer.json", folder, output]
        seconds, peak, told = run_measured(command)
    return Measured(int(re.search(r"tokens (\d+)", told)[1]), seconds, peak)


def write_with_near_copies(file: str, folder: Path) -> int:
    """Writes a file's documents and some near copies, shuffled, to one Parquet file per core. Returns the bytes."""
    import pyarrow as pa
    from pyarrow import parquet

    from pretrain_tools.preparation.documents.records import Reading
    from pretrain_tools.preparation.documents.sources import find_sources, records_of

    rng = random.Random(0)
    texts = [record.text.decode() for record in records_of(*find_sources([file]), Reading()) if record.text]
    for text in rng.sample(texts, int(NEAR_COPIES * len(texts))):
        words = text.split(" ")
        texts.append(" ".join(rng.choice(words) if rng.random() < CHANGED_WORDS else word for word in words))
    rng.shuffle(texts)
    folder.mkdir()
    for core in range(psutil.cpu_count()):
        table = pa.table({"text": texts[core :: psutil.cpu_count()]})
        parquet.write_table(table, folder / f"{core}.parquet", row_group_size=ROWS_PER_ROW_GROUP, compression="zstd")
    return sum(len(text.encode()) for text in texts)


def bench_near_duplicates(file: str, tokenizer: str, repeat: int) -> list[str]:
    """Prints the cost of removing near duplicates. Returns the missed requirements."""
    with tempfile.TemporaryDirectory() as folder:
        documents = Path(folder, "documents")
        size = write_with_near_copies(file, documents)
        files = sorted(map(str, documents.iterdir()))
        contestants = {
            "all": lambda: prepare(files, tokenizer),
            "ours": lambda: prepare(files, tokenizer, "--near_duplicates", "0.8"),
            "datatrove": lambda: datatrove_minhash(str(documents), tokenizer),
        }
        if not has_datatrove():
            del contestants["datatrove"]
        measured = rounds(contestants, repeat)
    best = {name: min(runs, key=lambda run: run.seconds) for name, runs in measured.items()}
    everything = best["all"]
    ours = best["ours"]
    cost = ours.seconds / everything.seconds
    rate = size / ours.seconds / 1e6
    removed = 1 - ours.tokens / everything.tokens
    print(f"{size / 1e6:,.0f} MB of text with near duplicates, {everything.tokens:,} tokens")
    print(f"  prepare_data, all documents     {everything.seconds:8.2f} s")
    print(
        f"  --near_duplicates 0.8           {ours.seconds:8.2f} s, {cost:.2f} times as long; "
        f"{removed:.1%} fewer tokens"
    )
    print(f"    text                          {rate:8.0f} MB/s")
    missed = [f"near duplicates: takes {cost:.2f} times as long"] if cost > TIMES_A_PREPARATION else []
    missed += [f"near duplicates: {rate:.0f} MB/s"] if rate < SLOWEST_NEAR_DUPLICATES_MB_PER_S else []
    if "datatrove" in best:
        theirs = best["datatrove"]
        times = theirs.seconds / ours.seconds
        removed = 1 - theirs.tokens / everything.tokens
        print(f"  datatrove's MinHash             {theirs.seconds:8.2f} s; {removed:.1%} of the tokens removed")
        print(f"    we are                        {times:8.1f} times as fast")
        missed += [f"near duplicates: {times:.1f} times datatrove"] if times < TIMES_AS_FAST_AS_DATATROVE else []
    return missed


def with_parquet(files: list[str], folder: str) -> Iterator[str]:
    """Yields the files, and after each JSON Lines file a Parquet copy of it."""
    import pyarrow as pa
    from pyarrow import parquet

    from pretrain_tools.preparation.documents.records import Reading
    from pretrain_tools.preparation.documents.sources import find_sources, records_of

    for file in files:
        yield file
        (source,) = find_sources([file])
        if source.format == "jsonl":
            texts = [record.text for record in records_of(source, Reading())]
            path = f"{folder}/{Path(file).name.partition('.')[0]}.parquet"
            table = pa.table({"text": pa.array(texts, pa.binary()).cast(pa.string())})
            parquet.write_table(table, path, row_group_size=ROWS_PER_ROW_GROUP, compression="zstd")
            # Free the memory for the measured programs.
            del texts, table
            yield path


def bench_long_line(tokenizer: str) -> list[str]:
    """Prints time and memory for one 200 MB document. Returns the requirement if it is missed."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["the", "loss", "falls", "while", "the", "model", "learns", "to", "read.", "And", "it", "waits", "\\n"]
        drawn = np.random.default_rng(0).choice(words, LONG_LINE_BYTES // 6)
        path = Path(folder, "long.jsonl")
        path.write_text('{"text": "' + " ".join(drawn)[:LONG_LINE_BYTES].rstrip("\\") + '"}\n')
        run = prepare([str(path)], tokenizer, "--validation_fraction", "0")
        print(f"one line of {path.stat().st_size / 1e6:.0f} MB: {run.seconds:.1f} s, {run.peak / 1e6:,.0f} MB")
    return [f"one long line: {run.peak / 1e6:,.0f} MB of memory"] if run.peak > LARGEST_MEMORY else []


def bench_loader(file: str, tokenizer: str) -> None:
    """Prints the data loader's speed in one process from cached shards, and the time to seek to a step."""
    from pretrain.config import Data
    from pretrain.data.batches import Batches
    from pretrain.optim.batch_ramp import BatchRamp

    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/out"
        subprocess.run(
            [sys.executable, "prepare_data.py", "--input", file, "--tokenizer", tokenizer, "--output", output],
            cwd=ROOT, check=True, capture_output=True,
        )  # fmt: skip
        data = Data.model_validate({"train": [{"shards": output}], "sequence_length": 2048})
        batches = Batches(data, seed=1, ramp=BatchRamp((8,), (0,), 100_000))
        rates = []
        resumes = []
        for _ in range(10):
            began = time.perf_counter()
            tokens = sum(batches.read(step, 0, 0, ranks=1, sequences=8).size for step in range(400))
            rates.append(tokens / (time.perf_counter() - began) / 1e6)
        for step in np.random.default_rng(0).integers(0, 90_000, 20).tolist():
            began = time.perf_counter()
            batches.locate(step * 8, 8)
            resumes.append(time.perf_counter() - began)
    print(f"loader, 8 x 2,048, cached: {max(rates):,.0f} Mtok/s; seeking to a step takes {min(resumes) * 1e3:.3f} ms")


def bench_filters(file: str, documents: int) -> list[str]:
    """Prints the speed of --clean's filters and of datatrove's in one process. Returns the missed requirements."""
    from pretrain_tools.preparation.cleaning.filters import sensible_set
    from pretrain_tools.preparation.cleaning.stages import Cleaning
    from pretrain_tools.preparation.documents.records import Reading
    from pretrain_tools.preparation.documents.sources import find_sources, records_of

    (source,) = find_sources([file])
    records = [r for r in itertools.islice(records_of(source, Reading()), documents) if r.text]
    texts = [record.text for record in records]
    cleaning = Cleaning(tuple(sensible_set(is_english=True)))
    # Compile the filters before timing them.
    for stage in cleaning.stages:
        stage.compile()
    # Use CPU time, because other load hardly affects it.
    began = time.process_time()
    cleaning.clean(records)
    ours = sum(map(len, texts)) / (time.process_time() - began) / 1e6
    print(f"--clean filters, {len(texts):,} documents: {ours:.1f} MB/s on one core")
    if not has_datatrove():
        print("  datatrove's filters             not installed: pip install datatrove spacy")
        return []
    from datatrove.data import Document
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )

    filters = [GopherRepetitionFilter(), GopherQualityFilter(), C4QualityFilter(filter_no_terminal_punct=False)]
    filters.append(FineWebQualityFilter())
    some = texts[: max(1, len(texts) // FILTERS_SHARE_OF_DATATROVE)]
    # The first call loads models, so it isn't timed.
    for stage in filters:
        stage.filter(Document(text="Loaded before it counts. " * 60, id="0"))
    began = time.process_time()
    for text in some:
        document = Document(text=text.decode(), id="0")
        all(stage.filter(document) is True for stage in filters)
    theirs = sum(map(len, some)) / (time.process_time() - began) / 1e6
    print(f"  datatrove's filters             {theirs:.2f} MB/s; we are {ours / theirs:.0f} times as fast")
    return [f"filters: {ours / theirs:.1f} times datatrove"] if ours < TIMES_AS_FAST_AS_DATATROVE * theirs else []


def source_of_python(path: Path) -> str:
    """Writes the Python standard library's source code, including tests, as JSON Lines. Returns the path."""
    with path.open("w", encoding="utf-8") as file:
        for source in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
            if "site-packages" not in source.parts:
                file.write(json.dumps({"text": source.read_bytes().decode("utf-8", "ignore")}) + "\n")
    return str(path)


def trained_tokenizer(file: str, folder: str) -> str:
    """Trains a 32,000-token tokenizer on the first megabytes of a file and returns its folder."""
    output = f"{folder}/trained"
    run_measured(
        [sys.executable, "prepare_data.py", "--input", file, "--train_tokenizer", "32000", "--output", output]
    )
    return output


def tokenizer_folder(given: str, folder: str) -> str:
    """Saves a tokenizer in a folder, so that all programs read the same tokenizer.json. Returns the folder."""
    from pretrain.data.tokenizer import load_tokenizer

    load_tokenizer(given).save(Path(folder, "tokenizer"))
    return str(Path(folder, "tokenizer"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input", nargs="+", metavar="FILE", help="jsonl(.zst) or Parquet (default: Python's source code)"
    )
    parser.add_argument("--tokenizer", help="folder or Hub ID (default: trained on the input)")
    parser.add_argument("--copies", type=int, default=8, help="number of copies of each file (default: 8)")
    parser.add_argument("--repeat", type=int, default=3, help="number of rounds (default: 3)")
    parser.add_argument(
        "--filters", type=int, default=2000, metavar="N", help="number of documents to filter (default: 2000)"
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="measurements to run (default: all)")
    parser.add_argument(
        "--megabytes", type=float, default=900, help="size in MB of the text for the cleaning row (default: 900)"
    )
    parser.add_argument("--work", type=Path, help="folder for this row's documents and results (default: temporary)")
    parser.add_argument("--long_line", action="store_true", help="also prepare one document of 200 MB")
    arguments = parser.parse_args()
    cores = psutil.cpu_count()
    load = psutil.getloadavg()[0]
    print(f"{cores} cores, load {load:.1f}" + (", busy; wait for an idle machine" if load > 0.5 else ""))
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        inputs = arguments.input or [source_of_python(Path(folder, "python.jsonl"))]
        tokenizer = tokenizer_folder(arguments.tokenizer or trained_tokenizer(inputs[0], folder), folder)
        first = str(Path(inputs[0]).resolve())
        rows = arguments.rows
        for file in with_parquet(inputs, folder) if "files" in rows else ():
            missed += bench_file(str(Path(file).resolve()), tokenizer, arguments.copies, arguments.repeat)
        if "near_duplicates" in rows:
            missed += bench_near_duplicates(first, tokenizer, arguments.repeat)
        if "loader" in rows:
            bench_loader(first, tokenizer)
        if "filters" in rows:
            missed += bench_filters(first, arguments.filters)
        if "cleaning" in rows:
            work = arguments.work or Path(folder, "cleaning")
            missed += bench_cleaning(first, tokenizer, arguments.megabytes, arguments.repeat, work.resolve())
        if arguments.long_line:
            missed += bench_long_line(tokenizer)
    if missed:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
