"""Distributions of the target: their law, an oracle, files, and who has none."""

from __future__ import annotations

import copy
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import ffcp
from tests.conftest import normal, small_mlp
from tests.law import ERROR_RATE
from tests.regression.test_sides import skewed
from tests.test_combinations_law import OnePoint

X, Y = normal(200, 4, seed=0), normal(200, seed=1)
METHODS: dict[str, Any] = {
    "CP": lambda **o: ffcp.CP(OnePoint(), **o),
    "FFCP": lambda **o: ffcp.FFCP(OnePoint(), "layer", **o),
    "function": lambda **o: ffcp.IntervalPredictor(
        OnePoint(), scale=lambda s: 0.2 + s.x[:, 0].abs(), **o
    ),
    "groups": lambda **o: ffcp.IntervalPredictor(
        OnePoint(), calibration=ffcp.calibrations.Mondrian(by=lambda x: x[:, 0] > 0), **o
    ),
}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "side"),
    [*((name, "both") for name in METHODS), ("CP", "lower"), ("FFCP", "upper"), ("CP", "each")],
)
def test_p_values_are_uniform(name: str, side: str) -> None:
    predictor = METHODS[name](seed=3, side=side)
    generator, values = torch.Generator().manual_seed(5), []
    for repeat in range(120):
        x, y = skewed(generator, 24)
        y = (4 * y).round() / 4 if repeat % 2 else y  # ties too
        predictor.calibrate(x[:19], y[:19])
        # One row at a time: each has its own calibration.
        values.append(float(predictor.predict_distribution(x[19:20]).p_value(y[19:20])))
    assert stats.kstest(values, "uniform").pvalue > ERROR_RATE
    assert stats.kstest(np.square(values), "uniform").pvalue < ERROR_RATE  # the test can fail


# Made by crepes 0.9.1, with RESIDUALS, Y_HAT and TRUE as below:
#   cps = crepes.ConformalPredictiveSystem().fit(RESIDUALS)
#   [cps.evaluate(Y_HAT[k:k+1], TRUE[k:k+1], metrics=["CRPS"])["CRPS"] for k in range(6)]
#   cps.predict_p(Y_HAT, TRUE, smoothing=False)
#   cps.predict_percentiles(Y_HAT[:2], lower_percentiles=[5, 25], higher_percentiles=[75, 95])
_RNG = np.random.default_rng(0)
RESIDUALS, Y_HAT = _RNG.gumbel(size=50).round(6), _RNG.normal(size=6).round(6)
TRUE = (Y_HAT + _RNG.gumbel(size=6)).round(6)
CREPES_CRPS = [0.3117738016, 0.4630514816, 0.6699726016, 1.8350660016, 0.3427965216, 0.7778506416]
CREPES_P = [0.60784314, 0.25490196, 0.80392157, 0.90196078, 0.62745098, 0.82352941]
CREPES_PERCENTILES = [
    [-1.017522, -0.160278, 1.389465, 4.45178],
    [-2.583221, -1.725977, -0.176234, 2.886081],
]


def oracle() -> ffcp.regression.distribution.Distribution:
    predictor = ffcp.CP(ffcp.Stored()).calibrate(np.zeros(50), RESIDUALS)
    return predictor.predict_distribution(Y_HAT)


def test_it_agrees_with_crepes_where_sigma_is_one() -> None:
    found = oracle()
    np.testing.assert_allclose(found.crps(TRUE).flatten(), CREPES_CRPS, rtol=1e-9)
    p = found.p_value(TRUE).flatten().numpy()
    assert (p <= np.array(CREPES_P) + 1e-8).all()  # the upper end of the gap
    assert (p >= np.array(CREPES_P) - 1 / 51 - 1e-8).all()
    quantiles = found.quantile((0.05, 0.25, 0.75, 0.95))[:, :2].numpy()
    np.testing.assert_allclose(quantiles.reshape(4, 2).T, CREPES_PERCENTILES, atol=2e-6)


def test_crps_is_the_integral_it_stands_for() -> None:
    found = oracle()
    grid = np.linspace(-15, 15, 60_001)
    atoms = np.sort(RESIDUALS) + Y_HAT[2]
    steps = np.searchsorted(atoms, grid, side="right") / 50
    squares = torch.from_numpy((steps - (grid >= TRUE[2])) ** 2)
    integral = float(torch.trapezoid(squares, torch.from_numpy(grid)))
    assert float(found.crps(TRUE).flatten()[2]) == pytest.approx(integral, abs=1e-3)


