"""Extends a byte-level BPE tokenizer: keeps its merges and IDs, and appends merges of frequent pairs in new text."""

import heapq
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pretrain.data.tokenizer import LoadedTokenizer, backend_of
from pretrain.errors import InputError

LONGEST_WORD = 256
"""Maximum number of characters in a word. Longer words are skipped."""
STALE_FILES = ("vocab.json", "merges.txt", "added_tokens.json")
"""Files next to tokenizer.json with the old vocabulary."""

Pair = tuple[str, str]


def extended(base: LoadedTokenizer, texts: Iterable[str], size: int, special_tokens: Sequence[str]) -> LoadedTokenizer:
    """Returns the tokenizer extended to `size` tokens: its own, then the special tokens, then merges by frequency.

    The result is smaller if the text has no more pairs that occur twice. Raises InputError if the tokenizer is of a
    different kind, or isn't smaller than `size`.
    """
    tokenizer = json.loads(base.json)
    model = tokenizer["model"]
    steps = json.dumps(tokenizer.get("pre_tokenizer"))
    if model.get("type") != "BPE" or model.get("continuing_subword_prefix") or '"ByteLevel"' not in steps:
        raise InputError(
            f"--tokenizer {base.name}: only byte-level BPE can be extended, but this is {model.get('type')}; leave "
            "out --tokenizer to train a new one"
        )
    special_tokens = [token for token in special_tokens if token not in base.special_tokens]
    number = size - base.vocabulary_size - len(special_tokens)
    if number < 0 or size == base.vocabulary_size:
        raise InputError(
            f"--train_tokenizer {size:,}: --tokenizer {base.name} already has {base.vocabulary_size:,} tokens, and "
            f"{len(special_tokens)} special tokens are new; give a larger size"
        )
    # An added token keeps its ID if it is in the model's vocabulary.
    vocabulary = model["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    next_id = base.vocabulary_size
    for token in special_tokens:
        vocabulary[token] = next_id
        tokenizer["added_tokens"].append({"id": next_id, "content": token, **flags})
        next_id += 1
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    known = set(merges)
    for pair in frequent_pairs(*words_of(base, texts)):
        if number == 0:
            break
        if pair in known:
            continue
        known.add(pair)
        merges.append(pair)
        if (token := "".join(pair)) not in vocabulary:
            vocabulary[token] = next_id
            next_id += 1
            number -= 1
    model |= {"vocab": vocabulary, "merges": [list(pair) for pair in merges]}
    files = {name: content for name, content in base.files.items() if name not in STALE_FILES}
    content = json.dumps(tokenizer, ensure_ascii=False).encode()
    return replace(base, json=content, vocabulary_size=next_id, files=files)


def words_of(base: LoadedTokenizer, texts: Iterable[str]) -> tuple[list[list[str]], list[int]]:
    """Returns (tokens of each distinct word, its count in the texts)."""
    backend = backend_of(base.json, base.name)
    counts: Counter[str] = Counter()
    for text in texts:
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        counts.update(word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text) if len(word) <= LONGEST_WORD)
    found = sorted(counts)
    return [[token.value for token in backend.model.tokenize(word)] for word in found], [counts[w] for w in found]


def frequent_pairs(words: list[list[str]], counts: list[int]) -> Iterator[Pair]:
    """Yields the most frequent adjacent pair and merges it in `words`, until no pair occurs twice."""
    number_of: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)
    for place, parts in enumerate(words):
        for pair in itertools.pairwise(parts):
            number_of[pair] += counts[place]
            places[pair].add(place)
    # Counts in the heap may be stale, so each is compared with the current one. The pair itself breaks ties.
    heap = [(-number, pair) for pair, number in number_of.items()]
    heapq.heapify(heap)
    while heap:
        number, pair = heapq.heappop(heap)
        if -number != number_of[pair]:
            if number_of[pair] > 1:
                heapq.heappush(heap, (-number_of[pair], pair))
            continue
        if number > -2:
            return
        yield pair
        changed = set()
        for place in places.pop(pair):
            parts = words[place]
            for old in itertools.pairwise(parts):
                number_of[old] -= counts[place]
            parts = words[place] = _merged(parts, pair)
            for new in itertools.pairwise(parts):
                number_of[new] += counts[place]
                places[new].add(place)
                changed.add(new)
        number_of[pair] = 0
        for new in changed:
            heapq.heappush(heap, (-number_of[new], new))


def _merged(parts: list[str], pair: Pair) -> list[str]:
    """Joins each occurrence of the pair in a word's tokens, from the left, as BPE does."""
    merged = []
    place = 0
    while place < len(parts):
        is_here = tuple(parts[place : place + 2]) == pair
        merged.append("".join(pair) if is_here else parts[place])
        place += 2 if is_here else 1
    return merged
