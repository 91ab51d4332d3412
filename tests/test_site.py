"""Tests for the documentation site: all links work, and the reference contains every setting and command."""

import os
import re
import subprocess
import sys

import pytest
import yaml

from docs.figures import FIGURES, draw
from pretrain.recipe import fields_of_config
from support.project import ROOT

LONG = {
    "first_hour", "shapes", "failures", "design", "performance", "quality", "memory", "faults", "comparison",
}  # fmt: skip
"""Pages that may be long because of tables or results. The measurement archive has no limit either."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="pip install -r requirements-dev.txt")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_reference_has_every_setting_once(site):
    text = (site / "reference/settings/index.html").read_text()
    headings = re.findall(r"<h3 id=\"[^\"]*\"><code>([^<]*)</code>", text)
    assert headings == [path for path, _ in fields_of_config()]
    assert "One of <code>scratch</code>, <code>pretrained</code>, default <code>scratch</code>." in text


def test_the_reference_has_every_command(site):
    text = (site / "reference/commands/index.html").read_text()
    for name in ("train.py", "prepare_data.py", "evaluate.py", "plan.py", "publish.py", "runs.py compare"):
        assert f">{name}<" in text
    assert "--train_tokenizer" in text and "--gguf" in text


def test_links_to_code_are_text_and_links_between_pages_are_links(site):
    text = (site / "index.html").read_text()
    assert 'href="own_ideas/"' in text and "<code>train.py</code>" in text and 'href="train.py"' not in text


def test_the_reference_has_the_events_the_files_of_a_run_and_the_names_of_extensions(site):
    events = (site / "reference/events/index.html").read_text()
    row = re.search(r"<td><code>train</code></td>.*?</tr>", events, re.DOTALL)[0]
    assert all(f"<code>{field}</code>" in row for field in ("loss", "mfu", "tokens_per_second", "data_seconds"))
    files = (site / "reference/run_files/index.html").read_text()
    assert "<code>metrics.jsonl</code>" in files
    names = (site / "reference/python/index.html").read_text()
    assert "<code>state_shapes(name)</code>" in names and "<code>random_windows</code>" in names


def pages_in(navigation) -> list[str]:
    """Returns the files in a section of mkdocs.yml's nav."""
    if isinstance(navigation, str):
        return [navigation]
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for part in parts for page in pages_in(part)]


def test_every_guide_is_two_clicks_away():
    """Every guide is linked from the first page of the "Guides" tab."""
    (guides,) = [tab for tab in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"] if "Guides" in tab]
    first, *others = pages_in(guides)
    linked = re.findall(r"\]\((\w+\.md)", (ROOT / "docs" / first).read_text())
    assert first == "guides.md" and len(others) > 40
    assert not set(others) - set(linked)


@pytest.mark.parametrize("name", FIGURES)
def test_figures_match_the_code(name, tmp_path):
    """Each figure matches the code that draws it. Update figures with python -m docs.figures."""
    draw(tmp_path, [name])
    assert (tmp_path / f"{name}.svg").read_text() == (ROOT / f"docs/images/{name}.svg").read_text()


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_a_guide_answers_one_question_in_a_thousand_words(page):
    assert page.stem in LONG or page.stem.startswith("measurements_") or len(page.read_text().split()) <= 1000
