"""What ``ffcp predict --ray`` refuses before it starts a cluster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.data")
pytest.importorskip("tabm")

from ffcp.ray.tables import predict_files
from ffcp.tables import TableError


def test_tables_that_cannot_be_meant_are_refused_at_once(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "new.csv").write_text("a\n1\n")
    fitted: Any = SimpleNamespace(kind="intervals")
    tables = [tmp_path / "one" / "new.csv", tmp_path / "two" / "new.csv"]
    with pytest.raises(TableError, match="'new'"):
        list(predict_files(fitted, tables, tmp_path / "bands"))
    with pytest.raises(TableError, match="three"):
        list(predict_files(fitted, [tmp_path / "three.csv"], tmp_path / "bands"))
    with pytest.raises(TableError, match="one"):
        list(predict_files(fitted, tables[:1], tmp_path / "one"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
