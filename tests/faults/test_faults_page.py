"""The table of faults in docs/failures.md names tests that there are."""

import re

from support.project import ROOT

ROWS = re.findall(r"^\| ([\d, ]+) \|.*\| (.*) \|$", (ROOT / "docs/failures.md").read_text(), re.MULTILINE)


def test_every_fault_is_listed():
    numbers = {int(number) for numbers, _ in ROWS for number in numbers.split(",")}
    assert numbers >= set(range(1, 31))


def test_every_test_named_is_there():
    sources = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    files = {name for _, tests in ROWS for name in re.findall(r"`(test_\w+\.py)`", tests)}
    named = {name for _, tests in ROWS for name in re.findall(r"`(test_\w+)`", tests)}
    assert files and named and files <= sources.keys()
    assert [name for name in named if not any(f"def {name}(" in source for source in sources.values())] == []
    short = {name for _, tests in ROWS for name in re.findall(r"\b(\w+):", tests)}
    assert all(f"test_fault_{name}.py" in sources for name in short - {"py"}), short
