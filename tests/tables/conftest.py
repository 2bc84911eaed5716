"""One fit of bands, one of label sets, one of few rows: made once, in a second or two each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("pandas")
pytest.importorskip("tabm")

from ffcp import tables
from tests.tables.material import houses


@pytest.fixture(scope="session")
def fitted() -> tables.FittedTable:
    torch.set_num_threads(1)
    return tables.fit(houses(600), "price", minutes=0.02, support=(0, None))


@pytest.fixture(scope="session")
def labelled() -> tables.FittedTable:
    frame = houses(600)
    frame["kind"] = np.where(frame.pop("price") > 350, "dear", "cheap")
    return tables.fit(frame, "kind", minutes=0.02, group="town")


@pytest.fixture(scope="session")
def few() -> tables.FittedTable:
    return tables.fit(houses(30), "price", minutes=0.03)


@pytest.fixture(scope="session")
def folder(fitted: tables.FittedTable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fitted.save(tmp_path_factory.mktemp("fit") / "houses.ffcp")
