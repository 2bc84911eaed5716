"""The guarantee, tested as a law over many calibration sets."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp.conformal.rank import conformal_rank
from ffcp.regression.layers import Trial, choose
from tests.conftest import small_mlp
from tests.law import ERROR_RATE, draw_hits, p_value, upper_p_value

pytestmark = pytest.mark.long

N, T, ALPHA, REPEATS = 40, 30, 0.1, 1200


def heteroscedastic(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 4, generator=generator)
    noise = torch.randn(rows, generator=generator)
    return x, x[:, 0] + noise * (0.2 + x[:, 1].abs())


def covered_by(make):
    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        predictor = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ffcp.FFCPWarning)
            predictor.calibrate(x_cal, y_cal)
        covered.used = len(predictor.calibration)
        band = predictor.predict_interval(x, alpha=ALPHA)
        y = y[:, None] if y.dim() < band.lower.dim() else y
        inside = (band.lower <= y) & (y <= band.upper)
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
    hits = draw_hits(heteroscedastic, covered, n=N, t=T, repeats=REPEATS)[:, 0]
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
    hits = draw_hits(three_targets, covered, n=N, t=T, repeats=REPEATS)
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
    hits = draw_hits(pure_noise, chosen_on_calibration(model, names), n=N, t=T, repeats=REPEATS)
    assert p_value(hits, T, N, conformal_rank(N, ALPHA)) < 1e-8
    assert hits.mean() / T < 0.88


def chosen_on_calibration(model: nn.Module, names: list[str]):
    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        _, slacks = ffcp.gradient_norms(model, x_cal, names)
        residuals = y_cal.abs()[:, None].double()
        slacks = {name: slack[:, None].double() for name, slack in slacks.items()}
        slacks["output"] = torch.ones_like(residuals)
        trials = {name: Trial(residuals / slack, 2 * slack) for name, slack in slacks.items()}
        choice = choose(torch.zeros_like(residuals), trials, ALPHA)
        # Without plain CP, which would win and hide the mistake.
        best = min(names, key=lambda name: choice.candidates[name].mean_length)
        predictor = ffcp.FFCP(model, best).calibrate(x_cal, y_cal)
        return predictor.score(x, y) <= predictor.calibration.threshold(ALPHA)

    return covered


def test_the_automatic_choice_keeps_the_law_among_irrelevant_layers() -> None:
    model = ManyIrrelevantGradients(10)
    covered = covered_by(lambda: ffcp.FFCP(model, [f"parts.{j}" for j in range(10)]))
    hits = draw_hits(pure_noise, covered, n=N, t=T, repeats=REPEATS)
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


# -- the quantile family and FCP ---------------------------------------------------------------


def leaky(outputs: int) -> nn.Sequential:
    """A network whose head reaches every number, so that exact inversion always succeeds."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 8), nn.LeakyReLU(0.2),
        nn.Linear(8, outputs),
    )  # fmt: skip


QUANTILE_METHODS = {
    "CQR": lambda: ffcp.CQR(leaky(2)),
    "FFCQR": lambda: ffcp.FFCQR(leaky(2), "0"),
    "FFCQR, layer chosen": lambda: ffcp.FFCQR(leaky(2)),
}


@pytest.mark.parametrize("name", QUANTILE_METHODS)
def test_quantile_methods_follow_the_law(name: str) -> None:
    covered = covered_by(QUANTILE_METHODS[name])
    hits = draw_hits(heteroscedastic, covered, n=N, t=T, repeats=REPEATS)
    used = covered.used
    assert p_value(hits, T, used, conformal_rank(used, ALPHA)) > ERROR_RATE


FEATURE_METHODS = {
    "FCP, IBP": lambda: ffcp.FCP(leaky(1), "0", invert="exact"),
    "FCP, CROWN": lambda: ffcp.FCP(leaky(1), "0", invert="exact", bound="crown"),
    "FCP, CROWN, L2": lambda: ffcp.FCP(leaky(1), "2", invert="exact", bound="crown", norm=2),
    "FCQR, IBP": lambda: ffcp.FCQR(leaky(2), "0", invert="exact"),
    "FCQR, CROWN": lambda: ffcp.FCQR(leaky(2), "0", invert="exact", bound="crown"),
}


