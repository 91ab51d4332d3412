"""Tests that docs/first_hour.ipynb runs from top to bottom."""

import re

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from support.clone import environment_in, make_clone
from support.project import ROOT, events

NOTEBOOK = ROOT / "docs/first_hour.ipynb"


def test_the_notebook_is_shipped_without_output():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"} and set(notebook.metadata.kernelspec) == {
        "display_name", "language", "name",
    }  # fmt: skip
    for cell in notebook.cells:
        assert not cell.metadata and not cell.get("outputs") and cell.get("execution_count") is None
        assert not re.search(r"/(home|root|tmp|work)/", cell.source)


def test_a_notebook_runs_from_top_to_bottom(tmp_path, text_files, monkeypatch):
    """Uses the smaller budgets from support/clone.py. A failing cell raises an error."""
    clone = make_clone(tmp_path / "groundwork")
    (clone / "docs").mkdir()
    for name, value in environment_in(clone).items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    standard_library = "sysconfig.get_path"
    (setup,) = [cell for cell in notebook.cells if standard_library in cell.source]
    setup.source = re.sub(r"^(os\.environ\[.TEXT.\] = ).*", rf'\1"{text_files}/*.py"', setup.source, flags=re.M)
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(clone / "docs")}})
    with client.setup_kernel():
        for number, cell in enumerate(notebook.cells):
            client.execute_cell(cell, number)
        broken = nbformat.v4.new_code_cell("%%bash -e\npython train.py --config recipes/none.yaml\necho on")
        notebook.cells.append(broken)
        with pytest.raises(CellExecutionError, match=r"recipes/none\.yaml"):
            client.execute_cell(broken, len(notebook.cells) - 1)
    run = clone / "runs/first_hour"
    assert events(run, "end")[-1]["code"] == 0 and events(run, "validation")
    outputs = [output for cell in notebook.cells[:-1] for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs), "the loss curve must be shown"
    printed = "".join(output.get("text", "") for output in outputs)
    assert "already complete" not in printed
    for part in ("tokenizers/first_hour: ", "data/first_hour: prepared", "done: ", "    def read(self", " parameters"):
        assert part in printed, part
