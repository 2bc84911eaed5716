"""The guarantee of learned bands and of Auto, as a law over many calibration sets."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import ffcp
from ffcp import conformal_rank
from tests.conftest import small_mlp
from tests.core import few_epochs
from tests.law import ERROR_RATE, draw_hits, p_value
from tests.regression.models import heteroscedastic

pytestmark = pytest.mark.heavy

N, T, ALPHA = 60, 30, 0.1


def _covered(band: ffcp.Interval, y: Tensor) -> Tensor:
    return band.contains(y)


@pytest.mark.parametrize("nested", ["central", "grown"])
def test_bands_taught_by_training_rows_follow_the_law_one_row_at_a_time(nested: str) -> None:
    torch.manual_seed(1)
    made = ffcp.Learned(small_mlp(), nested=nested, seed=0).fit(
        *heteroscedastic(torch.Generator().manual_seed(9), 300)
    )

    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        predictor = copy.copy(made).calibrate(x_cal, y_cal)
        half = 3
        rows = [predictor.predict_interval(row[None], alpha=ALPHA) for row in x[:half]]
        parts = [_covered(band, y[i : i + 1]) for i, band in enumerate(rows)]
        return torch.cat([*parts, _covered(predictor.predict_interval(x[half:], ALPHA), y[half:])])

    hits = draw_hits(heteroscedastic, covered, n=N, t=T, repeats=120)
    assert p_value(hits, T, N, conformal_rank(N, ALPHA)) > ERROR_RATE


@pytest.mark.parametrize("make", [ffcp.Learned, ffcp.Auto], ids=["Learned", "Auto"])
def test_rows_that_teach_and_choose_do_not_spoil_the_guarantee(
    make: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The law holds however well was learned; short lessons show that it does.
    few_epochs(monkeypatch, 2)
    rows, used = 200, 120  # three fifths of so few calibrate

    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        predictor = make(small_mlp()).calibrate(x_cal, y_cal)
        assert len(predictor.calibration) == used
        if getattr(predictor, "method", None) == "LCP":
            covered.local += 1
        return _covered(predictor.predict_interval(x, alpha=ALPHA), y)

    covered.local = 0
    hits = draw_hits(heteroscedastic, covered, n=rows, t=T, repeats=60)
    # LCP covers at least as much, by another law; it must not be what is taken every time.
    assert covered.local < 30
    assert p_value(hits, T, used, conformal_rank(used, ALPHA)) > ERROR_RATE
