"""Optional packages: a build that fails takes nothing along, and messages name files that have what they say."""

import re

import pytest

from support.project import ROOT

FILES = {path.name: path.read_text() for path in ROOT.glob("requirements*.txt")}


def packages(name) -> set[str]:
    lines = (line.partition("#")[0].strip() for line in FILES[name].splitlines())
    return {re.match(r"[\w-]+", line)[0].lower() for line in lines if line and not line.startswith("-")}


def test_what_is_compiled_stands_alone_and_its_build_finds_what_it_imports():
    assert packages("requirements-flash-attn.txt") == {"flash-attn"}
    assert not any("flash-attn" in packages(name) for name in FILES if name != "requirements-flash-attn.txt")
    before = packages("requirements.txt") | packages("requirements-gpu.txt")
    assert {"packaging", "wheel", "setuptools", "ninja", "torch"} <= before, "setup.py imports them"


@pytest.mark.parametrize(
    ("module", "file", "package"),
    [
        ("model/fp8.py", "requirements-gpu.txt", "torchao"),
        ("optim/optimizers.py", "requirements-gpu.txt", "bitsandbytes"),
        ("model/attention.py", "requirements-flash-attn.txt", "flash-attn"),
    ],
)
def test_a_missing_package_is_asked_for_by_the_file_that_has_it(module, file, package):
    assert file in (ROOT / "pretrain" / module).read_text() and package in packages(file)
    assert file in (ROOT / "docs/strategies.md").read_text()
