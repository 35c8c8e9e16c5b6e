"""The notebook runs from its first cell to its last, and is committed without outputs."""

import json

import pytest
from conftest import ROOT

NOTEBOOK = ROOT / "examples" / "first-model.ipynb"


def test_the_notebook_is_stored_without_outputs():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert cells and not any(cell["outputs"] or cell["execution_count"] for cell in cells)


@pytest.mark.slow
def test_the_notebook_trains_draws_searches_and_compares(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("LAPCLIP_SECONDS", "2")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    made = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    num_images = {
        name: sum("image/png" in one.get("data", {}) for one in outputs) for name, outputs in made.items()
    }
    drawn = ("data", "train", "search", "search-own", "compare-train", "compare-plot")
    assert num_images == dict.fromkeys(made, 0) | dict.fromkeys(drawn, 1), "a figure is replaced, not added"
    said = "".join(one.text for one in made["compare"])
    assert "size: resnet-tiny and tiny" in said and "recall@10: " in said