def test_quantiles_are_the_ends_of_bands_of_each_side() -> None:
    predictor = METHODS["function"](side="each")
    x, y = skewed(torch.Generator().manual_seed(1), 300)
    predictor.calibrate(x, y)
    band = predictor.predict_interval(x, (0.1, 0.5))
    found = predictor.predict_distribution(x).quantile((0.05, 0.25, 0.75, 0.95))
    torch.testing.assert_close(found[:2], band.lower)
    torch.testing.assert_close(found[2:].flip(0), band.upper)
    assert predictor.predict_distribution(x).quantile(0.5).shape == band.prediction.shape


def test_what_is_kept_of_both_sides_and_of_each_says_the_same() -> None:
    x, y = skewed(torch.Generator().manual_seed(1), 300)
    found = [
        METHODS["FFCP"](side=side).calibrate(x, y).predict_distribution(x, first_row=0)
        for side in ("both", "lower", "upper", "each")
    ]
    for other in found[1:]:
        torch.testing.assert_close(other.quantile((0.1, 0.9)), found[0].quantile((0.1, 0.9)))
        torch.testing.assert_close(other.cdf(y), found[0].cdf(y))
        torch.testing.assert_close(other.p_value(y), found[0].p_value(y))


def test_the_mass_at_each_infinity() -> None:
    predictor = ffcp.CP(OnePoint()).calibrate(*skewed(torch.Generator().manual_seed(1), 19))
    found = predictor.predict_distribution(torch.zeros(1, 2))
    ends = found.quantile((0.049, 0.05, 0.95, 0.951)).flatten()
    assert ends.isinf().tolist() == [True, False, False, True]
    assert found.cdf(torch.tensor([-1e9])).item() == pytest.approx(0.5 / 20)
    assert found.cdf(torch.tensor([1e9])).item() == pytest.approx(19.5 / 20)
    assert found.sample(500).isfinite().all()


def test_samples_are_the_finite_part() -> None:
    x, y = skewed(torch.Generator().manual_seed(1), 60)
    predictor = ffcp.CP(OnePoint(), seed=1).calibrate(x[:30], y[:30])
    found = predictor.predict_distribution(x[30:33])
    drawn = found.sample(4000)
    assert drawn.shape == (4000, 3)
    signed = (y[:30] - predictor.predict_interval(x[:30]).prediction).sort().values
    errors = drawn[:, 1] - found.prediction[1]
    counts = torch.cdist(errors[:, None], signed[:, None]).argmin(dim=1).bincount()
    assert stats.chisquare(counts.numpy()).pvalue > ERROR_RATE
    assert torch.equal(drawn, found.sample(4000))


def test_a_support_holds_quantiles_and_samples() -> None:
    x, y = skewed(torch.Generator().manual_seed(1), 200)
    y = y.abs()
    free, cut = (
        ffcp.CP(OnePoint(), support=s).calibrate(x, y).predict_distribution(x)
        for s in (None, (0, 9))
    )
    assert torch.equal(cut.quantile((0.1, 0.9)), free.quantile((0.1, 0.9)).clamp(0, 9))
    assert (cut.sample(20) >= 0).all()
    assert (cut.crps(y) <= free.crps(y) + 1e-12).all()
    assert (cut.cdf(torch.full((200,), -0.1)) == 0).all()
    assert (cut.cdf(torch.full((200,), 9.0)) == 1).all()


def test_several_outputs_and_missing_targets() -> None:
    y = normal(200, 3, seed=4)
    y[::3, 1] = torch.nan
    predictor = ffcp.CP(small_mlp(outputs=3), missing=True).calibrate(X, y)
    found = predictor.predict_distribution(X[:7])
    assert found.quantile((0.1, 0.9)).shape == (2, 7, 3)
    alone = ffcp.CP(nn.Sequential(small_mlp(outputs=3), Column(1))).calibrate(
        X[~y[:, 1].isnan()], y[~y[:, 1].isnan(), 1]
    )
    other = alone.predict_distribution(X[:7])
    torch.testing.assert_close(found.quantile(0.3)[:, 1], other.quantile(0.3))
    torch.testing.assert_close(found.cdf(torch.zeros(7, 3))[:, 1], other.cdf(torch.zeros(7)))
    assert found.cdf(torch.zeros(5, 7, 3)).shape == (5, 7, 3)


