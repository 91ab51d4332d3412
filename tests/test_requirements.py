"""Tests for optional packages: a failed build doesn't affect the others, and messages name the right requirements
file."""

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
"""Packages that aren't checked: torch takes half a gigabyte and is often installed from a separate index, and
deepspeed is a source archive."""


def pip_finds(version: str, *requirements: str) -> subprocess.CompletedProcess:
    """Looks up wheels for a Python version, without dependencies and without installing them.

    stdout contains pip's report. requires-python is ignored, because pip would compare it with its own Python version.
    """
    asked = ("--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--python-version", version)
    asked += ("--ignore-requires-python", "--report", "-")
    settings = ("--target", "nowhere", "--quiet", "--disable-pip-version-check", "--retries", "0", "--timeout", "20")
    command = [sys.executable, "-m", "pip", "install", *asked, *settings, *requirements]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def index():
    if pip_finds(SUPPORTED[0], "packaging").returncode:
        pytest.skip("pip can't reach an index, so wheels for other Python versions aren't checked")


@pytest.mark.parametrize("version", SUPPORTED)
def test_every_requirement_has_a_wheel_for_each_python(index, version):
    """Markers such as python_version >= "3.14" are evaluated here, not by pip."""
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


def test_packages_of_optional_tests_are_in_the_dev_requirements():
    """Without them, those tests would be skipped."""
    assert {"optuna", "datatrove", "gguf", "model-signing"} <= packages("requirements-dev.txt")
    assert OPTUNA in FILES["requirements-dev.txt"]


def is_pure(requirement: Requirement) -> bool:
    """Returns True if the installed version satisfies the requirement and has one wheel for all Python versions."""
    installed = distribution(requirement.name)
    return installed.version in requirement.specifier and "Tag: py3-none-any" in (installed.read_text("WHEEL") or "")


@pytest.mark.parametrize("version", ["2, 7", "3, 10", "3, 15"])
def test_make_rejects_a_python_without_wheels(tmp_path, version):
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
    assert said[0].startswith("Groundwork runs on Python 3.11 to 3.14, but ") and len(said) == 2, (
        "only make's own error line may follow"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"Makefile", "requirements.txt", "python"}


def test_the_pages_name_the_supported_python_versions():
    for page in ("README.md", "CONTRIBUTING.md", "docs/first_hour.md"):
        assert f"Python {SUPPORTED[0]} to {SUPPORTED[-1]}" in (ROOT / page).read_text()


def test_compiled_packages_are_separate_and_their_build_requirements_come_first():
    assert packages("requirements-flash-attn.txt") == {"flash-attn"}
    assert not any("flash-attn" in packages(name) for name in FILES if name != "requirements-flash-attn.txt")
    before = packages("requirements.txt") | packages("requirements-gpu.txt")
    assert {"packaging", "wheel", "setuptools", "ninja", "torch"} <= before, (
        "packages imported by setup.py must be installed first"
    )


@pytest.mark.parametrize(
    ("module", "file", "package"),
    [
        ("model/fp8.py", "requirements-gpu.txt", "torchao"),
        ("optim/adamw_8bit.py", "requirements-gpu.txt", "bitsandbytes"),
        ("model/attention.py", "requirements-flash-attn.txt", "flash-attn"),
    ],
)
def test_messages_for_missing_packages_name_the_right_file(module, file, package):
    assert file in (ROOT / "pretrain" / module).read_text() and package in packages(file)
    assert file in (ROOT / "docs/gpu_setup.md").read_text()
