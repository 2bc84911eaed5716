"""The guarantee, tested as a law over many calibration sets."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp import conformal_rank
from ffcp.regression.layer_selection import Trial, choose
from tests.conftest import small_mlp
from tests.core import threshold
from tests.law import ERROR_RATE, draw_hits, p_value
from tests.regression.models import heteroscedastic, leaky

pytestmark = pytest.mark.heavy

N, T, ALPHA, REPEATS = 40, 30, 0.1, 1000
FEWER = 400  # where a draw takes its time


def covered_by(make):
    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        predictor = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ffcp.FFCPWarning)
            predictor.calibrate(x_cal, y_cal)
        covered.used = len(predictor.calibration)
        band = predictor.predict_interval(x, alpha=ALPHA)
        inside = band.contains(y)
        return inside.all(dim=1) if predictor.joint else inside

    return covered


METHODS = {
    "CP": lambda: ffcp.CP(small_mlp()),
    "FFCP at the input": lambda: ffcp.FFCP(small_mlp(), "input"),
    "FFCP at layer 1": lambda: ffcp.FFCP(small_mlp(), "0"),
    "FFCP at layer 2": lambda: ffcp.FFCP(small_mlp(), "3"),
    "FFCP at the output": lambda: ffcp.FFCP(small_mlp(), "output"),
    "FFCP, norm 1": lambda: ffcp.FFCP(small_mlp(), "0", norm=1),
    "FFCP, norm inf": lambda: ffcp.FFCP(small_mlp(), "0", norm=math.inf),
    "FFCP, layer chosen": lambda: ffcp.FFCP(small_mlp()),
}


@pytest.mark.parametrize("name", METHODS)
def test_coverage_follows_the_beta_binomial_law(name: str) -> None:
    covered = covered_by(METHODS[name])
    repeats = FEWER if "chosen" in name else REPEATS
    hits = draw_hits(heteroscedastic, covered, n=N, t=T, repeats=repeats)
    used = covered.used
    assert used == (32 if "chosen" in name else N)  # a fifth of the rows chooses
    assert p_value(hits, T, used, conformal_rank(used, ALPHA)) > ERROR_RATE


def three_targets(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 4, generator=generator)
    noise = torch.randn(rows, 3, generator=generator) + torch.randn(rows, 1, generator=generator)
    return x, noise * torch.tensor([0.1, 1.0, 10.0])


@pytest.mark.parametrize("joint", [False, True])
def test_the_law_holds_for_several_outputs_when_the_layer_is_chosen(joint: bool) -> None:
    covered = covered_by(lambda: ffcp.FFCP(small_mlp(outputs=3), joint=joint))
    hits = draw_hits(three_targets, covered, n=N, t=T, repeats=FEWER)
    used = covered.used
    for output in range(1 if joint else 3):
        counts = hits if joint else hits[:, output]
        assert p_value(counts, T, used, conformal_rank(used, ALPHA)) > ERROR_RATE


# -- the test has power ------------------------------------------------------------------------


def test_the_law_test_catches_a_quantile_without_n_plus_1() -> None:
    model = small_mlp()
    assert math.ceil(N * (1 - ALPHA)) != conformal_rank(N, ALPHA)

    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        predictor = ffcp.CP(model).calibrate(x_cal, y_cal)
        wrong = predictor.calibration.scores[math.ceil(N * (1 - ALPHA)) - 1]
        return predictor.score(x, y)[:, None] <= wrong

    hits = draw_hits(heteroscedastic, covered, n=N, t=T, repeats=REPEATS)[:, 0]
    assert p_value(hits, T, N, conformal_rank(N, ALPHA)) < 1e-8


class ManyIrrelevantGradients(nn.Module):
    """Predicts 0; its gradient at feature j is exp(x_j), which says nothing of the noise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, 1) for _ in range(width))
        for part in self.parts:
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)

    def forward(self, x: Tensor) -> Tensor:
        values = torch.cat([part(x) for part in self.parts], dim=1)
        return (values * x.exp()).sum(dim=1)


def pure_noise(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 10, generator=generator), torch.randn(rows, generator=generator)


