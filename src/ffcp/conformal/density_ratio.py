"""Density ratios learned from rows: a logistic classifier between old inputs and new ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ffcp.description import Described

_MOST_NUMBERS = 1000  # per row: the classifier solves a system of that size
_ROUNDS, _ENOUGH = 50, 1e-10
_RIDGE = 1.0  # on coefficients of standardised numbers; a constant


@dataclass(frozen=True)
class ShiftChoice(Described):
    """How a density ratio was learned.

    Parameters
    ----------
    rows, new_rows : int
        How many calibration rows were set aside for it, and how many new inputs there were.
    separation : float
        How well the classifier separates them on the training rows: the share of pairs in the
        right order (AUC), 0.5 if not at all. Near 1, hardly any old input resembles the new ones.
    effective_share : float
        The effective sample size of the rows set aside under the learned weights, as a share of
        them: about this share of the calibration rows is left.
    clipped : float
        The share of new inputs whose ratio was clipped.

    Examples
    --------
    >>> import ffcp
    >>> _ = torch.manual_seed(0)
    >>> model, x, new = torch.nn.Linear(2, 1), torch.randn(1000, 2), 0.5 + torch.randn(300, 2)
    >>> predictor = ffcp.CP(model, calibration=ffcp.calibrations.Weighted("learn"), seed=0)
    >>> choice = predictor.calibrate(x, torch.randn(1000), new=new).shift_choice
    >>> choice.rows, choice.new_rows, 0.5 < choice.separation < 0.8
    (200, 300, True)
    """

    rows: int
    new_rows: int
    separation: float
    effective_share: float
    clipped: float


def learned(old: Tensor, new: Tensor, clip: float) -> tuple[tuple[float, ...], ShiftChoice]:
    """Learn the density ratio of new and old inputs by logistic regression.

    Returns the intercept and coefficients of the logarithm of the ratio.

    >>> generator = torch.Generator().manual_seed(0)
    >>> old = torch.randn(4000, 1, generator=generator)
    >>> coefficients, choice = learned(old, 1 + torch.randn(4000, 1, generator=generator), clip=50)
    >>> [round(number, 1) for number in coefficients]  # log of the ratio: x - 1/2
    [-0.5, 1.0]
    """
    if old.shape[1] != new.shape[1]:
        raise ValueError(f"calibration rows have {old.shape[1]} columns, 'new' has {new.shape[1]}")
    if old.shape[1] > _MOST_NUMBERS:
        raise ValueError(
            f"the density ratio would be learned from {old.shape[1]} numbers per "
            f"row, expected at most {_MOST_NUMBERS}: choose a narrower layer, on='...'"
        )
    x = torch.cat([old, new]).double()
    centre, scale = x.mean(dim=0), x.std(dim=0, correction=0)
    scale = torch.where(scale > 0, scale, 1.0)
    design = torch.cat([x.new_ones(len(x), 1), (x - centre) / scale], dim=1)
    label = torch.cat([x.new_zeros(len(old)), x.new_ones(len(new))])
    # Both sides have the same weight, so that odds are density ratios for any numbers of rows.
    side = torch.where(label > 0, len(x) / (2 * len(new)), len(x) / (2 * len(old)))
    slope = _logistic(design, label, side)
    raw = slope[1:] / scale
    coefficients = (float(slope[0] - raw @ centre), *raw.tolist())
    logs = design @ slope
    weights = ratio(old, coefficients, clip)
    limit = math.log(clip)
    return coefficients, ShiftChoice(
        len(old),
        len(new),
        _separation(logs[: len(old)], logs[len(old) :]),
        float(weights.sum() ** 2 / weights.square().sum() / len(old)),
        float((logs[len(old) :].abs() > limit).double().mean()),
    )


def ratio(embedding: Tensor, coefficients: Sequence[float], clip: float) -> Tensor:
    """Return the learned ratio at embedded rows, clipped to [1 / clip, clip]."""
    if embedding.shape[1] != len(coefficients) - 1:
        raise ValueError(
            f"the density ratio was learned on {len(coefficients) - 1} numbers per row, got "
            f"{embedding.shape[1]}"
        )
    slope = torch.tensor(coefficients, dtype=torch.float64)
    limit = math.log(clip)
    # A sum over columns and not a matrix product, whose rounding depends on the batch size.
    logs = (embedding.double() * slope[1:]).sum(dim=1) + slope[0]
    return logs.clamp(-limit, limit).exp()


def _logistic(design: Tensor, label: Tensor, side: Tensor) -> Tensor:
    """Fit a ridge logistic regression by Newton's method with step halving."""
    ridge = torch.full((design.shape[1],), _RIDGE, dtype=design.dtype)
    ridge[0] = 0.0

    def loss(slope: Tensor) -> Tensor:
        logs = design @ slope
        fit = side * (torch.nn.functional.softplus(logs) - label * logs)
        return fit.sum() + 0.5 * (ridge * slope.square()).sum()

    slope = torch.zeros(design.shape[1], dtype=design.dtype)
    for _ in range(_ROUNDS):
        share = (design @ slope).sigmoid()
        gradient = design.T @ (side * (share - label)) + ridge * slope
        curve = (design * (side * share * (1 - share))[:, None]).T @ design + ridge.diag()
        curve[0, 0] += _ENOUGH
        step = torch.linalg.solve(curve, gradient)
        size = 1.0
        while size > _ENOUGH and loss(slope - size * step) > loss(slope):
            size /= 2
        slope = slope - size * step
        if float(step.abs().max()) < _ENOUGH:
            break
    return slope


def _separation(old: Tensor, new: Tensor) -> float:
    """Return the share of pairs of an old and a new row that are in order; ties count half."""
    ordered = old.sort().values
    below = torch.searchsorted(ordered, new)
    up_to = torch.searchsorted(ordered, new, right=True)
    return float((below + up_to).double().mean() / (2 * len(old)))
