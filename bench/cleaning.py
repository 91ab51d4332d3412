"""Validates data cleaning on real text against datatrove, exact similarities and planted benchmark items.

    python bench/cleaning.py --input 'english/*.jsonl.zst' web.parquet --items hellaswag.jsonl --tokenizer gpt2

- Verdicts: compares each document's verdict and text with datatrove's, for every published filter and for the removal
  of personal data. Every document is treated as a web page, and datatrove is patched to split words at spaces. Prints
  the differences and, if docs/text_forms.md lists it, the reason. A filter fails if more than two documents in 1,000
  differ without a known reason.
- Near duplicates: copies --documents documents and replaces some of their words. Some copies are also rotated,
  truncated, uppercased or reformatted. prepare_data.py --near_duplicates 0.8 must remove 95% of the copies whose exact
  Jaccard similarity is at least 0.8, and at most 2% of those below 0.5.
- Decontamination: plants 200 benchmark items in documents, either verbatim or with different case, punctuation or
  spaces. All of these documents must be removed, and the manifest must list exactly the planted items and those that
  the documents already contained.

Exits with status 1 if any of these fails. Takes a minute per 15 MB, most of it in datatrove.
"""

import argparse
import json
import multiprocessing
import random
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pretrain_tools.preparation.cleaning.published import (  # noqa: E402
    C4Quality,
    FineWebQuality,
    GopherQuality,
    GopherRepetition,
)
from pretrain_tools.preparation.cleaning.stages import TextBatch  # noqa: E402

THRESHOLD = 0.8
LEAST_RECALL = 0.95
FAR = 0.5
MOST_FAR = 0.02
MOST_DIFFERENT = 2e-3
"""Maximum fraction of a filter's verdicts that may differ without a known reason."""
PLANTED = 200
SHARES = (0.0, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3)
DOCUMENT_CHARACTERS = 20_000
"""Maximum document length. Longer documents are truncated before they are modified."""
DISGUISES = (
    str,
    str.upper,
    lambda text: text.replace(" ", "  "),
    lambda text: text.replace(" ", "\u00a0"),
    lambda text: textwrap.fill(text, 72).replace("\n", "\r\n> "),
)
SHOWN = 10
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')]*\s+")
STAGES = {
    "gopher_quality": GopherQuality(by_form=False),
    "gopher_repetition": GopherRepetition(by_form=False),
    "c4": C4Quality(by_form=False),
    "c4 of FineWeb": C4Quality(endings=False, by_form=False),
    "fineweb": FineWebQuality(by_form=False),
}
RULES = {
    "gopher_short_doc": "few_words", "gopher_long_doc": "many_words", "gopher_below_avg_threshold": "short_words",
    "gopher_above_avg_threshold": "long_words", "gopher_too_many_hashes": "hashes",
    "gopher_too_many_ellipsis": "ellipses", "gopher_too_many_bullets": "bullet_lines",
    "gopher_too_many_end_ellipsis": "ellipsis_lines", "gopher_below_alpha_threshold": "few_alphabetic_words",
    "gopher_enough_stop_words": "few_stop_words", "dup_para_frac": "duplicate_paragraphs",
    "dup_para_char_frac": "duplicate_paragraph_characters", "dup_line_frac": "duplicate_lines",
    "dup_line_char_frac": "duplicate_line_characters", "too_few_sentences": "few_sentences",
    "line_punct_ratio": "few_ending_lines", "short_line_ratio": "short_lines",
    "char_dup_ratio": "duplicate_characters", "list_ratio": "many_lines",
    **{f"duplicated_{n}_n_grams": f"duplicate_{n}_gram" for n in range(5, 11)},
}  # fmt: skip
"""{datatrove's name of a rule: our name}, if they differ."""


def documents_of(patterns: list[str]) -> Iterator[bytes]:
    """Yields the documents in all files, in order."""
    from pretrain_tools.preparation.documents.records import Reading
    from pretrain_tools.preparation.documents.sources import find_sources, records_of

    for source in find_sources(patterns):
        yield from (record.text for record in records_of(source, Reading()) if record.text)


def datatrove_filters() -> dict:
    """Returns datatrove's filters for STAGES, patched to split words at spaces and sentences at punctuation."""
    from datatrove.pipeline import filters

    for module in (filters.gopher_quality_filter, filters.gopher_repetition_filter, filters.fineweb_quality_filter):
        # datatrove's own word splitter would cause most differences, but only the rules should be compared.
        module.split_into_words = lambda text, language: text.split()
    filters.c4_filters.split_into_sentences = lambda text, language: SENTENCE_END.split(text)
    made = (
        filters.GopherQualityFilter(), filters.GopherRepetitionFilter(), filters.C4QualityFilter(),
        filters.C4QualityFilter(filter_no_terminal_punct=False), filters.FineWebQualityFilter(),
    )  # fmt: skip
    return dict(zip(STAGES, made, strict=True))


