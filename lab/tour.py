"""Runs tour.ipynb and stores what it prints and draws: python lab/tour.py, needs nbclient and ipykernel."""

from hashlib import sha256
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[1] / "tour.ipynb"


def hash_of_code(notebook: dict) -> str:
    """Of all code cells but the first, which fetches the repository and makes no output."""
    cells = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return sha256("\n".join(cells[1:]).encode()).hexdigest()


if __name__ == "__main__":
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = hash_of_code(notebook)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    options = {"timeout": 600, "record_timing": False, "coalesce_streams": True}
    NotebookClient(notebook, resources=resources, **options).execute()
    notebook["metadata"]["code"] = code
    nbformat.write(notebook, NOTEBOOK)
