"""Tuning of temperature, kreg, lam and delta on rows that are not used for calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ffcp.classification.rules import Cumulative, LabelRows, Place, blocks, largest, places
from ffcp.conformal.rank import exact_alpha, plain_quantile
from ffcp.description import Described
from ffcp.metrics.sets import stratified_violation

SIZE = "size"
COVERAGE = "coverage"

# The grids of RAPS for small sets and for equal coverage in all strata of set sizes.
LAMS: Mapping[str, tuple[float, ...]] = {
    SIZE: (0.001, 0.01, 0.1, 0.2, 0.5),
    COVERAGE: (0.0, 1e-5, 1e-4, 8e-4, 9e-4, 1e-3, 1.5e-3, 2e-3),
}
# The range of the published code; 0 is plain RAPS.
DELTAS = (0.0, 1e-5, 1e-4, 1e-3, 0.005, 0.01, 0.025, 0.05, 0.075)

_COOLEST, _HOTTEST = 0.05, 20.0  # temperatures outside fit only degenerate data


@dataclass(frozen=True)
class SetCandidate(Described):
    """One combination of settings, with its results on the rows set aside for tuning.

    Attributes
    ----------
    kreg : int
    lam, delta : float
        The settings, as in :class:`ffcp.FFRAPS`; ``delta`` is 0 for RAPS.
    mean_size : float
        Mean number of labels in its sets.
    violation : float
        Size-stratified coverage violation: the largest distance of the coverage of sets of some
        size from 1 - alpha.

    Examples
    --------
    >>> print(SetCandidate(kreg=2, lam=0.1, delta=0.0, mean_size=3.25, violation=0.04))
      kreg 2    lam 0.1      delta 0        mean size 3.25      violation 0.040
    """

    kreg: int
    lam: float
    delta: float
    mean_size: float
    violation: float

    def __str__(self) -> str:
        return (
            f"  kreg {self.kreg:<4} lam {self.lam:<8g} delta {self.delta:<8g} "
            f"mean size {self.mean_size:<9.4g} violation {self.violation:.3f}"
        )


@dataclass(frozen=True)
class SetChoice(Described):
    """The selected settings of a label score, and the results of all candidates.

    Attributes
    ----------
    temperature : float
    kreg : int or None
    lam, delta : float or None
        The settings in use, given or tuned; ``None`` for those that the method does not have.
    rows : int
        How many rows were set aside for tuning and not calibrated on.
    alpha : float
        The level at which candidates were compared.
    criterion : str or None
        ``"size"``, ``"coverage"``, or ``None`` if only the temperature was fitted.
    candidates : tuple of SetCandidate
        All combinations tried, each with its mean set size and its size-stratified coverage
        violation.

    Examples
    --------
    >>> import ffcp
    >>> _ = torch.manual_seed(0)
    >>> model, x = torch.nn.Linear(4, 9), 3 * torch.randn(500, 4)  # yours is trained
    >>> y = model(x).softmax(dim=1).multinomial(1)[:, 0]
    >>> choice = ffcp.RAPS(model, tune="size", seed=0).calibrate(x, y).choice
    >>> print(str(choice).splitlines()[0])  # and a line for every candidate, the best first
    temperature 1, kreg 6, lam 0.01, delta 0, chosen on 100 rows by size at alpha=0.1
    >>> len(choice.candidates)  # values of lam
    5
    """

    temperature: float
    kreg: int | None
    lam: float | None
    delta: float | None
    rows: int
    alpha: float
    criterion: str | None
    candidates: tuple[SetCandidate, ...]

    def __str__(self) -> str:
        head = f"temperature {self.temperature:.4g}"
        for name, value in (("kreg", self.kreg), ("lam", self.lam), ("delta", self.delta)):
            if value is not None:
                head += f", {name} {value:g}"
        head += f", chosen on {self.rows} rows"
        if self.criterion:
            head += f" by {self.criterion} at alpha={self.alpha:g}"
        ranked = sorted(self.candidates, key=lambda candidate: _cost(candidate, self.criterion))
        return "\n".join([head, *map(str, ranked)])


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature that minimises the negative log-likelihood, from 0.05 to 20.

    The likelihood is concave in the inverse temperature, so Newton's iteration, kept inside
    the interval known to hold the optimum, finds it.

    >>> logits = torch.tensor([[2.0, 0.0]]).repeat(4, 1)
    >>> round(fit_temperature(logits, torch.tensor([0, 0, 0, 1])), 4)  # 2 / log(3)
    1.8205
    """
    low, high = 1 / _HOTTEST, 1 / _COOLEST
    inverse = 1.0
    for _ in range(100):
        slope, curvature = _slope(logits, labels, inverse)
        if slope > 0:
            high = inverse
        elif slope < 0:
            low = inverse
        else:
            break
        step = inverse - slope / curvature if curvature > 0 else math.nan
        # In the middle by ratio: the interval spans orders of magnitude.
        new = step if low < step < high else math.sqrt(low * high)
        if abs(new - inverse) <= 1e-9 * inverse:
            break
        inverse = new
    return 1 / inverse


