"""The guarantee of localized methods, tested over many calibration sets."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp import conformal_rank
from tests.conftest import small_mlp
from tests.law import ERROR_RATE, draw_hits, upper_p_value
from tests.regression.models import heteroscedastic, leaky

pytestmark = pytest.mark.heavy

T, ALPHA = 30, 0.1

LOCALIZERS = {
    "gaussian": ffcp.kernels.Localizer("gaussian", "input", 1.0),
    "laplace": ffcp.kernels.Localizer("laplace", "input", 1.0),
    "box": ffcp.kernels.Localizer("box", "input", 2.0),
    "nearest": ffcp.kernels.Localizer("nearest", "input", 30),
    "gaussian, chosen bandwidth": ffcp.kernels.Localizer("gaussian", "input"),
    "nearest, prediction": ffcp.kernels.Localizer("nearest", on="prediction", bandwidth=20),
}
LOCAL_N = 80


def local_hits(make, repeats: int) -> list[float]:
    """Share of covered test points for each of many calibration sets."""

    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ffcp.FFCPWarning)  # some bands are infinite
            predictor = make(covered.number).calibrate(x_cal, y_cal)
            band = predictor.predict_interval(x, alpha=ALPHA)
        covered.number += 1  # another seed for every draw
        return (band.lower.reshape(-1) <= y) & (y <= band.upper.reshape(-1))

    covered.number = 0
    hits = draw_hits(heteroscedastic, covered, n=LOCAL_N, t=T, repeats=repeats)
    return (hits / T).tolist()


def below(shares: list[float], level: float) -> float:
    """P-value against "covers at least this often": the normal law of the mean of many draws."""
    values = torch.tensor(shares)
    z = (values.mean() - level) / (values.std() / math.sqrt(len(shares)))
    return float(torch.special.ndtr(z))


# Neighbours are no density to draw from, so they have no random version.
GUARANTEED = [
    (guarantee, kernel)
    for guarantee in ("level", "random")
    for kernel in LOCALIZERS
    if guarantee == "level" or "nearest" not in kernel
]


@pytest.mark.parametrize(("guarantee", "kernel"), GUARANTEED)
def test_localized_bands_cover_at_least_as_often_as_promised(kernel: str, guarantee: str) -> None:
    zero = nn.Linear(4, 1)
    nn.init.zeros_(zero.weight)
    nn.init.zeros_(zero.bias)
    shares = local_hits(
        lambda seed: ffcp.LCP(zero, LOCALIZERS[kernel], guarantee=guarantee, seed=seed), 200
    )
    assert below(shares, 1 - ALPHA) > ERROR_RATE


LOCAL_METHODS = {
    "FFLCP": lambda: ffcp.FFLCP(small_mlp(), "0", LOCALIZERS["nearest"]),
    "FFLCP at the feature": lambda: ffcp.FFLCP(
        small_mlp(), "0", ffcp.kernels.Localizer("gaussian", on="feature", bandwidth=2.0)
    ),
    "LCQR": lambda: ffcp.LCQR(leaky(2), LOCALIZERS["nearest"]),
    "FFLCQR": lambda: ffcp.FFLCQR(leaky(2), "0", LOCALIZERS["gaussian"]),
}


@pytest.mark.parametrize("name", LOCAL_METHODS)
def test_localized_methods_cover_at_least_as_often_as_promised(name: str) -> None:
    shares = local_hits(lambda seed: LOCAL_METHODS[name](), 200)
    assert below(shares, 1 - ALPHA) > ERROR_RATE
    assert sum(shares) / len(shares) < 0.96  # and do not buy it with bands of any width


def test_the_plain_localized_quantile_falls_short() -> None:
    # Noise grows outward, where points are rare: the neighbours of an outer point lie inward
    # and are quieter, so their quantile is too small for it.
    zero = nn.Linear(4, 1)
    nn.init.zeros_(zero.weight)
    nn.init.zeros_(zero.bias)
    shares = local_hits(lambda seed: ffcp.LCP(zero, LOCALIZERS["nearest"], guarantee="none"), 200)
    assert below(shares, 1 - ALPHA) < 1e-12
    assert sum(shares) / len(shares) < 0.88


# -- groups ------------------------------------------------------------------------------------

SIZES = (40, 70)  # points of each group; the noise of the second is larger
NEAR = ffcp.kernels.Localizer("nearest", "input", 30)
GROUPED = {
    "LCP": lambda: ffcp.LCP(small_mlp(), NEAR),
    "LCP, gaussian": lambda: ffcp.LCP(
        small_mlp(), ffcp.kernels.Localizer("gaussian", "input", 2.0)
    ),
    "FFLCP": lambda: ffcp.FFLCP(small_mlp(), "0", NEAR),
    "LCQR": lambda: ffcp.LCQR(leaky(2), NEAR),
}


def two_groups(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    x, y = heteroscedastic(generator, rows)
    group = torch.tensor(([0] * SIZES[0] + [1] * SIZES[1] + [0, 1] * T)[:rows])
    x[:, 3] = group
    return x, y * (1 + 4 * group)


@pytest.mark.parametrize("name", GROUPED)
def test_every_group_is_covered_as_promised(name: str) -> None:
    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        predictor = GROUPED[name]().calibrate(x_cal, y_cal, groups=x_cal[:, 3])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ffcp.FFCPWarning)  # some bands are infinite
            band = predictor.predict_interval(x, alpha=ALPHA, groups=x[:, 3])
        inside = (band.lower.reshape(-1) <= y) & (y <= band.upper.reshape(-1))
        return torch.stack([inside[::2], inside[1::2]], dim=1)

    hits = draw_hits(two_groups, covered, n=sum(SIZES), t=2 * T, repeats=150)
    for group in range(2):
        shares = (hits[:, group] / T).tolist()
        assert below(shares, 1 - ALPHA) > ERROR_RATE
        assert sum(shares) / len(shares) < 0.97  # a group of 40 has room for little more


def test_without_groups_the_louder_one_falls_short() -> None:
    # So the test above has power: one threshold for both covers the quiet group too often.
    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        predictor = ffcp.LCP(small_mlp(), ffcp.kernels.Localizer("nearest", "prediction", 60))
        band = predictor.calibrate(x_cal, y_cal).predict_interval(x, alpha=ALPHA)
        inside = (band.lower.reshape(-1) <= y) & (y <= band.upper.reshape(-1))
        return torch.stack([inside[::2], inside[1::2]], dim=1)

    hits = draw_hits(two_groups, covered, n=sum(SIZES), t=2 * T, repeats=100)
    assert below((hits[:, 1] / T).tolist(), 1 - ALPHA) < 1e-6


# -- several outputs at once -------------------------------------------------------------------


def three_targets(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    x, y = heteroscedastic(generator, rows)
    noise = torch.randn(rows, 3, generator=generator)
    return x, (y[:, None] + noise) * torch.tensor([0.1, 1.0, 10.0])


MANY = ffcp.kernels.Localizer("nearest", "input", 80)
BOXES = {
    "LCP": lambda: ffcp.LCP(small_mlp(outputs=3), MANY, joint="bonferroni"),
    "FFLCP": lambda: ffcp.FFLCP(small_mlp(outputs=3), "0", MANY, joint="bonferroni"),
    "LCP, chosen bandwidth": lambda: ffcp.LCP(
        small_mlp(outputs=3), ffcp.kernels.Localizer("nearest", "input"), joint="bonferroni"
    ),
}


@pytest.mark.parametrize("name", BOXES)
def test_bonferroni_covers_all_outputs_at_once(name: str) -> None:
    n = 120

    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ffcp.FFCPWarning)  # some bands are infinite
            band = BOXES[name]().calibrate(x_cal, y_cal).predict_interval(x, alpha=ALPHA)
        return ((band.lower <= y) & (y <= band.upper)).all(dim=1)

    hits = draw_hits(three_targets, covered, n=n, t=T, repeats=100)
    assert upper_p_value(hits, T, n, conformal_rank(n, ALPHA)) > ERROR_RATE
    assert hits.mean() / T < 0.99


# -- few points, where the exact level matters -------------------------------------------------

FEW = {
    "gaussian": ffcp.kernels.Localizer("gaussian", "input", 0.7),
    "box": ffcp.kernels.Localizer("box", "input", 1.2),
    "nearest": ffcp.kernels.Localizer("nearest", "input", 5),
    "nearest, in a line": ffcp.kernels.Localizer("nearest", lambda x: x[:, 1:2], 6),
}


@pytest.mark.parametrize("kernel", FEW)
def test_few_points_cover_as_often_as_promised(kernel: str) -> None:
    """Twenty-four calibration points, alpha = 0.2: shares of few neighbours, many of them ties.

    A right program fails for a share ERROR_RATE of all seeds.
    """
    zero = nn.Linear(4, 1)
    nn.init.zeros_(zero.weight)
    nn.init.zeros_(zero.bias)

    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ffcp.FFCPWarning)  # some bands are infinite
            band = ffcp.LCP(zero, FEW[kernel]).calibrate(x_cal, y_cal).predict_interval(x, 0.2)
            if not covered.number % 50:
                for row in range(3):  # the same alone as among others
                    alone = ffcp.LCP(zero, FEW[kernel]).calibrate(x_cal, y_cal)
                    one = alone.predict_interval(x[row : row + 1], 0.2)
                    assert torch.equal(one.upper, band.upper[row : row + 1])
        covered.number += 1
        return band.contains(y)

    covered.number = 0
    shares = (draw_hits(heteroscedastic, covered, n=24, t=T, repeats=160) / T).tolist()
    assert below(shares, 0.8) > ERROR_RATE
