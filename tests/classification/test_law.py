"""The guarantee of label sets, tested as a law over many calibration sets."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp import conformal_rank
from tests.core import unrandomised_calibration
from tests.law import ERROR_RATE, draw_hits, p_value, upper_p_value

pytestmark = pytest.mark.heavy

N, T, K, ALPHA, REPEATS = 40, 30, 5, 0.1, 400


def overconfident(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    """Logits, and labels that follow them more loosely than they claim."""
    logits = 2 * torch.randn(rows, K, generator=generator)
    p = (0.6 * logits + torch.randn(rows, K, generator=generator)).softmax(dim=1)
    return logits, torch.multinomial(p, 1, generator=generator)[:, 0]


def saturated(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    """Probabilities of exactly 0 and 1 in most rows, and often wrong: many equal scores."""
    logits, y = overconfident(generator, rows)
    return 200 * logits.round(), y


def covered_by(make):
    """Say which test points are covered; every draw has random numbers of its own."""
    seeds = itertools.count()

    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        set_predictor = make(seed=next(seeds)).calibrate(x_cal, y_cal)
        covered.used = len(set_predictor.calibration)
        return set_predictor.predict_set(x, ALPHA).mask.gather(1, y[:, None])[:, 0]

    return covered


def hits_of(make, sample=overconfident, repeats: int = REPEATS) -> tuple[np.ndarray, int]:
    covered = covered_by(make)
    hits = draw_hits(sample, covered, n=N, t=T, repeats=repeats)
    return hits, covered.used


def linear() -> nn.Sequential:
    """A small network before the logits, for gradients at a feature."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, K), nn.Tanh(), nn.Linear(K, K))


def raps(**settings):
    return ffcp.RAPS(nn.Identity(), lam=0.1, kreg=1, **settings)


def ffraps(**settings):
    return ffcp.FFRAPS(nn.Identity(), delta=0.3, lam=0.1, kreg=1, **settings)


def at_feature(**settings):
    return ffcp.FFRAPS(
        linear(), delta=1.0, lam=0.1, kreg=1, gradient="feature", feature="0", **settings
    )


