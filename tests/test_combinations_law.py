"""One law for every combination of base, scale and calibration, pieces of one's own among them.

Each combination is calibrated and asked on many independent draws, and covers at least 1 - alpha.
Where there is one threshold for all points and scores have no ties, coverage also obeys its exact
law. A correct program is rejected at ERROR_RATE for each combination.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import ffcp
from ffcp.kernels import Localizer
from tests.law import ERROR_RATE, p_value

ROWS, ASKED, REPEATS, ALPHA = 49, 20, 80, 0.2


class ThreeQuantiles(nn.Module):
    """A network of three quantiles that are wrong in level, as trained ones are."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layer = nn.Linear(2, 6).requires_grad_(False)
        self.head = nn.Linear(6, 3).requires_grad_(False)
        for parameter in self.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x))) + torch.tensor([-1.0, 0.0, 0.6])


class TwoQuantiles(ThreeQuantiles):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, [0, 2]]


class OnePoint(ThreeQuantiles):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 1:2]


class Shifted:
    """A base of one's own: the prediction, and a quarter above it."""

    def __call__(self, seen: ffcp.BatchOutput, scale: Tensor) -> ffcp.scores.Ends:
        ends = ffcp.scores.Point()(seen, scale)
        return ends._replace(hi=ends.hi + 0.25)

    def prediction(self, output: Tensor) -> Tensor:
        return output


class Spread:
    """A scale of one's own, of the values of a layer."""

    def requires(self) -> ffcp.Requires:
        return ffcp.Requires(values=("layer",))

    def __call__(self, seen: ffcp.BatchOutput) -> Tensor:
        return 0.1 + seen.values["layer"].std(dim=1)


class OneMore(ffcp.calibrations.Marginal):
    """A calibration of one's own: one rank more than needed."""

    def quantile(self, alpha: Any, metadata: Any = None, random: Any = None) -> Tensor:
        rank = ffcp.conformal_rank(len(self), alpha) + 1
        return self.scores[rank - 1] if rank <= len(self) else torch.full((1,), torch.inf)


class Cauchy(ffcp.kernels.Kernel):
    """A kernel of one's own."""

    name = "cauchy"

    def log_weight(self, squared: Tensor) -> Tensor:
        return -torch.log1p(squared)


def side(x: Tensor) -> Tensor:
    return x[:, 1] > 0


BASES: dict[str, tuple[nn.Module, Callable[[], Any]]] = {
    "point": (OnePoint(), ffcp.scores.Point),
    "quantiles": (TwoQuantiles(), ffcp.scores.Quantiles),
    "median": (ThreeQuantiles(), lambda: ffcp.scores.Quantiles(0, 2, median=1)),
    "own base": (OnePoint(), Shifted),
}
SCALES: dict[str, Callable[[], Any]] = {
    "constant": ffcp.scales.Constant,
    "gradient": lambda: ffcp.scales.GradientNorm("layer"),
    "function": lambda: lambda seen: 0.2 + seen.x[:, 0].abs(),
    "own scale": Spread,
}
CALIBRATIONS: dict[str, Callable[[], ffcp.calibrations.Calibration]] = {
    "marginal": ffcp.calibrations.Marginal,
    "mondrian": lambda: ffcp.calibrations.Mondrian(by=side),
    "conditional": lambda: ffcp.calibrations.Conditional(lambda x: x.abs()),
    "nearest": lambda: ffcp.calibrations.Local(Localizer("nearest", on="input", bandwidth=30)),
    "random": lambda: ffcp.calibrations.Local(
        Localizer("box", on="input", bandwidth=2.0), "random"
    ),
    "own kernel": lambda: ffcp.calibrations.Local(Localizer(Cauchy(), on="layer", bandwidth=2.0)),
    "own calibration": OneMore,
    "local groups": lambda: ffcp.calibrations.Mondrian(
        ffcp.calibrations.Local(Localizer("gaussian", on="prediction", bandwidth=2.0)), by=side
    ),
}


def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS + ASKED, 2, generator=generator)
    noise = torch.randn(ROWS + ASKED, generator=generator)
    return x, 0.5 * x[:, 0] + (0.2 + x[:, 0].abs()) * noise


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("calibration", CALIBRATIONS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("base", BASES)
def test_every_combination_of_pieces_obeys_its_law(base: str, scale: str, calibration: str) -> None:
    model, make_base = BASES[base]
    pieces = make_base(), SCALES[scale](), CALIBRATIONS[calibration]()
    predictor = ffcp.IntervalPredictor(
        model, *pieces, seed=5
    )  # of a stream that goes on over all repeats
    generator = torch.Generator().manual_seed(11)
    hits = []
    for _ in range(REPEATS):
        x, y = draw(generator)
        predictor.calibrate(x[:ROWS], y[:ROWS])
        band = predictor.predict_interval(x[ROWS:], ALPHA)
        target = y[ROWS:].view_as(band.lower)
        hits.append(int(((band.lower <= target) & (target <= band.upper)).sum()))
    assert coverage_p_value(np.array(hits)) > ERROR_RATE
    if calibration == "marginal":
        rank = ffcp.conformal_rank(ROWS, ALPHA)
        assert p_value(hits, ASKED, ROWS, rank) > ERROR_RATE


def coverage_p_value(hits: np.ndarray) -> float:
    """P-value against "covers at least 1 - alpha on average": small when coverage is too low."""
    shares = hits / ASKED
    error = max(shares.std(ddof=1), 1e-3) / np.sqrt(len(shares))
    return float(stats.t.cdf((shares.mean() - (1 - ALPHA)) / error, df=len(shares) - 1))


def test_the_test_can_fail() -> None:
    assert coverage_p_value(np.array([14, 15, 13, 14] * 20)) < ERROR_RATE
