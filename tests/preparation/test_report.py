"""The report on a prepared folder: figures that add up, samples that cannot break the page."""

import json
import re
from html.parser import HTMLParser

import pytest

from pretrain_tools.preparation.cleaning.account import DOMAIN_SAMPLE, CleaningAccount
from pretrain_tools.preparation.report import report_facts, report_page
from support.project import run_script

FUNCTION = 'def keep(text):\n    return "<script>" not in text\n'


@pytest.fixture
def documents(tmp_path):
    """40 documents in each of 40 files; every fourth has what the filter removes, every eighth is a copy."""
    (tmp_path / "mine.py").write_text(FUNCTION)
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(40):
        lines = []
        for line in range(40):
            text = f"file {number} line {line} " + ("<script>alert(1)</script>" if line % 4 == 0 else "is fine")
            text = "the same everywhere" if line % 8 == 1 else text
            lines.append(json.dumps({"text": text, "url": f"https://www.site{number % 3}.org/{line}"}))
        (folder / f"{number:02d}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def arguments(documents, tokenizer, *more):
    given = ["--input", f"{documents}/docs/*.jsonl", "--filter", f"{documents}/mine.py:keep", "--url_field", "url"]
    given += ["--deduplicate", "--tokenizer", tokenizer, "--output", documents / "out", "--workers", 1, *more]
    return [str(word) for word in given]


class Page(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += data


def test_figures_add_up_and_samples_are_escaped(documents, tokenizer):
    run_script("prepare_data.py", *arguments(documents, tokenizer))
    done = run_script("prepare_data.py", "--report", str(documents / "out"))
    assert done.stdout.split() == [str(documents / f"out/report.{kind}") for kind in ("html", "json")]
    facts = json.loads((documents / "out/report.json").read_bytes())
    assert facts["documents_in"] == 1600
    assert facts["removed"] == [{"rule": "mine.keep", "documents": 400, "bytes": facts["removed"][0]["bytes"]}]
    copies = 200 - 1
    assert facts["skipped"] == [
        {"rule": "--deduplicate: copies of earlier documents", "documents": copies, "bytes": None}
    ]
    assert facts["documents_kept"] == 1600 - 400 - copies == sum(s["documents"] for s in facts["splits"].values())
    assert sum(facts["histograms"]["length of the documents that stayed, in bytes"].values()) == 1001
    assert {name: round(share, 2) for name, share in facts["domains"].items()}.keys() == {
        "site0.org", "site1.org", "site2.org",
    }  # fmt: skip
    page = Page((documents / "out/report.html").read_text())
    assert "script" not in page.tags and "link" not in page.tags and "<script>alert(1)</script>" in page.text
    assert "1,600 documents went in; 1,001 (63 %) stayed" in page.text
    assert not re.search(r"https?://(?!www\.site)", (documents / "out/report.html").read_text())


def test_a_folder_without_cleaning_has_a_report_too(shards):
    facts = report_facts(shards)
    assert facts["removed"] == [] and facts["samples"] == {}
    assert "Nothing." in report_page(facts)


def test_the_sample_of_domains_is_the_same_in_any_division():
    texts = [f"text {n}".encode() for n in range(3 * DOMAIN_SAMPLE)]
    urls = [f"http://{n % 7}.org/x" for n in range(len(texts))]
    whole = CleaningAccount()
    whole.add_domains(texts, urls)
    divided = CleaningAccount()
    for first in range(0, len(texts), 777):
        part = CleaningAccount()
        part.add_domains(texts[first : first + 777], urls[first : first + 777])
        divided.add(part)
    assert divided.domains == whole.domains and len(whole.domains) == DOMAIN_SAMPLE