# Filled by _start_comparing once per pool process, because the filters must be compiled first.
_stages = {}
_theirs = {}


def _start_comparing() -> None:
    from pretrain_tools.preparation.cleaning.personal_data import PersonalData

    for name, stage in (STAGES | {"personal_data": PersonalData()}).items():
        stage.compile()
        _stages[name] = stage.judge
    _theirs.update(datatrove_filters())


def compare(texts: list[bytes]) -> tuple[Counter, list[tuple[str, str, str, str, str]]]:
    """Compares our verdicts with datatrove's. Returns equal ones as {(filter, verdict): count}, and the differences.

    A difference is (filter, our verdict, datatrove's verdict, reason or '', excerpt).
    """
    from datatrove.data import Document
    from datatrove.pipeline.formatters import PIIFormatter

    agreed = Counter()
    different = []
    for name, judge in _stages.items():
        verdicts = judge(TextBatch(texts, [None] * len(texts)))
        for number, content in enumerate(texts):
            text = content.decode()
            ours = verdicts.removed.get(number, "stays"), verdicts.changed.get(number, content).decode()
            document = Document(text=text, id="0")
            answer = True
            if name == "personal_data":
                # PIIFormatter cycles through its replacements, so use a new one for each document.
                document.text = PIIFormatter().format(text)
            else:
                answer = _theirs[name].filter(document)
            # datatrove returns True, or (False, rule name).
            theirs = "stays" if answer is True else RULES.get(answer[1], answer[1]), document.text
            if ours[0] == theirs[0] and (ours[0] != "stays" or ours[1] == theirs[1]):
                agreed[name, ours[0] if ours[0] != "stays" or ours[1] == text else "changed"] += 1
            else:
                different.append((name, ours[0], theirs[0], reason_for(name, text), difference(*ours, *theirs)))
    return agreed, different


def reason_for(name: str, text: str) -> str:
    """Returns why verdicts on a document may differ (see docs/text_forms.md), or '' if the reason is unknown."""
    if name == "personal_data":
        if re.search(r"[0-9.](?:\d{1,3}\.){3}\d{1,3}|(?:\d{1,3}\.){3}\d{1,3}\.?\d", text):
            return "an IP address within a longer number"
        return "an email address after a non-ASCII letter" if re.search(r"[^\x00-\x7f][\w.+-]*@", text) else ""
    if re.search(r"[^\S\n]\n|\n[^\S\n]|[^\S\n]{2}|[\r\v\f\x1c-\x1e\x85\u2028\u2029]", text):
        return "trailing or repeated spaces, or unusual line breaks"
    if name == "gopher_quality" and re.search(r"(?<!\S)[^\w\s]+(?!\S)", text):
        return "a word that consists of punctuation"
    closing = r"[.!?…][\"'”’»)\]*_`]+"
    return (
        "a closing quote or bracket after a sentence"
        if re.search(closing, text) and name != "gopher_repetition"
        else ""
    )


def difference(our_verdict: str, ours: str, their_verdict: str, theirs: str) -> str:
    """Returns the beginning of the document if the verdicts differ, otherwise both texts around the first
    difference."""
    if our_verdict != their_verdict:
        return ours[:100]
    at = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return f"{ours[max(0, at - 40) : at + 40]!r} / {theirs[max(0, at - 40) : at + 40]!r}"


def bench_verdicts(texts: list[bytes], workers: int) -> list[str]:
    """Prints how many verdicts match datatrove's, and the differences. Returns the filters that differ too often."""
    batches = [texts[n : n + 50] for n in range(0, len(texts), 50)]
    agreed = Counter()
    different = []
    with multiprocessing.Pool(workers, _start_comparing) as pool:
        for number, (more, others) in enumerate(pool.imap(compare, batches), 1):
            agreed += more
            different += others
            if number % 20 == 0:
                print(f"  {50 * number:,} of {len(texts):,} documents, {len(different)} differences", flush=True)
    missed = []
    for name in (*STAGES, "personal_data"):
        of_filter = {verdict: number for (other, verdict), number in agreed.items() if other == name}
        others = [entry for entry in different if entry[0] == name]
        without = sum(not reason for *_, reason, _ in others)
        print(
            f"{name}: {sum(of_filter.values()):,} verdicts match, {len(others)} differ, {without} of them unexplained"
        )
        print("  " + ", ".join(f"{n:,} {verdict}" for verdict, n in sorted(of_filter.items(), key=lambda i: -i[1])))
        for _, ours, theirs, reason, text in others[:SHOWN]:
            print(f"  {ours} instead of {theirs}: {reason or 'unknown reason'}: {text}")
        if without > MOST_DIFFERENT * len(texts):
            missed.append(f"{name}: {without} verdicts differ from datatrove's")
    return missed