def _slope(logits: Tensor, labels: Tensor, inverse: float) -> tuple[float, float]:
    """Return two derivatives of the negative log-likelihood in the inverse temperature."""
    slope = curvature = 0.0
    for block in blocks(*logits.shape):
        values = logits[block].double()
        # Relative to the true label's logit: shifting a row changes no probability.
        values = values - values.gather(1, labels[block][:, None])
        p = (values * inverse).softmax(dim=1)
        mean = (p * values).sum(dim=1, keepdim=True)
        slope += float(mean.sum())
        curvature += float((p * (values - mean).square()).sum())
    return slope / len(labels), curvature / len(labels)


def tune(
    rows: LabelRows,
    labels: Tensor,
    score: Cumulative,
    *,
    kreg: int | None,
    lams: Sequence[float],
    deltas: Sequence[float],
    criterion: str,
    alpha: Any,
    allow_empty: bool,
    randomized: bool,
) -> SetChoice:
    """Return the combination with the smallest cost, the first of equal ones.

    Parameters
    ----------
    rows : LabelRows
        The rows set aside for tuning.
    labels : Tensor
        Their labels.
    score : Cumulative
        The settings that are not tuned: temperature and kind of gradient.
    kreg : int or None
        ``None`` takes the 1 - alpha quantile of the true label's rank.
    lams, deltas : sequence of float
        The values to combine.
    criterion : str
        ``"size"``, the mean set size, or ``"coverage"``, the size-stratified violation.
    alpha : float
        The level at which the combinations are compared.
    allow_empty : bool
        Whether sets may be empty.
    randomized : bool
        If ``False``, sets contain the label that crosses the threshold.
    """
    if kreg is None:
        ranks = _all_places(rows, labels, replace(score, delta=deltas[0])).rank
        kreg = int(plain_quantile(ranks[:, None], alpha))
    candidates: list[SetCandidate] = []
    for delta in deltas:
        rule = replace(score, kreg=kreg, delta=delta)
        candidates += _try_lams(rows, labels, rule, lams, alpha, allow_empty, randomized)
    best = min(candidates, key=lambda candidate: _cost(candidate, criterion))
    return SetChoice(
        score.temperature, kreg, best.lam, best.delta, len(labels), float(exact_alpha(alpha)),
        criterion, tuple(candidates),
    )  # fmt: skip


def _cost(candidate: SetCandidate, criterion: str | None) -> float:
    return candidate.violation if criterion == COVERAGE else candidate.mean_size


def _all_places(rows: LabelRows, labels: Tensor, score: Cumulative) -> Place:
    """Return the place of the label of each row."""
    parts = [
        places(score.weights(rows.logits[block]), rows.logits[block], labels[block])
        for block in blocks(*rows.logits.shape)
    ]
    return Place(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _try_lams(
    rows: LabelRows,
    labels: Tensor,
    score: Cumulative,
    lams: Sequence[float],
    alpha: Any,
    allow_empty: bool,
    randomized: bool,
) -> list[SetCandidate]:
    """Return a candidate for each value of lam; they share the weights and their order."""
    place = _all_places(rows, labels, score)
    rules = [replace(score, lam=lam) for lam in lams]
    scores = torch.stack([rule.at(place, rows) for rule in rules], dim=1)
    thresholds = plain_quantile(scores, alpha)
    if not randomized:  # as prediction does: see RuleScore
        rows = rows._replace(share=torch.zeros_like(rows.share))
    sizes = torch.empty(len(lams), len(labels), dtype=torch.int64, device=labels.device)
    for block in blocks(*rows.logits.shape):
        block_rows = rows.take(block)
        ordered = largest(score.weights(block_rows.logits), block_rows.logits.shape[1])
        for i, rule in enumerate(rules):
            sizes[i, block] = rule.sizes(ordered, block_rows, thresholds[i])
    candidates = []
    for i, rule in enumerate(rules):
        size, hits = sizes[i], rule.at(place, rows) <= thresholds[i]
        if not allow_empty:
            size, hits = size.clamp_min(1), hits | (place.rank == 1)
        violation = stratified_violation(size.cpu(), hits.cpu(), alpha)
        mean = float(size.double().mean())
        candidates.append(SetCandidate(rule.kreg, rule.lam, rule.delta, mean, violation))
    return candidates
