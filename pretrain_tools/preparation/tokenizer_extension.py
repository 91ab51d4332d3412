"""Extends a byte-level BPE tokenizer with merges learned from new text. Existing merges and token IDs don't change."""

import heapq
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pretrain.data.tokenizer import LoadedTokenizer
from pretrain.errors import InputError

LONGEST_WORD = 256
"""Maximum word length in characters. Longer words are skipped."""
STALE_FILES = ("vocab.json", "merges.txt", "added_tokens.json")
"""Tokenizer files that contain the old vocabulary."""

Pair = tuple[str, str]


def refuse_words(special_tokens: Iterable[str], pre_tokenizer: Any) -> None:
    """Raises InputError if special tokens are words to the pre-tokenizer.

    Merges could then give ordinary text a special token's ID.
    """
    words = [token for token in special_tokens if len(pre_tokenizer.pre_tokenize_str(token)) < 2]
    if words:
        raise InputError(
            f"--special_tokens {' '.join(map(repr, words))}: can't be told apart from ordinary text, because the "
            "pre-tokenizer doesn't split it; use tokens such as '<|user|>'"
        )


def extended(base: LoadedTokenizer, texts: Iterable[str], size: int, special_tokens: Sequence[str]) -> LoadedTokenizer:
    """Extends a tokenizer to `size` tokens: first adds the special tokens, then the most frequent merges.

    Adds fewer tokens if no remaining pair occurs twice. Raises InputError if the tokenizer isn't byte-level BPE,
    `size` is too small, or a special token is already another token.
    """
    tokenizer = json.loads(base.json)
    model = tokenizer["model"]
    steps = json.dumps(tokenizer.get("pre_tokenizer"))
    if model.get("type") != "BPE" or model.get("continuing_subword_prefix") or '"ByteLevel"' not in steps:
        raise InputError(
            f"--tokenizer {base.name}: only byte-level BPE tokenizers can be extended, got {model.get('type')}; omit "
            "--tokenizer to train a new one"
        )
    special_tokens = [token for token in special_tokens if token not in base.special_tokens]
    # Added tokens in the model's vocabulary keep their IDs. A new ID for a known token would replace its old one.
    vocabulary = model["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    taken = [f"{token} (ID {vocabulary[token]:,})" for token in special_tokens if token in vocabulary]
    if taken:
        raise InputError(
            f"--special_tokens: --tokenizer {base.name} already has the tokens {', '.join(taken)}; omit them to keep "
            "them as they are, or use names that are not in its vocabulary"
        )
    refuse_words(special_tokens, base.backend.pre_tokenizer)
    if size < base.vocabulary_size + len(special_tokens) or size == base.vocabulary_size:
        raise InputError(
            f"--train_tokenizer {size:,}: is too small, because --tokenizer {base.name} already has "
            f"{base.vocabulary_size:,} tokens and --special_tokens adds {len(special_tokens)}; use a larger size"
        )
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    next_id = base.vocabulary_size
    for token in special_tokens:
        vocabulary[token] = next_id
        tokenizer["added_tokens"].append({"id": next_id, "content": token, **flags})
        next_id += 1
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    known = set(merges)
    for pair in frequent_pairs(*words_of(base, texts)):
        if next_id == size:
            break
        if pair in known:
            continue
        known.add(pair)
        merges.append(pair)
        if (token := "".join(pair)) not in vocabulary:
            vocabulary[token] = next_id
            next_id += 1
    model |= {"vocab": vocabulary, "merges": [list(pair) for pair in merges]}
    files = {name: content for name, content in base.files.items() if name not in STALE_FILES}
    content = json.dumps(tokenizer, ensure_ascii=False).encode()
    return replace(base, json=content, vocabulary_size=next_id, files=files)


def words_of(base: LoadedTokenizer, texts: Iterable[str]) -> tuple[list[list[str]], list[int]]:
    """Splits the text into words. Returns (tokens of each distinct word, count of each distinct word)."""
    backend = base.backend
    counts: Counter[str] = Counter()
    for text in texts:
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        counts.update(word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text) if len(word) <= LONGEST_WORD)
    found = sorted(counts)
    return [[token.value for token in backend.model.tokenize(word)] for word in found], [counts[w] for w in found]


def frequent_pairs(words: list[list[str]], counts: list[int]) -> Iterator[Pair]:
    """Repeatedly yields the most frequent adjacent pair and merges it in `words`, until no pair occurs twice."""
    number_of: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)
    for place, parts in enumerate(words):
        for pair in itertools.pairwise(parts):
            number_of[pair] += counts[place]
            places[pair].add(place)
    # Counts in the heap may be stale, so check them when they are popped. Ties are broken by the pair itself.
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
    """Merges all occurrences of a pair in a word's tokens, from left to right."""
    merged = []
    place = 0
    while place < len(parts):
        is_here = tuple(parts[place : place + 2]) == pair
        merged.append("".join(pair) if is_here else parts[place])
        place += 2 if is_here else 1
    return merged
