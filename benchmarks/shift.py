"""Coverage under covariate and label shift, with and without weights: python -m benchmarks.shift.

Errors grow with the input, and new inputs are shifted by one standard deviation. 200 calibration
sets of 400 rows; learned density ratios use 300 new inputs and a fifth of the calibration rows.
Label shift: 2,000 calibration rows and as many new inputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import ffcp

ALPHA, ROWS, ASKED, REPEATS, SHIFT = 0.1, 400, 200, 200, 1.0
SHARES, RATIO = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([2 / 7, 1.0, 6.0])


class Softplus(nn.Module):
    """A network whose slope is correlated with its errors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.softplus(self.layer(x))


class Classifier(nn.Module):
    """Logits of three classes that are correct for the calibration's class shares."""

    def forward(self, x: Tensor) -> Tensor:
        return SHARES.log() - 0.5 * (x - 1.5 * torch.arange(3)).square()


def draw(generator: torch.Generator, rows: int, shift: float) -> tuple[Tensor, Tensor]:
    x = shift + torch.randn(rows, 1, generator=generator)
    return x, x[:, 0].exp() * torch.randn(rows, generator=generator)


def true_ratio(x: Tensor) -> Tensor:
    return (SHIFT * x[:, 0]).exp()


def intervals(make: Callable[[], Any], learns: bool) -> tuple[float, float, float, float]:
    """Return coverage, median length, share of infinite intervals and effective sample size."""
    generator, predictor = torch.Generator().manual_seed(0), make()
    hits, lengths, sizes = [], [], []
    for _ in range(REPEATS):
        x, y = draw(generator, ROWS, 0.0)
        new, _ = draw(generator, 300, SHIFT)
        asked, truth = draw(generator, ASKED, SHIFT)
        predictor.calibrate(x, y, new=new if learns else None)
        interval = predictor.predict_interval(asked, ALPHA)
        hits.append(interval.contains(truth).double().mean())
        lengths.append(interval.width)
        size = getattr(predictor.calibration, "effective_size", len(predictor.calibration))
        sizes.append(float(size))
    whole = torch.cat(lengths)
    infinite = float(whole.isinf().double().mean())
    return float(torch.stack(hits).mean()), float(whole.median()), infinite, sum(sizes) / REPEATS


def sets(calibration: Any, learns: bool) -> tuple[float, float]:
    """Return coverage and mean size of prediction sets."""
    generator, predictor = (
        torch.Generator().manual_seed(0),
        ffcp.LAC(Classifier(), calibration=calibration),
    )
    hits, sizes = [], []
    for _ in range(REPEATS):
        x, y = draw_labels(generator, 5 * ROWS, SHARES)
        new, _ = draw_labels(generator, 2000, SHARES * RATIO)
        asked, truth = draw_labels(generator, ASKED, SHARES * RATIO)
        result = predictor.calibrate(x, y, new=new if learns else None).predict_set(asked)
        hits.append(result.mask[torch.arange(ASKED), truth].double().mean())
        sizes.append(result.sizes.double().mean())
    return float(torch.stack(hits).mean()), float(torch.stack(sizes).mean())


def draw_labels(generator: torch.Generator, rows: int, shares: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.multinomial(shares, rows, replacement=True, generator=generator)
    return 1.5 * y[:, None] + torch.randn(rows, 1, generator=generator), y


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ffcp.FFCPWarning)
    model = Softplus()
    ways: dict[str, tuple[Callable[[], Any], bool]] = {
        "CP": (lambda: ffcp.CP(model), False),
        "FFCP": (lambda: ffcp.FFCP(model, "layer"), False),
        "LCP": (lambda: ffcp.LCP(model), False),
        "CP, true ratio": (
            lambda: ffcp.CP(model, calibration=ffcp.calibrations.Weighted(true_ratio)),
            False,
        ),
        "FFCP, true ratio": (
            lambda: ffcp.FFCP(model, "layer", calibration=ffcp.calibrations.Weighted(true_ratio)),
            False,
        ),
        "CP, learned": (
            lambda: ffcp.CP(model, calibration=ffcp.calibrations.Weighted("learn")),
            True,
        ),
        "FFCP, learned": (
            lambda: ffcp.FFCP(model, "layer", calibration=ffcp.calibrations.Weighted("learn")),
            True,
        ),
    }
    print("| covariate shift | coverage | median length | infinite | effective sample size |")
    print("|---|---|---|---|---|")
    for name, (make, learns) in ways.items():
        coverage, length, infinite, size = intervals(make, learns)
        print(f"| {name} | {coverage:.1%} | {length:.3g} | {infinite:.1%} | {size:.0f} |")
    print("\n| label shift | coverage | mean size |\n|---|---|---|")
    kinds: dict[str, tuple[Any, bool]] = {
        "LAC": (None, False),
        "LAC, true ratio": (ffcp.calibrations.LabelShift(RATIO.tolist()), False),
        "LAC, learned": (ffcp.calibrations.LabelShift(), True),
    }
    for name, (calibration, learns) in kinds.items():
        coverage, size = sets(calibration, learns)
        print(f"| {name} | {coverage:.1%} | {size:.2f} |")


if __name__ == "__main__":
    main()