EXACT = {
    "LAC": lambda **kw: ffcp.LAC(nn.Identity(), **kw),
    "APS": lambda **kw: ffcp.APS(nn.Identity(), **kw),
    "RAPS": raps,
    "FFRAPS": ffraps,
    "FFRAPS at a feature": at_feature,
    "LAC, temperature fitted": lambda **kw: ffcp.LAC(nn.Identity(), temperature="fit", **kw),
    "RAPS tuned by size": lambda **kw: ffcp.RAPS(nn.Identity(), tune="size", **kw),
    "FFRAPS tuned by coverage": lambda **kw: ffcp.FFRAPS(
        nn.Identity(), lam=0.01, tune="coverage", temperature="fit", **kw
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_coverage_follows_the_beta_binomial_law(name: str) -> None:
    hits, used = hits_of(lambda seed: EXACT[name](seed=seed, allow_zero_sets=True))
    assert used == (32 if "tuned" in name or "fitted" in name else N)  # a fifth of the rows tunes
    k = conformal_rank(used, ALPHA)
    assert p_value(hits, T, used, k) > ERROR_RATE
    # The law has its mean between 1 - alpha and 1 - alpha + 1 / (n + 1).
    assert 1 - ALPHA <= k / (used + 1) <= 1 - ALPHA + 1 / (used + 1)
    noise = 4 * hits.std() / math.sqrt(len(hits)) / T
    assert 1 - ALPHA - noise <= hits.mean() / T <= 1 - ALPHA + 1 / (used + 1) + noise


MORE = {
    "APS, not randomised": lambda **kw: ffcp.APS(nn.Identity(), randomized=False, **kw),
    "RAPS, not randomised": lambda **kw: raps(randomized=False, **kw),
    "FFRAPS, not randomised": lambda **kw: ffraps(randomized=False, **kw),
    "FFRAPS at a feature, not randomised": lambda **kw: at_feature(randomized=False, **kw),
    "LAC, never empty": lambda **kw: ffcp.LAC(nn.Identity(), **kw),
    "RAPS, never empty": raps,
}


@pytest.mark.parametrize("name", MORE)
def test_coverage_is_at_least_that_of_the_law(name: str) -> None:
    hits, used = hits_of(MORE[name], repeats=250)
    assert upper_p_value(hits, T, used, conformal_rank(used, ALPHA)) > ERROR_RATE


@pytest.mark.parametrize("name", ["LAC", "APS", "RAPS", "FFRAPS"])
@pytest.mark.parametrize("randomized", [True, False])
def test_equal_scores_only_ever_raise_coverage(name: str, randomized: bool) -> None:
    kind = {} if name == "LAC" else {"randomized": randomized}
    hits, used = hits_of(
        lambda seed: EXACT[name](seed=seed, allow_zero_sets=True, **kind), saturated, 250
    )
    assert upper_p_value(hits, T, used, conformal_rank(used, ALPHA)) > ERROR_RATE


# -- class-conditional -------------------------------------------------------------------------

PER_CLASS, TESTED = 20, 10


def three_classes(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    """Equally many rows of each class, in turn; class 2 is hard to tell."""
    y = torch.arange(rows) % 3
    strength = torch.tensor([3.0, 2.0, 0.2])[y]
    logits = torch.randn(rows, 3, generator=generator)
    return logits + strength[:, None] * nn.functional.one_hot(y, 3), y


CONDITIONAL = {
    "LAC": lambda **kw: ffcp.LAC(nn.Identity(), **kw),
    "APS": lambda **kw: ffcp.APS(nn.Identity(), **kw),
    "RAPS": raps,
    "FFRAPS": ffraps,
}


def hits_by_class(make) -> np.ndarray:
    seeds = itertools.count()

    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        set_predictor = make(seed=next(seeds)).calibrate(x_cal, y_cal)
        mask = set_predictor.predict_set(x, ALPHA).mask.gather(1, y[:, None])
        return mask.view(TESTED, 3)

    return draw_hits(three_classes, covered, n=3 * PER_CLASS, t=3 * TESTED, repeats=REPEATS)


@pytest.mark.parametrize("name", CONDITIONAL)
def test_every_class_follows_the_law_on_its_own(name: str) -> None:
    hits = hits_by_class(
        lambda seed: CONDITIONAL[name](seed=seed, allow_zero_sets=True, class_conditional=True)
    )
    for label in range(3):
        k = conformal_rank(PER_CLASS, ALPHA)
        assert p_value(hits[:, label], TESTED, PER_CLASS, k) > ERROR_RATE


def test_without_classes_the_hard_one_is_covered_too_rarely() -> None:
    # So the test above has something to find.
    hits = hits_by_class(lambda seed: CONDITIONAL["LAC"](seed=seed))
    assert hits[:, 2].mean() / TESTED < 0.85


# -- the test has power ------------------------------------------------------------------------


def test_the_law_test_catches_a_calibration_that_is_not_randomised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unrandomised_calibration(monkeypatch)
    hits, used = hits_of(lambda seed: EXACT["APS"](seed=seed, allow_zero_sets=True))
    assert p_value(hits, T, used, conformal_rank(used, ALPHA)) < 1e-8


def test_the_law_test_catches_a_quantile_without_n_plus_1() -> None:
    wrong = math.ceil(N * (1 - ALPHA))
    assert wrong != conformal_rank(N, ALPHA)

    class Wrong(ffcp.calibrations.Marginal):
        def quantile(self, alpha: Any, metadata: Any = None, random: Any = None) -> Tensor:
            return self.scores[wrong - 1]

    # A shift by one rank of 41 is small: it takes more draws to be this sure of it.
    hits, used = hits_of(
        lambda seed: EXACT["RAPS"](seed=seed, allow_zero_sets=True, calibration=Wrong()),
        repeats=2 * REPEATS,
    )
    assert p_value(hits, T, used, conformal_rank(used, ALPHA)) < 1e-8
