"""Laws under designed shifts: CP covers too little, weighted calibration at least 1 - alpha.

Coverage is averaged over many independent calibration sets; a correct program is rejected at
ERROR_RATE. That CP fails on the same draws shows that the tests can fail.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import ffcp
from tests.core import few_epochs
from tests.law import ERROR_RATE

ALPHA, ROWS, ASKED, REPEATS = 0.1, 150, 100, 150
SHIFT = 1.0


class Zero(nn.Module):
    """Predicts nothing, at the scale of its input: what is wrong with it grows with x."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.outputs = outputs
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        value = torch.nn.functional.softplus(self.layer(x))
        return value if self.outputs == 1 else torch.cat([-value, value], dim=1)


def draw(generator: torch.Generator, rows: int, shift: float) -> tuple[Tensor, Tensor]:
    x = shift + torch.randn(rows, 1, generator=generator)
    return x, x[:, 0].exp() * torch.randn(rows, generator=generator)


def true_ratio(x: Tensor) -> Tensor:
    return (SHIFT * x[:, 0] - SHIFT**2 / 2).exp()


def coverages(make: object, learns: bool, grouped: bool = False, seed: int = 3) -> np.ndarray:
    generator, shares = torch.Generator().manual_seed(seed), []
    predictor = make()  # type: ignore[operator]
    for _ in range(REPEATS):
        x, y = draw(generator, ROWS * (2 if learns else 1), 0.0)
        new, _ = draw(generator, 200, SHIFT)
        asked, truth = draw(generator, ASKED, SHIFT)
        old_groups = {"groups": (x[:, 0] > 1).tolist()} if grouped else {}
        groups = {"groups": (asked[:, 0] > 1).tolist()} if grouped else {}
        predictor.calibrate(x, y, **({"new": new} if learns else {}), **old_groups)
        band = predictor.predict_interval(asked, ALPHA, **groups)
        inside = (band.lower.flatten() <= truth) & (truth <= band.upper.flatten())
        shares.append(float(inside.double().mean()))
    return np.array(shares)


def too_low(shares: np.ndarray) -> float:
    """P-value against "covers at least 1 - alpha on average"."""
    error = max(shares.std(ddof=1), 1e-3) / np.sqrt(len(shares))
    return float(stats.t.cdf((shares.mean() - (1 - ALPHA)) / error, df=len(shares) - 1))


def flattered() -> tuple[Tensor, Tensor]:
    """Give training rows whose noise does not grow: what they teach does not see the shift."""
    generator = torch.Generator().manual_seed(9)
    return torch.randn(300, 1, generator=generator), torch.randn(300, generator=generator)


METHODS = {
    "CP": lambda c: ffcp.CP(Zero(), calibration=c),
    "FFCP": lambda c: ffcp.FFCP(Zero(), "layer", calibration=c),
    "CQR": lambda c: ffcp.CQR(Zero(2), calibration=c),
    "Learned": lambda c: ffcp.Learned(Zero(), calibration=c, seed=0).fit(*flattered()),
    "Auto": lambda c: ffcp.Auto(Zero(), calibration=c, seed=0).fit(*flattered()),
}


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    "method", ["CP", "FFCP", "CQR", "Learned", pytest.param("Auto", marks=pytest.mark.slow)]
)
def test_the_true_ratio_covers_where_equal_weights_do_not(
    method: str, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_epochs(monkeypatch)  # coverage does not depend on how much is learned
    make = METHODS[method]
    weighted = coverages(lambda: make(ffcp.calibrations.Weighted(true_ratio)), False, grouped)
    assert too_low(weighted) > ERROR_RATE
    if not grouped:
        assert too_low(coverages(lambda: make(None), False)) < ERROR_RATE


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
def test_a_learned_ratio_covers_where_equal_weights_do_not() -> None:
    learned = coverages(
        lambda: ffcp.CP(Zero(), calibration=ffcp.calibrations.Weighted("learn")), True
    )
    assert too_low(learned) > ERROR_RATE
    assert too_low(coverages(lambda: ffcp.CP(Zero()), False)) < ERROR_RATE


CLASSES, RATIO = torch.tensor([0.7, 0.2, 0.1]), [0.2 / 0.7, 1.0, 6.0]


def draw_labels(generator: torch.Generator, rows: int, shares: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.multinomial(shares, rows, replacement=True, generator=generator)
    return 1.5 * y[:, None] + torch.randn(rows, 1, generator=generator), y


class Sorter(nn.Module):
    """Logits of three classes, right for the shares of the calibration."""

    def forward(self, x: Tensor) -> Tensor:
        means = 1.5 * torch.arange(3)
        return CLASSES.log() - 0.5 * (x - means).square()


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("kind", ["true", "learned", "plain"])
@pytest.mark.parametrize("method", [ffcp.LAC, ffcp.APS])
def test_label_shift_is_covered_with_true_and_learned_ratios(method: type, kind: str) -> None:
    generator, shares = torch.Generator().manual_seed(5), []
    new_shares = CLASSES * torch.tensor(RATIO)
    calibration = {
        "true": lambda: ffcp.calibrations.LabelShift(RATIO),
        "learned": ffcp.calibrations.LabelShift,
        "plain": ffcp.calibrations.Marginal,
    }[kind]()
    predictor = method(Sorter(), calibration=calibration, seed=1)
    learns = {"new": 0} if kind == "learned" else {}
    for _ in range(REPEATS):
        x, y = draw_labels(generator, 10 * ROWS, CLASSES)
        asked, truth = draw_labels(generator, ASKED, new_shares)
        if learns:
            learns["new"] = draw_labels(generator, 2000, new_shares)[0]
        found = predictor.calibrate(x, y, **learns).predict_set(asked, ALPHA)
        shares.append(float(found.mask[torch.arange(ASKED), truth].double().mean()))
    low = too_low(np.array(shares))
    assert low < ERROR_RATE if kind == "plain" else low > ERROR_RATE
