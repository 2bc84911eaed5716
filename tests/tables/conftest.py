"""One fit of bands, one of label sets, one of few rows: made once, in a few seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("pandas")
pytest.importorskip("tabm")

from ffcp import tables
from tests.tables.material import houses, quick_fit


@pytest.fixture(scope="session")
def fitted() -> tables.FittedTable:
    torch.set_num_threads(1)
    return quick_fit(houses(600), "price", minutes=0.02, support=(0, None))


@pytest.fixture(scope="session")
def labelled() -> tables.FittedTable:
    frame = houses(600)
    frame["kind"] = np.where(frame.pop("price") > 350, "dear", "cheap")
    return quick_fit(frame, "kind", minutes=0.02, group="town")


@pytest.fixture(scope="session")
def few() -> tables.FittedTable:
    return quick_fit(houses(18), "price", minutes=0.01)


@pytest.fixture(scope="session")
def folder(fitted: tables.FittedTable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fitted.save(tmp_path_factory.mktemp("fit") / "houses.ffcp")
