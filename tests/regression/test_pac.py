"""PAC coverage, given the calibration rows: the law, exactly."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import ffcp
from ffcp.conformal.rank import pac_rank, rows_needed
from tests.conftest import normal, small_mlp
from tests.law import ERROR_RATE

X, Y = normal(200, 4, seed=0), normal(200, seed=1)


@pytest.mark.parametrize("n", [1, 5, 29, 100, 999, 20_000])
@pytest.mark.parametrize("alpha", [0.5, 0.1, 0.013])
@pytest.mark.parametrize("pac", [0.5, 0.95, 0.999])
def test_the_rank_is_the_smallest_that_is_sure_enough(n: int, alpha: float, pac: float) -> None:
    rank = pac_rank(n, alpha, pac)
    law = stats.binom(n, 1 - alpha)
    assert rank == n + 1 or law.cdf(rank - 1) >= pac - 1e-9
    assert law.cdf(rank - 2) < pac + 1e-9
    assert (rank <= n) == (n >= rows_needed(alpha, pac))


def test_an_exact_tie_is_counted_without_rounding() -> None:
    # P(Binomial(9, 1/2) < 5) is 1/2 and nothing else.
    assert pac_rank(9, 0.5, 0.5) == 5
    assert pac_rank(9, 0.5, Fraction(1, 2) + Fraction(1, 10**40)) == 6
    assert pac_rank(9, 0.5, Fraction(1, 2) - Fraction(1, 10**40)) == 5
    assert pac_rank(2, 0.1, Fraction(19, 100)) == 2  # 1 - 0.9^2, in floats a little less


def shares_covered(predictor: Any, repeats: int, rows: int, by_group: bool = False) -> np.ndarray:
    """Give the true coverage given each of many calibration sets: y is uniform and f is 0."""
    generator = torch.Generator().manual_seed(3)
    shares = []
    for _ in range(repeats):
        x = torch.randint(0, 2, (rows, 1), generator=generator).float()
        y = torch.rand(rows, generator=generator) * 2 - 1
        predictor.calibrate(x, y)
        bands = [
            predictor.predict_interval(torch.full((1, 1), g), 0.1, pac=0.9) for g in (0.0, 1.0)
        ]
        lengths = [float(band.upper.clamp_max(1) - band.lower.clamp_min(-1)) / 2 for band in bands]
        shares.append(min(lengths) if by_group else lengths[0])
    return np.array(shares)


def zero() -> nn.Module:
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


@pytest.mark.heavy
@pytest.mark.parametrize("side", ["both", "upper", "each"])
def test_the_coverage_is_enough_for_as_many_calibration_sets_as_promised(side: str) -> None:
    repeats = 300
    shares = shares_covered(ffcp.CP(zero(), side=side), repeats, rows=79)
    good = int((shares >= 0.9 - 1e-6).sum())
    assert stats.binomtest(good, repeats, 0.9, alternative="less").pvalue > ERROR_RATE
    if side != "each":  # and no surer than the rank makes it
        rank = pac_rank(79, 0.1, 0.9)
        exact = float(stats.beta.sf(0.9, rank, 80 - rank))
        assert stats.binomtest(good, repeats, exact).pvalue > ERROR_RATE
        assert stats.kstest(shares, stats.beta(rank, 80 - rank).cdf).pvalue > ERROR_RATE


@pytest.mark.heavy
def test_every_group_is_covered_with_its_own_confidence() -> None:
    groups = ffcp.IntervalPredictor(
        zero(), calibration=ffcp.calibrations.Mondrian(by=lambda x: x[:, 0].long())
    )
    shares = shares_covered(groups, 200, rows=140)
    good = int((shares >= 0.9 - 1e-6).sum())
    assert stats.binomtest(good, 200, 0.9, alternative="less").pvalue > ERROR_RATE


def test_a_surer_band_is_wider_and_levels_stay_nested() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y)
    plain = predictor.predict_interval(X, (0.1, 0.2))
    sure, surer = (predictor.predict_interval(X, (0.1, 0.2), pac=c) for c in (0.9, 0.999))
    assert (plain.width < sure.width).all()
    assert (sure.width < surer.width).all()
    assert (sure.width[0] > sure.width[1]).all()


def test_bonferroni_shares_out_the_doubt() -> None:
    y = normal(200, 3, seed=2)
    each = ffcp.CP(small_mlp(outputs=3)).calibrate(X, y)
    box = ffcp.CP(small_mlp(outputs=3), joint="bonferroni").calibrate(X, y)
    alpha, sure = Fraction(3, 10), Fraction(97, 100)
    wanted = each.predict_interval(X, alpha / 3, pac=1 - (1 - sure) / 3)
    assert torch.equal(box.predict_interval(X, alpha, pac=sure).upper, wanted.upper)


def test_too_few_points_say_how_many_would_do() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X[:28], Y[:28])
    with pytest.warns(ffcp.FFCPWarning, match=r"\b29\b"):
        assert predictor.predict_interval(X, pac=0.95).upper.isinf().all()
    by_group = ffcp.CP(small_mlp()).calibrate(X[:40], Y[:40], groups=[0] * 20 + [1] * 20)
    with pytest.warns(ffcp.FFCPWarning, match=r"\b29\b"):
        by_group.predict_interval(X[:3], pac=0.95, groups=[0, 0, 1])


def test_others_refuse() -> None:
    near = ffcp.LCP(small_mlp(), ffcp.kernels.Localizer("nearest", on="input", bandwidth=60))
    with pytest.raises(ValueError, match="Local"):
        near.calibrate(X, Y).predict_interval(X, pac=0.95)
    for wrong in (0, 1, 1.5, "much"):
        with pytest.raises((ValueError, TypeError), match="pac"):
            ffcp.CP(small_mlp()).calibrate(X, Y).predict_interval(X, pac=wrong)
