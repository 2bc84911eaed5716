"""Several levels at once: what one level after the other gives, from one pass of the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import ffcp
from ffcp.conformal.rank import exact_alpha
from tests.conftest import normal, small_mlp

ROWS = 240
X, Y = normal(ROWS, 4, seed=0), normal(ROWS, seed=1)
ALPHAS = (0.3, 0.05, 0.5, 0.1)


def near(kernel: str, **options: Any) -> ffcp.LCP:
    localizer = ffcp.kernels.Localizer(
        kernel, on="input", bandwidth=60 if kernel == "nearest" else 3.0
    )
    return ffcp.LCP(small_mlp(), localizer, **options)


METHODS: dict[str, Callable[[], Any]] = {
    "CP": lambda: ffcp.CP(small_mlp()),
    "CP, each side": lambda: ffcp.CP(small_mlp(), side="each"),
    "CP, bonferroni": lambda: ffcp.CP(small_mlp(outputs=3), joint="bonferroni"),
    "CP, half of the outputs": lambda: ffcp.CP(small_mlp(outputs=3), joint=0.5),
    "FFCP": lambda: ffcp.FFCP(small_mlp(), "0"),
    "FFCP in batches": lambda: ffcp.FFCP(small_mlp(), "0", batch_size=50),
    "CQR": lambda: ffcp.CQR(small_mlp(outputs=2)),
    "FFCQR": lambda: ffcp.FFCQR(small_mlp(outputs=2), "0"),
    "LCP": lambda: near("nearest"),
    "LCP, random": lambda: near("gaussian", guarantee="random", seed=1),
    "LCP, plain": lambda: near("box", guarantee="none"),
    "groups": lambda: ffcp.IntervalPredictor(
        small_mlp(),
        calibration=ffcp.calibrations.Mondrian(by=lambda x: x[:, 0] > 0),
        support=(-4, 4),
    ),
    "FCP": lambda: ffcp.FCP(small_mlp(), "0", steps=3),
    "FCQR": lambda: ffcp.FCQR(small_mlp(outputs=2), "0", steps=3),
}


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("name", METHODS)
def test_several_levels_are_the_levels_one_by_one(name: str) -> None:
    predictor = METHODS[name]()
    y = normal(ROWS, 3, seed=1) if "outputs" in name or "bonferroni" in name else Y
    predictor.calibrate(X, y)
    several = predictor.predict_interval(X[:70], ALPHAS, first_row=0)
    assert several.alpha == ALPHAS
    for level, alpha in enumerate(ALPHAS):
        one = predictor.predict_interval(X[:70], alpha, first_row=0)
        assert one.alpha == alpha
        assert torch.equal(several.lower[level], one.lower)
        assert torch.equal(several.upper[level], one.upper)
        assert torch.equal(several.prediction, one.prediction)


@pytest.mark.parametrize(
    "alpha", [[0.1], (0.1,), np.array([0.1]), torch.tensor([0.1]), [Fraction(1, 10)]]
)
def test_a_sequence_gives_the_dimension_and_a_number_does_not(alpha: Any) -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y)
    band = predictor.predict_interval(X[:5], alpha)
    assert band.lower.shape == band.upper.shape == (1, 5)
    assert band.prediction.shape == (5,)
    for number in (0.1, np.float64(0.1), torch.tensor(0.1), Fraction(1, 10)):
        assert torch.equal(predictor.predict_interval(X[:5], number).lower, band.lower[0])


@pytest.mark.parametrize("alpha", [[], [0.1, 1.2], ["0.1"], "0.1", [[0.1]], [0.1, None]])
def test_what_is_no_level_is_refused(alpha: Any) -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y)
    with pytest.raises((ValueError, TypeError), match="alpha"):
        predictor.predict_interval(X, alpha)


def test_the_strictest_level_warns_once() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X[:30], Y[:30])
    with pytest.warns(ffcp.FFCPWarning, match=r"\b99\b") as caught:
        band = predictor.predict_interval(X, (0.1, 0.01, 0.02))
    assert len(caught) == 1
    assert band.lower.isinf().all(dim=1).tolist() == [False, True, True]


def test_several_levels_cost_one_pass_and_one_slack() -> None:
    asked = []

    def scale(seen: ffcp.BatchOutput) -> torch.Tensor:
        asked.append(len(seen.rows))
        return 1 + seen.x[:, 0].abs()

    predictor = ffcp.IntervalPredictor(small_mlp(), scale=scale).calibrate(X, Y)
    asked.clear()
    predictor.predict_interval(X, tuple(np.arange(1, 20) / 20))
    assert asked == [ROWS]


def test_a_threshold_of_ones_own_counts_for_several_levels() -> None:
    class Widest(ffcp.calibrations.Local):
        def quantile(self, alpha: Any, metadata: Any = None, random: Any = None) -> torch.Tensor:
            return self.scores.amax(dim=0) / float(exact_alpha(alpha))

    localizer = ffcp.kernels.Localizer("nearest", on="input", bandwidth=60)
    predictor = ffcp.IntervalPredictor(small_mlp(), calibration=Widest(localizer)).calibrate(X, Y)
    band = predictor.predict_interval(X, (0.5, 0.25))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(2 * band.width[0], band.width[1], rtol=1e-4, atol=0)
