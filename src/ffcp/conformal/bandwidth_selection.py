"""Selection of the bandwidth, and the smallest bandwidth with finite intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ffcp.conformal.kernels import Kernel
from ffcp.conformal.rank import exact_alpha, rows_needed
from ffcp.description import Described


@dataclass(frozen=True)
class BandwidthTrial(Described):
    """The loss of one bandwidth on the rows set aside."""

    bandwidth: float
    loss: float
    infinite: float


@dataclass(frozen=True)
class BandwidthChoice(Described):
    """Which bandwidth was selected, on how many rows, and the losses of all candidates.

    Attributes
    ----------
    bandwidth : float
        The selected bandwidth.
    trials : tuple of BandwidthTrial
        All that were tried, each with its ``bandwidth``; its ``loss``, the quantile loss of the
        localized quantile of each row, the row itself left out, on the ranks of the scores; and
        ``infinite``, the share of rows with too few others around them.
    rows : int
        How many rows were used. They do not calibrate.
    alpha : float
        The level at which bandwidths were compared.

    Examples
    --------
    >>> import ffcp
    >>> _ = torch.manual_seed(0)
    >>> x = torch.rand(500, 1)
    >>> predictor = ffcp.LCP(torch.nn.Linear(1, 1), "nearest", seed=0)  # yours is trained
    >>> choice = predictor.calibrate(x, x[:, 0] * torch.randn(500)).bandwidth_choice
    >>> print(str(choice).splitlines()[0])  # and a line for every bandwidth tried
    bandwidth 200, chosen on 100 rows at alpha=0.1
    >>> choice.bandwidth in {trial.bandwidth for trial in choice.trials}
    True
    """

    bandwidth: float
    trials: tuple[BandwidthTrial, ...]
    rows: int
    alpha: float

    def __str__(self) -> str:
        lines = [
            f"bandwidth {self.bandwidth:.4g}, chosen on {self.rows} rows at alpha={self.alpha}"
        ]
        lines += [
            f"  {trial.bandwidth:<10.4g} loss {trial.loss:.5f}  infinite {trial.infinite:.1%}"
            for trial in self.trials
        ]
        return "\n".join(lines)


def choose_bandwidth(
    kernel: Kernel, scores: Tensor, embedding: Tensor, alpha: Any, planned: int
) -> BandwidthChoice:
    """Return the bandwidth whose local quantiles fit best, on rows that do not calibrate.

    The localized quantile at every row, from all others, is compared with its score by the
    quantile loss. Scores are replaced by their ranks, so that one huge score does not decide. A
    bandwidth that leaves a row without enough others around it is selected only if all do. The
    largest candidates hardly localize at all, so plain conformal prediction is among them; of
    bandwidths within one standard error of the best, the widest is selected.

    Parameters
    ----------
    kernel : Kernel
        The kernel whose bandwidth it is.
    scores, embedding : Tensor
        Those of the rows set aside: (n, m) and (n, e).
    alpha : float
        Level at which quantiles are compared.
    planned : int
        How many rows will calibrate: with more of them, a neighbourhood may be smaller.

    Examples
    --------
    >>> from ffcp.conformal.kernels import as_kernel
    >>> x = torch.linspace(0, 1, 200)[:, None]
    >>> steps = (x > 0.5).double() + torch.rand(200, 1, generator=torch.manual_seed(0)) / 10
    >>> choose_bandwidth(as_kernel("gaussian"), steps, x, alpha=0.1, planned=1000).bandwidth < 0.2
    True
    """
    n = len(scores)
    if n < 3:
        raise ValueError(
            f"{n} rows are too few to choose a bandwidth: give more rows, or a bandwidth"
        )
    squared = torch.cdist(embedding.double(), embedding.double()).square()
    squared.fill_diagonal_(math.inf)  # leave the row itself out
    level = float(1 - exact_alpha(alpha))
    trials, losses = [], []
    for bandwidth, weights in _candidates(kernel, squared, planned, rows_needed(alpha)):
        judged = [_judge(weights, column, level, planned / n) for column in scores.T]
        loss, infinite = (torch.stack(column).mean(dim=0) for column in zip(*judged, strict=True))
        losses.append(loss)
        trials.append(BandwidthTrial(bandwidth, float(loss.mean()), float(infinite.mean())))
    best = _widest_of_the_best(trials, losses)
    return BandwidthChoice(best.bandwidth, tuple(trials), n, float(exact_alpha(alpha)))


def _widest_of_the_best(trials: list[BandwidthTrial], losses: list[Tensor]) -> BandwidthTrial:
    """Return the widest that is within one standard error of the best.

    A wider neighbourhood has more rows.
    """
    fewest = min(trial.infinite for trial in trials)
    finite = [i for i, trial in enumerate(trials) if trial.infinite == fewest]
    best = losses[min(finite, key=lambda i: trials[i].loss)]
    excess = [losses[i] - best for i in finite]
    errors = [float(e.std()) / math.sqrt(len(e)) for e in excess]
    good = [i for i, e, se in zip(finite, excess, errors, strict=True) if float(e.mean()) <= se]
    return trials[max(good)]


def _candidates(
    kernel: Kernel, squared: Tensor, planned: int, fewest: int
) -> Iterator[tuple[float, Tensor]]:
    """Yield bandwidths, from narrow to hardly local, with their weights."""
    n = len(squared)
    if kernel.is_by_rank:
        places = squared.argsort(dim=1).argsort(dim=1)
        fewest = min(fewest, planned)
        shares = {max(fewest, round(planned * 2.0 ** (-step / 2))) for step in range(13)}
        for neighbours in sorted(k for k in shares if k <= planned):
            yield float(neighbours), (places < math.ceil(neighbours * n / planned)).double()
        return
    finite = squared[squared.isfinite()]
    middle = math.sqrt(float(finite.median())) or math.sqrt(float(finite.mean())) or 1.0
    for step in range(-8, 7):
        bandwidth = middle * 2.0 ** (step / 2)
        yield bandwidth, kernel.log_weight(squared / bandwidth**2).exp_()


def _judge(weights: Tensor, scores: Tensor, level: float, ratio: float) -> tuple[Tensor, Tensor]:
    """Return the quantile loss of every row's local quantile, on ranks, and if it is infinite."""
    n = len(scores)
    order = scores.argsort()
    running = (weights[:, order] * ratio).cumsum(dim=1)
    target = level * (running[:, -1] + 1)
    place = (running < target[:, None]).sum(dim=1)
    infinite = place >= n
    rank = torch.empty(n, dtype=torch.float64)
    rank[order] = (torch.arange(n) + 1.0).double() / n
    miss = rank - (place.clamp_max(n - 1) + 1.0) / n
    return torch.maximum(level * miss, (level - 1) * miss), infinite.double()


def enough_bandwidth(
    points: Tensor, x: Tensor, kernel: Kernel, start: float, needed: float
) -> float:
    """Return the smallest bandwidth with the weight ``needed`` around each of a few rows.

    >>> from ffcp.conformal.kernels import as_kernel
    >>> points, box = torch.arange(10.0)[:, None], as_kernel("box")
    >>> round(enough_bandwidth(points, torch.zeros(1, 1), box, start=0.1, needed=4.0), 2)
    3.0
    """
    squared = torch.cdist(x.double(), points.double()).square()

    def enough(bandwidth: float) -> bool:
        weights = kernel.log_weight(squared / bandwidth**2).exp_()
        return bool((weights.sum(dim=1) >= needed).all())

    low, high = start, start
    while not enough(high):
        low, high = high, 2 * high
        if high > 1e30:
            return math.inf
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
