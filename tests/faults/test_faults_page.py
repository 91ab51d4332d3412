"""Tests that docs/faults.md and docs/failures.md match the code's tests, messages and exit statuses."""

import ast
import re

from pretrain import errors
from support.project import ROOT

PAGE = (ROOT / "docs/failures.md").read_text()
ROWS = re.findall(r"^\| ([\d, ]+) \|.*\| (.*) \|$", (ROOT / "docs/faults.md").read_text(), re.MULTILINE)


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


def faults_told() -> dict[str, set[int]]:
    """Returns {test: numbers of the faults that it reports}."""
    told: dict[str, set[int]] = {}
    for path in (ROOT / "tests/faults").glob("test_fault_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
                first = [call.args[0].value for call in calls if getattr(call.func, "id", "") == "tell"]
                told[node.name] = {int(number) for numbers in first for number in numbers.split(",")}
    return told


def test_rows_and_tests_name_the_same_faults():
    """A test named in a row injects one of the row's faults, and a test that injects a fault is named in its row."""
    told = faults_told()
    assert sum(map(bool, told.values())) > 10
    named: dict[int, set[str]] = {}
    for numbers, tests in ROWS:
        numbers = {int(number) for number in numbers.split(",")}
        for test in re.findall(r"`(test_\w+)`", tests):
            assert not told.get(test) or told[test] & numbers, f"{test} doesn't inject any of the faults {numbers}"
            for number in numbers:
                named.setdefault(number, set()).add(test)
    injected = {(number, test) for test, numbers in told.items() for number in numbers}
    assert [(number, test) for number, test in injected if test not in named.get(number, ())] == []


def texts_in(source: str) -> list[str]:
    """Returns a module's strings, with each placeholder replaced by a NUL character."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.sub(r"\{[^{}]*\}", "\0", node.value))
    return found


def test_every_message_in_the_tables_is_in_the_code():
    page = PAGE.partition("## Messages")[2].partition("\n## ")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    texts = [
        text
        for path in [*(ROOT / "pretrain").rglob("*.py"), *(ROOT / "pretrain_tools").rglob("*.py"), *ROOT.glob("*.py")]
        for text in texts_in(path.read_text())
    ]
    patterns = {message: ".*".join(map(re.escape, message.split("…"))) for message in messages}
    unknown = [
        message
        for message, pattern in patterns.items()
        if not any(re.search(pattern, text, re.DOTALL) for text in texts)
    ]
    assert len(messages) > 30 and unknown == []


def test_every_exit_status_of_the_program_is_on_the_page():
    on_page = {int(code) for code in re.findall(r"^\| (\d+) \| ", PAGE.partition("## Messages")[0], re.MULTILINE)}
    statuses = {value for name, value in vars(errors).items() if name.startswith("EXIT_") or name == "CRASHED"}
    assert on_page == statuses
