"""Run the notebooks of docs/notebooks and keep their outputs: ``make notebooks``.

What belongs to one machine or one moment is left out: times, paths, warnings.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
SECONDS = 300  # for one cell


def executed(path: Path) -> Any:
    """Return a notebook with its outputs; an error in a cell is raised."""
    book = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        quiet = ["--log-level=ERROR"]  # the kernel warns of its own transport
        NotebookClient(book, timeout=SECONDS, resources=place, extra_arguments=quiet).execute()
    return plain(book)


def plain(book: Any) -> Any:
    """Remove what belongs to one machine from an executed notebook."""
    book.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    for cell in book.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = _joined(one for one in cell.outputs if one.get("name") != "stderr")
            for output in cell.outputs:
                if "metadata" in output:
                    output.metadata = {}
    return book


def _joined(outputs: Iterable[Any]) -> list[Any]:
    """Concatenate the printed parts of a cell, whose number depends on timing."""
    kept: list[Any] = []
    for output in outputs:
        if kept and output.output_type == kept[-1].output_type == "stream":
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def main() -> None:
    """Run those that are named, or all."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        if len(sys.argv) == 1 or path.stem in sys.argv[1:]:
            start = time.perf_counter()
            nbformat.write(executed(path), path)
            seconds = time.perf_counter() - start
            print(f"{path.name}: {seconds:.0f} s, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