def test_the_law_test_catches_a_layer_chosen_on_the_calibration_points() -> None:
    # Theory: the shortest band of ten is short because its quantile came out low by luck.
    model = ManyIrrelevantGradients(10)
    names = [f"parts.{j}" for j in range(10)]
    hits = draw_hits(pure_noise, chosen_on_calibration(model, names), n=N, t=T, repeats=FEWER)
    assert p_value(hits, T, N, conformal_rank(N, ALPHA)) < 1e-8
    assert hits.mean() / T < 0.88


def chosen_on_calibration(model: nn.Module, names: list[str]):
    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        _, scales = ffcp.gradient_norms(model, x_cal, names)
        residuals = y_cal.abs()[:, None].double()
        scales = {name: scale[:, None].double() for name, scale in scales.items()}
        scales["output"] = torch.ones_like(residuals)
        trials = {name: Trial(residuals / scale, 2 * scale) for name, scale in scales.items()}
        choice = choose(torch.zeros_like(residuals), trials, ALPHA)
        # Without plain CP, which would win and hide the mistake.
        best = min(names, key=lambda name: choice.candidates[name].mean_length)
        predictor = ffcp.FFCP(model, best).calibrate(x_cal, y_cal)
        return predictor.score(x, y) <= threshold(predictor.calibration, ALPHA)

    return covered


def test_the_automatic_choice_keeps_the_law_among_irrelevant_layers() -> None:
    model = ManyIrrelevantGradients(10)
    covered = covered_by(lambda: ffcp.FFCP(model, [f"parts.{j}" for j in range(10)]))
    hits = draw_hits(pure_noise, covered, n=N, t=T, repeats=FEWER)
    assert p_value(hits, T, covered.used, conformal_rank(covered.used, ALPHA)) > ERROR_RATE


def test_ties_only_ever_raise_coverage() -> None:
    # Integer targets and a constant prediction: many equal scores.
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.bias, 0.3)

    def counts(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 1, generator=generator), torch.randint(
            0, 5, (rows,), generator=generator
        )

    covered = covered_by(lambda: ffcp.FFCP(model, "input", floor=0.7))
    hits = draw_hits(counts, covered, n=N, t=T, repeats=400)
    assert hits.mean() / T >= 1 - ALPHA


# -- the quantile family -----------------------------------------------------------------------


QUANTILE_METHODS = {
    "CQR": lambda: ffcp.CQR(leaky(2)),
    "FFCQR": lambda: ffcp.FFCQR(leaky(2), "0"),
    "FFCQR, layer chosen": lambda: ffcp.FFCQR(leaky(2)),
}


@pytest.mark.parametrize("name", QUANTILE_METHODS)
def test_quantile_methods_follow_the_law(name: str) -> None:
    covered = covered_by(QUANTILE_METHODS[name])
    hits = draw_hits(heteroscedastic, covered, n=N, t=T, repeats=FEWER)
    used = covered.used
    assert p_value(hits, T, used, conformal_rank(used, ALPHA)) > ERROR_RATE


# -- groups ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["CP", "FFCP", "CQR", "FFCQR"])
def test_every_group_follows_the_law_of_its_own_points(name: str) -> None:
    make = {
        "CP": lambda: ffcp.CP(small_mlp()),
        "FFCP": lambda: ffcp.FFCP(small_mlp(), "0"),
        "CQR": lambda: ffcp.CQR(leaky(2)),
        "FFCQR": lambda: ffcp.FFCQR(leaky(2), "0"),
    }[name]
    small, large = 25, 55  # points of each group; the noise of the second is larger

    def sample(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        x, y = heteroscedastic(generator, rows)
        group = torch.tensor(([0] * small + [1] * large + [0, 1] * T)[:rows])
        x[:, 3] = group
        return x, y * (1 + 4 * group)

    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        predictor = make().calibrate(x_cal, y_cal, groups=x_cal[:, 3])
        band = predictor.predict_interval(x, alpha=ALPHA, groups=x[:, 3])
        inside = (band.lower.reshape(-1) <= y) & (y <= band.upper.reshape(-1))
        return torch.stack([inside[::2], inside[1::2]], dim=1)

    hits = draw_hits(sample, covered, n=small + large, t=2 * T, repeats=500)
    for group, points in enumerate((small, large)):
        k = conformal_rank(points, ALPHA)
        assert p_value(hits[:, group], T, points, k) > ERROR_RATE