def prepare_in(folder: Path, name: str, texts: list[str], tokenizer: str, *options: str) -> dict:
    """Prepares documents in folder/name with prepare_data.py and returns the manifest."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = [sys.executable, "prepare_data.py", "--input", path, "--tokenizer", tokenizer, "--output", folder / name]
    run = subprocess.run(list(map(str, [*command, *options])), cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stdout + run.stderr)
    return json.loads((folder / name / "manifest.json").read_text())


def ids_by_place(folder: Path) -> dict[int, np.ndarray]:
    """Returns {line number in the input: token IDs} for the documents in a prepared folder."""
    from pretrain.data.shards import read_manifest
    from pretrain_tools.preparation.documents.document_index import read_index

    manifest = read_manifest(folder)
    found = {}
    for shard in manifest.shards:
        index = read_index(folder / shard.file, shard.documents)
        pieces = np.split(np.fromfile(folder / shard.file, manifest.dtype), index["end"][:-1].astype(int))
        found |= {int(place): ids[:-1] for place, ids in zip(index["place"], pieces, strict=True)}
    return found


def exact_jaccard(one: str, other: str, shingle: int = 5) -> float:
    """Computes the exact Jaccard similarity of two English documents' sets of word n-grams."""
    sets = []
    for text in (one, other):
        text = re.sub(r"['\u2018\u2019]|(?<=\w)-(?=\w)", "", text.casefold())
        words = re.findall(r"[^\W_]+", text)
        sets.append({tuple(words[n : n + shingle]) for n in range(max(1, len(words) - shingle + 1))})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def edited(text: str, share: float, rng: random.Random) -> str:
    """Returns a copy with a fraction of its words replaced. Some copies are also rotated or truncated."""
    words = text.split(" ")
    for place in rng.sample(range(len(words)), round(share * len(words))):
        words[place] = words[rng.randrange(len(words))]
    cut = rng.randrange(len(words))
    kind = rng.randrange(5)
    return " ".join(words[cut:] + words[:cut] if kind == 0 else words[: max(1, cut)] if kind == 1 else words)


def bench_near_duplicates(texts: list[bytes], count: int, tokenizer: str, folder: Path) -> list[str]:
    """Prints how many near and distant copies were removed. Returns the missed requirements."""
    rng = random.Random(0)
    chosen = rng.sample(texts, min(count, len(texts)))
    documents = list(dict.fromkeys(content.decode()[:DOCUMENT_CHARACTERS] for content in chosen))
    copies = [edited(text, rng.choice(SHARES), rng) for text in documents]
    every = documents + [DISGUISES[number % len(DISGUISES)](copy) for number, copy in enumerate(copies)]
    prepare_in(folder, "without", every, tokenizer, "--near_duplicates", str(THRESHOLD))
    left = ids_by_place(folder / "without")
    near = []
    far = []
    for place, (one, other) in enumerate(zip(documents, copies, strict=True), 1 + len(documents)):
        similarity = exact_jaccard(one, other)
        # Copies in between don't count, because MinHash only finds them with some probability.
        (near if similarity >= THRESHOLD else far if similarity < FAR else []).append(place not in left)
    recall = np.mean(near)
    wrong = np.mean(far)
    print(f"near duplicates: {len(documents):,} documents, each with a copy, {len(every) - len(left):,} removed")
    print(f"  of {len(near):,} copies with Jaccard {THRESHOLD} or more    {recall:.4f} removed")
    print(f"  of {len(far):,} copies below {FAR}                {wrong:.4f} removed")
    missed = [f"near duplicates: recall {recall:.4f}"] if recall < LEAST_RECALL else []
    return missed + ([f"near duplicates: {wrong:.4f} of the copies below {FAR} removed"] if wrong > MOST_FAR else [])


SPELLINGS = {
    "verbatim": str,
    "upper case": str.upper,
    "lower case": str.lower,
    "other punctuation": lambda text: re.sub(r"[.,;:]", " -- ", text),
    "without punctuation": lambda text: re.sub(r"[^\w\s]", "", text),
    "other spaces": lambda text: re.sub(r" ", "\n", text),
}


def letters_of(text: str) -> str:
    """Returns the letters and digits of a text, in lowercase."""
    return "".join(character for character in text.lower() if character.isalnum())


def stands_in(item: str, documents: list[str]) -> bool:
    """Checks if 13 consecutive words of an item, or all of a shorter one, occur in any document.

    `documents` contain only letters and digits, see `letters_of`.
    """
    words = [letters_of(word) for word in re.split(r"[^\w'’]+|_", item)]
    words = [word for word in words if word]
    runs = {"".join(words[n : n + 13]) for n in range(max(1, len(words) - 12))}
    return any(len(run) >= 20 and run in text for run in runs for text in documents)


