"""Tests for document types: each type has its own rules, which keep good documents and remove bad ones."""

import json
import random
import textwrap

import pytest

from pretrain_tools.preparation.cleaning.filters import sensible_set
from pretrain_tools.preparation.cleaning.forms import CODE, LINES, PARAGRAPHS, TABLE
from pretrain_tools.preparation.cleaning.stages import Cleaning, TextBatch
from pretrain_tools.preparation.documents.records import Record

SENTENCES = [
    "The committee decided to publish all of its records, and that was a relief to everyone who had waited.",
    "You have to be careful with knives, said the old woman; nobody answered her.",
    "In the autumn the leaves covered the garden, and the owls came back to the roof of the mill.",
    "It was not clear whether they would agree, but we would see what the court had to say.",
    "He walked along the river until it was dark, thinking of the house that he had sold.",
    "Nobody knew where the captain had gone, though there were many stories in the village.",
    "She laid the letter on the table with the others and looked out of the window for a long time.",
    "The train to the coast left at noon, which gave them an hour to find the boy.",
    "Most of the people who live there have a boat, and some of them have two.",
    "Of all the things that he had learned at school, this was the only one to be of use.",
]
SONNET = """Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date;
Sometime too hot the eye of heaven shines,
And often is his gold complexion dimm'd;
And every fair from fair sometime declines,
By chance or nature's changing course untrimm'd;
But thy eternal summer shall not fade,
Nor lose possession of that fair thou ow'st;
Nor shall death brag thou wander'st in his shade,
When in eternal lines to time thou grow'st:
  So long as men can breathe or eyes can see,
  So long lives this, and this gives life to thee."""
PLAY = "\n\n".join(
    f"{('First Citizen', 'All', 'MENENIUS')[n % 3]}:\n" + "\n".join(textwrap.wrap(SENTENCES[n % 10], 40))
    for n in range(10)
)
WORDS = "garden river window letter market winter engine paper summer bottle silver mountain family captain"
MENU = "Home|About Us|Contact|Products|Services|Log In|Register|Cart|Terms of Use|Help and FAQ|Support|Shipping|Sale"
DRAWN = random.Random(0)


def drawn(count):
    return " ".join(DRAWN.choice(WORDS.split()) for _ in range(count))


def wrapped(width, between="\n\n", indent=""):
    paragraphs = [" ".join(SENTENCES[n:] + SENTENCES[:n])[: 450 + 30 * n] + "." for n in (0, 4)]
    return between.join(textwrap.fill(text, width, initial_indent=indent) for text in paragraphs)