@pytest.mark.parametrize("name", FEATURE_METHODS)
def test_exact_inversion_covers_at_least_as_often_as_the_law(name: str) -> None:
    # In feature space the law holds exactly; the output band may only cover more.
    model = FEATURE_METHODS[name]()
    inside_ball = []

    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        model.calibrate(x_cal, y_cal)
        in_feature_space = model.score(x, y) <= model.calibration.threshold(ALPHA)
        inside_ball.append(int(in_feature_space.sum()))
        band = model.predict_interval(x, alpha=ALPHA)
        inside = (band.lower.reshape(-1) <= y) & (y <= band.upper.reshape(-1))
        assert bool((inside >= in_feature_space).all())  # in the ball, so in the band
        return inside

    hits = draw_hits(heteroscedastic, covered, n=N, t=T, repeats=300)
    k = conformal_rank(N, ALPHA)
    assert upper_p_value(hits, T, N, k) > ERROR_RATE
    assert p_value(inside_ball, T, N, k) > ERROR_RATE


def test_an_inversion_stopped_early_falls_short_under_a_tight_bound() -> None:
    # Why the documentation warns: 3 steps of descent do not reach y, the ball is too small, and
    # CROWN does not hide it. In feature space all looks well.
    model = ffcp.FCP(leaky(1), "2", steps=3, lr=0.01, bound="crown")
    inside_ball = []

    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        model.calibrate(x_cal, y_cal)
        inside_ball.append(int((model.score(x, y) <= model.calibration.threshold(ALPHA)).sum()))
        band = model.predict_interval(x, alpha=ALPHA)
        return (band.lower[:, 0] <= y) & (y <= band.upper[:, 0])

    hits = draw_hits(heteroscedastic, covered, n=N, t=T, repeats=300)
    k = conformal_rank(N, ALPHA)
    assert p_value(inside_ball, T, N, k) > ERROR_RATE
    assert upper_p_value(hits, T, N, k) < 1e-12
    assert hits.mean() / T < 0.5


# -- groups and neighbourhoods -----------------------------------------------------------------


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


LOCALIZERS = {
    "gaussian": ffcp.Localizer("gaussian", "input", 1.0),
    "laplace": ffcp.Localizer("laplace", "input", 1.0),
    "box": ffcp.Localizer("box", "input", 2.0),
    "nearest": ffcp.Localizer("nearest", "input", 30),
    "gaussian, chosen bandwidth": ffcp.Localizer("gaussian", "input"),
    "nearest, prediction": ffcp.Localizer("nearest", on="prediction", bandwidth=20),
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
        lambda seed: ffcp.LCP(zero, LOCALIZERS[kernel], guarantee=guarantee, seed=seed), 300
    )
    assert below(shares, 1 - ALPHA) > ERROR_RATE


LOCAL_METHODS = {
    "FFLCP": lambda: ffcp.FFLCP(small_mlp(), "0", LOCALIZERS["nearest"]),
    "FFLCP at the feature": lambda: ffcp.FFLCP(
        small_mlp(), "0", ffcp.Localizer("gaussian", on="feature", bandwidth=2.0)
    ),
    "LCQR": lambda: ffcp.LCQR(leaky(2), LOCALIZERS["nearest"]),
    "FFLCQR": lambda: ffcp.FFLCQR(leaky(2), "0", LOCALIZERS["gaussian"]),
}


@pytest.mark.parametrize("name", LOCAL_METHODS)
def test_localized_methods_cover_at_least_as_often_as_promised(name: str) -> None:
    shares = local_hits(lambda seed: LOCAL_METHODS[name](), 300)
    assert below(shares, 1 - ALPHA) > ERROR_RATE
    assert sum(shares) / len(shares) < 0.96  # and do not buy it with bands of any width


def test_the_plain_localized_quantile_falls_short() -> None:
    # Noise grows outward, where points are rare: the neighbours of an outer point lie inward
    # and are quieter, so their quantile is too small for it.
    zero = nn.Linear(4, 1)
    nn.init.zeros_(zero.weight)
    nn.init.zeros_(zero.bias)
    shares = local_hits(lambda seed: ffcp.LCP(zero, LOCALIZERS["nearest"], guarantee="none"), 300)
    assert below(shares, 1 - ALPHA) < 1e-12
    assert sum(shares) / len(shares) < 0.88
