"""Summaries that cannot be merged, loaded or made smaller are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ffcp
from tests.conftest import normal, small_mlp
from tests.core import rewrite

X, Y = normal(400, 4, seed=0), normal(400, seed=1)


def test_summaries_of_other_outputs_do_not_merge() -> None:
    one = ffcp.CP(ffcp.Stored()).calibrate(torch.zeros(50, 2), normal(50, 2, seed=2)).compress(0.1)
    other = (
        ffcp.CP(ffcp.Stored()).calibrate(torch.zeros(50, 3), normal(50, 3, seed=3)).compress(0.1)
    )
    with pytest.raises(ValueError, match="outputs"):
        one.merge(other)


def test_a_summary_does_not_become_finer() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y).compress(0.1)
    with pytest.raises(ValueError, match="rank"):
        predictor.compress(0.01)


@pytest.mark.parametrize("groups", [None, ["a", "b"] * 200])
def test_a_summary_made_while_rows_come_covers_groups_too(groups: Any) -> None:
    given = {} if groups is None else {"groups": groups}
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y, rank_error=0.05, **given)
    predictor.calibrate(X, Y, update=True, **given)
    found = predictor.predict_interval(X, **given).contains(Y).double().mean()
    assert found >= 0.9
    assert 0 < predictor.calibration.rank_error <= 0.1


def test_too_few_rows_of_a_summary_are_named() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X[:5], Y[:5]).compress(0.1)
    with pytest.warns(ffcp.FFCPWarning, match=r"\b5\b"):
        predictor.predict_interval(X[:3])


def test_pieces_of_other_outputs_are_refused(tmp_path: Path) -> None:
    predictor, path = ffcp.CP(small_mlp()).calibrate(X, Y).compress(0.1), tmp_path / "summary"
    predictor.save(path)
    rewrite(path, lambda tensors, _: tensors.update(pieces=tensors["pieces"].repeat(1, 2, 1)))
    with pytest.raises(ffcp.CalibrationFileError, match=path.name):
        ffcp.load(path, predictor.model)