class Column(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, [self.place]]


@pytest.mark.parametrize("groups", [False, True])
def test_signs_are_saved_and_merged(groups: bool, tmp_path: Path) -> None:
    model, labels = small_mlp(), (X[:, 0] > 0).long()
    parts = [
        ffcp.CP(model).calibrate(X[i::2], Y[i::2], groups=labels[i::2] if groups else None)
        for i in range(2)
    ]
    asked: dict[str, Any] = {"groups": labels[:9] if groups else None, "first_row": 0}
    whole = ffcp.CP(model).calibrate(X, Y, groups=labels if groups else None)
    wanted = whole.predict_distribution(X[:9], **asked)
    merged = copy.deepcopy(parts[0]).merge(parts[1])
    updated = parts[0].calibrate(
        X[1::2], Y[1::2], groups=labels[1::2] if groups else None, update=True
    )
    merged.save(tmp_path / "c.safetensors")
    for again in (merged, updated, ffcp.load(tmp_path / "c.safetensors", model)):
        found = again.predict_distribution(X[:9], **asked)
        assert torch.equal(found.quantile((0.1, 0.8)), wanted.quantile((0.1, 0.8)))
        assert torch.equal(found.p_value(Y[:9]), wanted.p_value(Y[:9]))


def every_quantile(predictor: ffcp.CP, x: torch.Tensor, scores: int) -> torch.Tensor:
    """Return all the signed scores that a distribution knows of, in their order."""
    levels = [Fraction(k, scores + 1) for k in range(1, scores + 1)]
    found = predictor.predict_distribution(x)
    return (found.quantile(levels) - found.prediction)[:, 0]


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
def test_a_selected_scale_keeps_signs() -> None:
    predictor = ffcp.IntervalPredictor(OnePoint(), scale=[lambda seen: 0.2 + seen.x[:, 0].abs()])
    x, y = skewed(torch.Generator().manual_seed(1), 300)
    predictor.calibrate(x, y)
    signed = every_quantile(predictor, x[:1], len(predictor.calibration))
    assert torch.equal(signed, signed.sort().values)
    assert 0.2 < (signed > 0).double().mean() < 0.8


def test_sorting_keeps_every_sign_with_its_score() -> None:
    y = normal(500, 3, seed=1).double()
    y[3, 1], y[5, 2], y[7] = torch.nan, 0.0, -y[8]
    predictor = ffcp.CP(ffcp.Stored(), missing=True).calibrate(torch.zeros_like(y), y)
    for column in range(3):
        known = y[:, column][~y[:, column].isnan()]
        found = every_quantile(predictor, torch.zeros(1, 3).double(), len(known))[:, column]
        assert torch.equal(found, known.sort().values)


def test_who_has_none_says_why() -> None:
    near = ffcp.LCP(small_mlp(), ffcp.kernels.Localizer("nearest", on="input", bandwidth=60))
    cases = {
        "ends": ffcp.CQR(small_mlp(outputs=2)),
        "distance": ffcp.FCP(small_mlp(), "0", steps=2),
        "Local": near,
    }
    for why, predictor in cases.items():
        predictor.calibrate(X, Y)
        with pytest.raises(ValueError, match=why):
            predictor.predict_distribution(X)
    box = ffcp.CP(small_mlp(outputs=3), joint=True).calibrate(X, normal(200, 3, seed=2))
    with pytest.raises(ValueError, match="joint"):
        box.predict_distribution(X)
    with pytest.raises(RuntimeError, match="calibrate"):
        ffcp.CP(small_mlp()).predict_distribution(X)


def test_levels_and_sizes_that_cannot_be_meant_are_named_by_what_they_are() -> None:
    x, y = normal(50, 4, seed=0), normal(50, seed=1)
    found = ffcp.CP(small_mlp()).calibrate(x, y).predict_distribution(x[:3])
    for level in (0, 1, 1.5, (0.5, float("nan"))):
        with pytest.raises(ValueError, match="level"):
            found.quantile(level)
    for size in (0, 1.5, "a", True):
        with pytest.raises(ValueError, match="n="):
            found.sample(size)  # type: ignore[arg-type]
    assert found.sample(np.int64(2)).shape == (2, 3)  # type: ignore[arg-type]