TABLE_ROWS = [(drawn(1), DRAWN.randrange(1000), f"{DRAWN.random():.3f}") for _ in range(30)]
PROGRAM = (
    'def sizes(folder, *, suffix=\'.txt\'):\n    """{name: bytes} of the files in a folder."""\n    found = {}\n'
    "    for path in sorted(folder.iterdir()):\n        if path.suffix == suffix:\n"
    "            found[path.name] = path.stat().st_size\n    return found\n\n\nclass Row(NamedTuple):\n"
    "    name: str = ''\n    size: int = 0\n\n    def __lt__(self, other):\n        return self.size < other.size\n"
)
GOOD = {
    "a paragraph on one line": (PARAGRAPHS, " ".join(SENTENCES)),
    "a line for each paragraph": (PARAGRAPHS, "\n\n".join(" ".join(SENTENCES[n : n + 3]) for n in range(0, 9, 3))),
    "dialogue": (PARAGRAPHS, "\n".join(f'"{sentence}"' for sentence in SENTENCES)),
    "wrapped at 72": (LINES, wrapped(72)),
    "wrapped at 40": (LINES, wrapped(40)),
    "wrapped, CRLF": (LINES, wrapped(72).replace("\n", "\r\n")),
    "wrapped, paragraphs indented": (LINES, wrapped(70, "\n", "    ")),
    "verse": (LINES, SONNET),
    "a play": (LINES, PLAY),
    "a program": (CODE, PROGRAM),
    "JSON": (CODE, json.dumps([{"name": name, "n": n, "x": [1, 2]} for name, n, _ in TABLE_ROWS], indent=2)),
    "CSV": (TABLE, "\n".join(f"{a},{b},{c}" for a, b, c in TABLE_ROWS)),
    "tabs": (TABLE, "\n".join(f"{a}\t{b}\t{c}" for a, b, c in TABLE_ROWS)),
    "columns": (TABLE, "\n".join(f"{a:<12}{b:>6}{c:>9}" for a, b, c in TABLE_ROWS)),
    "Markdown's table": (TABLE, "\n".join(f"| {a} | {b} | {c} |" for a, b, c in TABLE_ROWS)),
}
BAD = {
    "a menu": "\n".join(MENU.split("|") * 2) + "\nSee what we have for you, and that is all there is to it",
    "a menu that ends like a sentence": MENU.replace("|", "\n")
    + "\n"
    + "The best of all shops, and All rights reserved.",
    "menus in blocks": "\n\n".join([MENU.replace("|", "\n")] * 4) + "\n\nCopyright of the shop and its owner.",
    "a menu on each line": "\n".join([MENU.replace("|", " | ")] * 12),
    "cookies": "\n".join(["We use cookies to be of use.", "Read our privacy policy and the cookie policy."] * 9),
    "keywords": ", ".join(drawn(2) for _ in range(80)) + ", the best of and to be with",
    "keywords on lines": "\n".join(drawn(4) for _ in range(60)) + "\nall of the best that you have to see",
    "lines with commas": "\n".join(drawn(4) + "," for _ in range(60)) + "\nall of the best that you have to see",
    "one sentence again and again": " ".join(SENTENCES[:1] * 20),
    "one line again and again": "\n".join(SENTENCES[:1] * 20),
    "one wrapped paragraph again and again": "\n\n".join([textwrap.fill(" ".join(SENTENCES[:4]), 60)] * 9),
    "hashes": " ".join(["# ## #tag that of the to"] * 30),
    "signs in lines": "\n".join("".join(DRAWN.choices("#$%&(){}[]<>=_;", k=60)) for _ in range(30)),
    "teasers": "\n".join(sentence[:-1] + "..." for sentence in SENTENCES),
    "headlines": "\n".join(f"The {drawn(3)} of the {drawn(2)} and you".title() for _ in range(40))
    + "\nto be with that",
    "products": "\n".join(f"{drawn(2).title()}   ${n}.99   Add to the cart   Buy" for n in range(30)),
    "numbers": "\n".join(" ".join(map(str, DRAWN.sample(range(10**6), DRAWN.randrange(2, 9)))) for _ in range(40)),
    "archive": "\n".join(f"{month} {year} (3)" for year in range(2008, 2020) for month in ("May", "June", "July")),
    "tags": " ".join(f"{drawn(1)} ({n})" for n in range(100)) + " and of the to",
    "lorem ipsum": "\n".join([*SENTENCES, "Lorem ipsum dolor sit amet, consectetur adipiscing elit sed do."]),
    "lorem ipsum, wrapped": wrapped(60) + "\n\nLorem ipsum dolor sit amet,\nconsectetur adipiscing elit.",
    "a minified script": "!function(e,t){" + "var a=function(x){return n.b(4)};" * 99 + "}(this)",
    "a script in a page": "\n".join([*SENTENCES[:5], "(function() { var a = document.x(); })();"] * 2),
    "a short text": SENTENCES[0],
    "one long word": " ".join(["the of and", "x" * 5000]),
}


def kept(texts):
    records = [Record(number, text.encode(), source="x") for number, text in enumerate(texts)]
    cleaned, account = Cleaning(tuple(sensible_set(is_english=True))).clean(records)
    return {record.place: record.text for record in cleaned}, account.rules


@pytest.mark.parametrize(("form", "text"), GOOD.values(), ids=GOOD)
def test_good_text_of_each_form_is_recognized_and_kept(form, text):
    assert TextBatch([text.encode()], [None]).forms.tolist() == [form]
    stays, rules = kept([text])
    assert list(stays) == [0], rules
    if form != PARAGRAPHS:
        assert stays[0] == text.encode()


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_bad_text_is_removed(text):
    assert list(kept([text])[0]) == []


def test_lines_and_types_do_not_depend_on_neighboring_documents():
    page = "\n".join(["The market opens at nine.", "Nobody was there yet."] * 5 + ["All rights reserved"])
    table = "\n".join(["1|2|3"] * 9 + ["10|11"] * 3)
    texts = [text.encode() for text in ("wait..", ".\nand then", page, "in lower case.", "3|4|5", table)]
    batch = TextBatch(texts, [None] * len(texts))
    alone = [TextBatch([text], [None]) for text in texts]
    assert batch.forms.tolist() == [one.forms[0] for one in alone]
    assert batch.lines.ends_in_dots.tolist() == [bool(ends) for one in alone for ends in one.lines.ends_in_dots]


def test_documents_of_tabs_are_removed():
    kept, account = Cleaning(tuple(sensible_set(is_english=True))).clean([Record(1, b"\t\n \t")])
    assert kept == []
    assert list(account.removed) == ["gopher_quality.few_words"]


def test_a_document_gets_the_same_verdict_and_text_alone_and_in_a_batch():
    texts = [text for _, text in GOOD.values()] + list(BAD.values())
    texts += [f"{text}\n[12] See also [edit] here.\nOne" for text in texts[:8]]
    together, _ = kept(texts)
    alone = [kept([text])[0].get(0) for text in texts]
    assert [together.get(number) for number in range(len(texts))] == alone
