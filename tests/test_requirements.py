"""Optional packages: a build that fails takes nothing along, and messages name files that have what they say."""

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution, metadata

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from pretrain_tools.experiments.sweep_plan import OPTUNA
from support.project import ROOT

FILES = {path.name: path.read_text() for path in ROOT.glob("requirements*.txt")}


def packages(name) -> set[str]:
    lines = (line.partition("#")[0].strip() for line in FILES[name].splitlines())
    return {re.match(r"[\w-]+", line)[0].lower() for line in lines if line and not line.startswith("-")}


SUPPORTED = ("3.11", "3.12", "3.13", "3.14")
NOT_ASKED_FOR = ("torch", "deepspeed")
"""Half a gigabyte, often from a folder or an index of its own; and a source archive for all versions."""


def pip_finds(version: str, *requirements: str) -> subprocess.CompletedProcess:
    """Looks the packages up as wheels for a Python, without what they require; installs nothing.

    stdout is pip's report. Which Python a package allows is left to the caller: pip would judge it by its own.
    """
    asked = ("--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--python-version", version)
    asked += ("--ignore-requires-python", "--report", "-")
    settings = ("--target", "nowhere", "--quiet", "--disable-pip-version-check", "--retries", "0", "--timeout", "20")
    command = [sys.executable, "-m", "pip", "install", *asked, *settings, *requirements]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def index():
    if pip_finds(SUPPORTED[0], "packaging").returncode:
        pytest.skip("pip reaches no index here, so wheels for other Pythons are not looked for")


@pytest.mark.parametrize("version", SUPPORTED)
def test_every_requirement_has_a_wheel_for_each_python(index, version):
    """Conditions such as python_version >= "3.14" are judged here as well, for the same reason."""
    lines = (line.partition("#")[0].strip() for line in FILES["requirements.txt"].splitlines())
    requirements = [Requirement(line) for line in lines if line]
    python = {"python_version": version, "python_full_version": f"{version}.0"}
    meant = [one for one in requirements if one.marker is None or one.marker.evaluate(python)]
    assert len({one.name for one in meant}) == len(meant) == len({one.name for one in requirements})
    compiled = [one for one in meant if one.name not in NOT_ASKED_FOR and not is_pure(one)]
    found = pip_finds(version, *(f"{one.name}{one.specifier}" for one in compiled))
    assert found.returncode == 0, found.stderr
    allowed = {one.name: metadata(one.name).get("Requires-Python", "") for one in meant if one not in compiled}
    for package in json.loads(found.stdout)["install"]:
        allowed[package["metadata"]["name"]] = package["metadata"].get("requires_python", "")
    assert not [name for name, pythons in allowed.items() if f"{version}.0" not in SpecifierSet(pythons)]


def test_what_tests_of_options_need_is_installed_with_the_other_tools():
    """Else they would skip."""
    assert {"optuna", "datatrove", "gguf", "model-signing"} <= packages("requirements-dev.txt")
    assert OPTUNA in FILES["requirements-dev.txt"]


def is_pure(requirement: Requirement) -> bool:
    """Whether the version that is installed here is the one that is meant, with one wheel for every Python."""
    installed = distribution(requirement.name)
    return installed.version in requirement.specifier and "Tag: py3-none-any" in (installed.read_text("WHEEL") or "")


@pytest.mark.parametrize("version", ["2, 7", "3, 10", "3, 15"])
def test_make_refuses_a_python_without_wheels_before_it_installs(tmp_path, version):
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    stand_in = tmp_path / "python"
    stand_in.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] || exec touch started\nexec {sys.executable} -S -c "import sys; sys.version_info = '
        f'({version}, 0); exec(sys.argv[1])" "$2"\n'
    )
    stand_in.chmod(0o755)
    refused = subprocess.run(
        ["make", "demo", f"PYTHON={stand_in}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    said = refused.stderr.splitlines()
    assert refused.returncode and f" is {version.replace(', ', '.')}. Use another one" in said[0], refused
    assert said[0].startswith("Groundwork runs on Python 3.11 to 3.14, but ") and len(said) == 2, "and make's own line"
    assert {path.name for path in tmp_path.iterdir()} == {"Makefile", "requirements.txt", "python"}


def test_the_pages_name_the_pythons_that_make_takes():
    for page in ("README.md", "CONTRIBUTING.md", "docs/first_hour.md"):
        assert f"Python {SUPPORTED[0]} to {SUPPORTED[-1]}" in (ROOT / page).read_text()


def test_what_is_compiled_stands_alone_and_its_build_finds_what_it_imports():
    assert packages("requirements-flash-attn.txt") == {"flash-attn"}
    assert not any("flash-attn" in packages(name) for name in FILES if name != "requirements-flash-attn.txt")
    before = packages("requirements.txt") | packages("requirements-gpu.txt")
    assert {"packaging", "wheel", "setuptools", "ninja", "torch"} <= before, "setup.py imports them"


@pytest.mark.parametrize(
    ("module", "file", "package"),
    [
        ("model/fp8.py", "requirements-gpu.txt", "torchao"),
        ("optim/adamw_8bit.py", "requirements-gpu.txt", "bitsandbytes"),
        ("model/attention.py", "requirements-flash-attn.txt", "flash-attn"),
    ],
)
def test_a_missing_package_is_asked_for_by_the_file_that_has_it(module, file, package):
    assert file in (ROOT / "pretrain" / module).read_text() and package in packages(file)
    assert file in (ROOT / "docs/gpu_setup.md").read_text()
