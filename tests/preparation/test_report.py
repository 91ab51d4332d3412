"""The report on a prepared folder: figures that add up, samples that cannot break the page, and dry runs."""

import json
import re
from html.parser import HTMLParser

import pytest

from pretrain_tools.preparation.cleaning.account import DOMAIN_SAMPLE, CleaningAccount
from pretrain_tools.preparation.documents.records import Reading
from pretrain_tools.preparation.documents.sources import BEGINNING, Files, find_sources
from pretrain_tools.preparation.dry_run import DrawnDocuments
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
        self.tags, self.text = [], ""
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


def test_a_dry_run_leaves_the_report_alone(documents, tokenizer):
    for number in (64, 70):  # the second replaces the first
        done = run_script("prepare_data.py", *arguments(documents, tokenizer, "--dry_run", number))
    facts = json.loads((documents / "out.dry_run.json").read_bytes())
    assert facts["documents_in"] == 70 and len(facts["by_source"]) == 32
    assert "removed" in done.stdout and not (documents / "out").exists()
    assert {path.name for path in documents.iterdir()} == {"docs", "mine.py", "out.dry_run.html", "out.dry_run.json"}


def test_a_dry_run_draws_from_all_over_the_input_and_makes_up_for_short_files(tmp_path):
    for number, lines in enumerate((1, 50, 2)):
        (tmp_path / f"{number}.jsonl").write_text("".join(f'{{"text": "{number} {n}"}}\n' for n in range(lines)))
    drawn = DrawnDocuments(Files(find_sources([f"{tmp_path}/*.jsonl"])), 20)
    records = [record for part in drawn.parts(Reading(), BEGINNING) for _, record in part.records(Reading())]
    texts = [record.text.decode() for record in records]
    assert texts == ["0 0", *(f"1 {n}" for n in range(17)), "2 0", "2 1"]


def test_what_a_dry_run_does_not_go_with_is_refused(documents, tokenizer):
    given = arguments(documents, tokenizer, "--dry_run", 5, "--slice", "0/2")
    done = run_script("prepare_data.py", *given, check=False)
    assert done.returncode == 2
    assert "--dry_run tries a whole preparation on a few documents; leave out --slice" in done.stderr


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