def bench_decontamination(texts: list[bytes], count: int, items: list[str], tokenizer: str, folder: Path) -> list[str]:
    """Prints how many planted items were missed and how many removals were wrong. Returns the missed requirements."""
    from pretrain.data.data_record import numbers_in
    from pretrain_tools.preparation.cleaning.decontamination import read_benchmarks

    rng = random.Random(1)
    documents = [content.decode()[:DOCUMENT_CHARACTERS] for content in rng.sample(texts, min(count, len(texts)))]
    benchmarks = read_benchmarks(items)
    known = [
        (benchmark.name, number, whole[0])
        for benchmark in benchmarks
        for number, (whole, _) in enumerate(benchmark.items)
        if len(whole[0].split()) >= 13
    ]
    chosen = rng.sample(known, min(PLANTED, len(known), len(documents)))
    options = ("--validation_fraction", "0", "--decontaminate", *items)
    before = prepare_in(folder, "before", documents, tokenizer, *options)
    # Items that the documents already contain are expected in both manifests.
    stood = {name: numbers_in(found["entries"]) for name, found in before["cleaning"].get("found", {}).items()}
    removed_before = set(range(1, len(documents) + 1)) - ids_by_place(folder / "before").keys()
    holding = rng.sample(range(len(documents)), len(chosen))
    planted = list(documents)
    missed_by = Counter()
    expected = {name: set(numbers) for name, numbers in stood.items()}
    spellings = list(SPELLINGS.items())
    for turn, (place, (name, number, text)) in enumerate(zip(holding, chosen, strict=True)):
        words = planted[place].split(" ")
        cut = rng.randrange(len(words) + 1)
        planted[place] = " ".join([*words[:cut], spellings[turn % len(spellings)][1](text), *words[cut:]])
        expected.setdefault(name, set()).add(number)
    after = prepare_in(folder, "planted", planted, tokenizer, *options)
    left = ids_by_place(folder / "planted").keys()
    for turn, place in enumerate(holding):
        missed_by[spellings[turn % len(spellings)][0]] += place + 1 in left
    others = set(range(1, len(documents) + 1)) - left - {place + 1 for place in holding} - removed_before
    found = {name: numbers_in(of_list["entries"]) for name, of_list in after["cleaning"].get("found", {}).items()}
    lacking = sum(len(numbers - found.get(name, set())) for name, numbers in expected.items())
    items_of = {benchmark.name: benchmark.items for benchmark in benchmarks}
    folded = [letters_of(text) for text in planted]
    more = sum(
        not any(stands_in(text, folded) for texts in items_of[name][number] for text in texts)
        for name, numbers in found.items()
        for number in numbers - expected.get(name, set())
    )
    print(f"decontamination: {sum(len(b.items) for b in benchmarks):,} items in {len(benchmarks)} lists")
    print(f"  {len(documents):,} unchanged documents: {len(removed_before)} contained an item")
    for name, missed in missed_by.items():
        print(f"  planted, {name:<20} {missed} not found")
    print(f"  {lacking} of {len(chosen)} planted items are missing from the lists, which contain {more} false ones")
    print(f"  {len(others)} documents without a planted item removed")
    wrong = sum(missed_by.values())
    missed = [f"decontamination: {wrong} planted items not found"] if wrong else []
    missed += (
        [f"decontamination: {lacking} items missing from the lists, {more} false ones"] if lacking or more else []
    )
    return missed + ([f"decontamination: {len(others)} other documents removed"] if others else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="FILE", help="English documents in any supported format"
    )
    parser.add_argument("--items", nargs="+", required=True, metavar="FILE", help=".jsonl files with benchmark items")
    parser.add_argument("--tokenizer", required=True, help="folder or Hub ID")
    parser.add_argument("--documents", type=int, default=3000, help="number of documents to modify (default: 3000)")
    parser.add_argument(
        "--workers", type=int, default=multiprocessing.cpu_count(), help="number of processes for the verdicts"
    )
    parser.add_argument("--only", nargs="+", choices=("verdicts", "near_duplicates", "decontamination"))
    arguments = parser.parse_args()
    texts = list(documents_of(arguments.input))
    print(f"{len(texts):,} documents, {sum(map(len, texts)) / 1e6:,.1f} MB", flush=True)
    only = arguments.only or ("near_duplicates", "decontamination", "verdicts")
    missed = []
    items = [str(Path(item).resolve()) for item in arguments.items]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "near_duplicates" in only:
            missed += bench_near_duplicates(texts, arguments.documents, arguments.tokenizer, folder)
        if "decontamination" in only:
            missed += bench_decontamination(texts, arguments.documents, items, arguments.tokenizer, folder)
    if "verdicts" in only:
        missed += bench_verdicts(texts, arguments.workers)
    if missed:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
