"""Conformal selection: rows whose target is large, or has a label, with few false discoveries.

The p-value of a row is the largest conformal p-value of all targets that would make its selection
false. If its target is one of these, the p-value of this target itself is no larger, and that one
ranks the row among calibration rows with which it is exchangeable. Benjamini and Hochberg's
procedure then controls the false discovery rate, although the p-values of rows depend on each
other by the calibration rows they share (Jin and Candes, 2023).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ffcp.classification.set_predictor import SetPredictor
from ffcp.conformal.calibration import Marginal
from ffcp.conformal.p_values import benjamini_hochberg, tail_counts
from ffcp.regression.joint import LOWER
from ffcp.regression.regression_predictor import RegressionPredictor
from ffcp.regression.scaled_score import TwoSidedScore


class Discoveries(NamedTuple):
    """The rows that :func:`ffcp.conformal_selection` selected, and the p-values of all.

    Attributes
    ----------
    selected : Tensor
        Whether each row is selected, (n,).
    p_values : Tensor
        The p-value of "the target is not above, or has another label", (n,).
    """

    selected: Tensor
    p_values: Tensor

    def __repr__(self) -> str:
        count = int(self.selected.sum())
        return f"Discoveries: {count:,} of {len(self.selected):,} rows selected"


def conformal_selection(
    predictor: Any, x: Any, *, above: Any = None, label: Any = None, fdr: Any = 0.1
) -> Discoveries:
    """Select rows whose target exceeds a number, or that have a label, with few false ones.

    Parameters
    ----------
    predictor : Predictor
        A calibrated predictor with one threshold for all rows
        (:class:`ffcp.calibrations.Marginal`). For ``above`` one of lower limits,
        ``side="lower"``, with one output: its score falls where the target grows. For ``label``
        one of prediction sets.
    x : array-like
        All rows to select from, as the model takes them.
    above : float, default=None
        The number that targets are to exceed, for all rows or for each, (n,).
    label : int, default=None
        In its place: the number of a class, or its name if the predictor has ``names``.
    fdr : float, default=0.1
        The false discovery rate: the share of selected rows that are selected wrongly, on average
        over calibration and new rows; 0 where none is selected.

    Returns
    -------
    Discoveries
        ``(selected, p_values)``.

    Notes
    -----
    Guarantee, for independent rows from one distribution: the false discovery rate is at most
    ``fdr``. It concerns this set of rows as a whole, not a single row, nor one of two calls on
    halves of the rows.

    Examples
    --------
    >>> import ffcp
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(1500, 2)
    >>> model, y = torch.nn.Linear(2, 1), x.sum(dim=1) + 0.5 * torch.randn(1500)
    >>> _ = model.load_state_dict({"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
    >>> predictor = ffcp.CP(model, side="lower").calibrate(x[:1000], y[:1000])
    >>> selected, p_values = ffcp.conformal_selection(predictor, x[1000:], above=1.0, fdr=0.1)
    >>> int(selected.sum())
    16

    If the number is known before calibrating, far more are found by asking only whether targets
    exceed it (the clipped score of Jin and Candes):

    >>> clipped = torch.where(y > 1.0, 1e6, 1.0)
    >>> predictor = ffcp.CP(model, side="lower").calibrate(x[:1000], clipped[:1000])
    >>> selected, p_values = ffcp.conformal_selection(predictor, x[1000:], above=1.0, fdr=0.1)
    >>> wrong = (y[1000:] <= 1)[selected].double().mean()
    >>> print(f"{int(selected.sum())} of {int((y[1000:] > 1).sum())}, {wrong:.2f} wrong")
    91 of 123, 0.10 wrong
    """
    if (above is None) == (label is None):
        raise TypeError("give above=, a number that targets are to exceed, or label=")
    if not isinstance(predictor, (RegressionPredictor, SetPredictor)):
        raise TypeError(
            f"conformal_selection takes a predictor of intervals or of prediction sets, got "
            f"{type(predictor).__name__}"
        )
    predictor = predictor.snapshot()
    calibration = predictor.calibrated().calibration
    if type(calibration) is not Marginal:
        raise ValueError(
            f"{type(calibration).__name__} has a threshold for each row or a summary of the "
            "scores; that the false discovery rate is controlled is known where new rows are "
            "ranked among the same calibration rows: calibrate with ffcp.calibrations.Marginal"
        )
    if above is None:
        p_values = _p_values_of_other_labels(predictor, x, label)
    else:
        scores = _scores_at(predictor, x, above)
        p_values = tail_counts(calibration, scores[:, None], {}).p_values()[:, 0]
    total = len(calibration) + 1  # p-values are ranks among the calibration rows and the new one
    selected = benjamini_hochberg((p_values * total).round().long(), total, fdr)
    return Discoveries(selected, p_values)


def _scores_at(predictor: Any, x: Any, above: Any) -> Tensor:
    """Return the scores of the number that targets are to exceed, (n,)."""
    if not isinstance(predictor, RegressionPredictor):
        raise TypeError("above= is for prediction intervals: pass label= for prediction sets")
    if predictor.side != LOWER or not isinstance(predictor.calibrated().score, TwoSidedScore):
        raise ValueError(
            f"side={predictor.side!r}: selection needs a score that falls where the target grows. "
            "Make the predictor with side='lower'"
        )
    if predictor.missing or predictor.calibration.scores.shape[1] != 1:
        raise ValueError("selection is for one output that is known in every calibration row")
    rows = predictor.rows(x).count
    if rows is None:
        raise TypeError("selection compares all rows with each other: pass them as arrays")
    limit = torch.as_tensor(above, dtype=torch.float64)
    scores: Tensor = predictor.score(x, limit.expand(rows)).double().reshape(-1)
    return scores


def _p_values_of_other_labels(predictor: Any, x: Any, label: Any) -> Tensor:
    """Return the largest p-value of all labels but one, (n,)."""
    if not isinstance(predictor, SetPredictor):
        raise TypeError("label= is for prediction sets: pass above= for intervals")
    names = predictor.names or []
    number = names.index(label) if label in names else label
    classes = predictor.classes or 0
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < classes:
        raise ValueError(f"label={label!r} is none of the {classes} classes")
    p_values = predictor.p_values(x)
    p_values[:, number] = 0
    largest: Tensor = p_values.amax(dim=1)
    return largest
