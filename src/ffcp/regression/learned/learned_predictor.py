"""Learned: prediction intervals between learned quantiles of the network's residual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ffcp.batch import BatchOutput, Requires
from ffcp.calibrated import Counts
from ffcp.calibration_loop import Batch, BatchRunner, Result
from ffcp.conformal.calibration import Calibration
from ffcp.regression.common import Common
from ffcp.regression.joint import BOTH
from ffcp.regression.learned.feature_columns import On
from ffcp.regression.learned.learned_score import LearnedScore
from ffcp.regression.learned.learners import NETWORK, checked_learner
from ffcp.regression.learned.nested import CENTRAL, FAMILIES, LEVELS, MIDDLE
from ffcp.regression.learned.quantile_fitting import (
    TRAINING_ROWS,
    LearnedSelection,
    QuantileFitter,
    tail_of,
)
from ffcp.regression.learned.training_rows import (
    LearnsFromTraining,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

Self = TypeVar("Self", bound="Learned")
# Training residuals are too small if sets that should hold half of new rows hold less.
_HALF, _TOO_FEW = 0.5, 0.3


class Learned(LearnsFromTraining):
    """Intervals between learned quantiles of the residual.

    Small networks or boosted trees learn many quantiles of the residual at once from the input,
    the prediction and other values of the pass, for any alpha; the score of a target is the number
    of the first nested set between them that contains it, and calibration gives the intervals
    their coverage as for every other score.

    Parameters
    ----------
    model : nn.Module
        A trained network; forward returns one tensor with a row per input row, at most 64
        numbers each.
    on : str, callable or a sequence of them, default=None
        What is learned from: any of ``"prediction"`` (always used), ``"norms"``, ``"values"`` (of
        the last layer before the output), ``"input"`` (left out unless it is one table of
        numbers), and functions of :class:`ffcp.BatchOutput` that give one or more numbers per row.
        By default prediction, values and input of a table; prediction, values and norms of images,
        text and the like.
    nested : {"central", "grown"}, default="central"
        ``"central"``: sets between two quantiles as far below as above the median. ``"grown"``:
        grown from the densest part outward, shorter where noise is skewed.
    learner : {"network", "boosting", "both"}, default="network"
        ``"network"``: small networks, without further packages. ``"boosting"``: boosted
        trees by LightGBM (``pip install 'ffcp[trees]'``), kept as tensors: predicting, saving,
        loading and exporting need no LightGBM. ``"both"``: the mean of both.
    calibration : Calibration, default=None
        As in :class:`ffcp.IntervalPredictor`.
    calibrate_rows : int, default=None
        Without :meth:`fit`, how many rows calibrate while all others are learned from; by default
        100 / alpha, 1,000 for alpha = 0.1, but at most a share of few rows.
    **common : dict
        As in :class:`ffcp.IntervalPredictor`.

    Notes
    -----
    :meth:`fit` learns from the rows that trained the model, and all calibration rows calibrate.
    If the network has memorised its training rows, their residuals are too small; calibration
    warns if that shows. Without :meth:`fit` some calibration rows are learned from, and do not
    calibrate. :class:`ffcp.Auto` learns from both.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> x = torch.rand(1200, 1)
    >>> y = x[:, 0] * torch.randn(1200)  # noise grows to the right
    >>> model = nn.Linear(1, 1)  # yours is trained
    >>> predictor = Learned(model).fit(x[:600], y[:600]).calibrate(x[600:], y[600:])
    >>> interval = predictor.predict_interval(torch.tensor([[0.1], [0.9]]), alpha=0.1)
    >>> bool(interval.width[0] < interval.width[1])
    True
    """

    def __init__(
        self,
        model: nn.Module,
        on: On | Sequence[On] | None = None,
        nested: str = CENTRAL,
        learner: str = NETWORK,
        calibration: Calibration | None = None,
        calibrate_rows: int | None = None,
        **common: Unpack[Common],
    ) -> None:
        shared = self._checked_arguments(on, calibrate_rows, common)
        if nested not in FAMILIES:
            raise ValueError(f"nested must be one of {', '.join(FAMILIES)}, got {nested!r}")
        self.nested, self.learner = nested, checked_learner(learner)
        selection = LearnedSelection(kind=learner, shape=nested, **shared)
        super().__init__(model, selection, calibration, **common)  # type: ignore[misc]

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments, but for the model."""
        return {"nested": self.nested, "learner": self.learner, **super().config()}

    def fit(self: Self, x: Any, y: Any = None, *, disjoint: bool = False) -> Self:
        """Learn from rows that will not calibrate, for example those that trained the model.

        Parameters
        ----------
        x : array-like, frame, tuple, dict or loader
        y : array-like, default=None
            As in :meth:`calibrate`. At most 20,000 rows are used: of arrays a random part, of a
            loader the first, so let it shuffle.
        disjoint : bool, default=False
            Whether calibration rows are known to be different, because the caller divided the
            data. Otherwise they are compared with these, and many equal rows are an error.
        """
        training = self._training_rows(x, y, disjoint)
        tail = tail_of(self.selection_alpha, self.side)
        fitter = QuantileFitter(training.features, self.seed or 0, tail)
        config = {"shape": self.nested, "joint": self.joint, "side": self.side}
        learned = fitter.learned_score(self.learner, training.rows, source=TRAINING_ROWS, **config)
        self._learn(replace(learned, rows=training.hashes))
        return self

    def restore_fit(self) -> None:
        """Restore the learned state of training rows from a loaded state."""
        super().restore_fit()
        if self._hashes is not None:  # also for a new calibration
            self._given = (self._state.score, self._given[1])

    @property
    def learned_from(self) -> str | None:
        """``"training rows"`` or ``"calibration rows"``; ``None`` if nothing was learned yet."""
        return getattr(self._state.score, "source", None)

    def _runner(self, update: bool) -> BatchRunner:
        return _OverfitCheck(super()._runner(update))


class _OverfitCheck(BatchRunner):
    """Warns if the residuals of training rows are too small, as the model was trained on them."""

    def __init__(self, inner: BatchRunner) -> None:
        super().__init__(inner.model)
        self._inner = inner

    def __call__(self, batch: Batch, requires: Requires) -> BatchOutput:
        """Run the model on one batch."""
        return self._inner(batch, requires)

    def finish(self, result: Result) -> Counts:
        """Compare the coverage of the sets with their nominal one."""
        score, scores = result.score, result.calibration.scores
        known = scores[~scores.isnan()]
        if isinstance(score, LearnedScore) and score.source == TRAINING_ROWS:
            # Joint coverage is lower than that of each output.
            is_known = (score.shape, score.side, score.learner.outputs) == (CENTRAL, BOTH, 1)
            half = float(torch.searchsorted(LEVELS, (1 + _HALF) / 2)) - MIDDLE
            share = float((known <= half).double().mean())  # NaN of no rows
            if is_known and share < _TOO_FEW:
                result.warnings.append(
                    f"the network overfits its training rows, so residuals are too small: sets "
                    f"that should hold {_HALF:.0%} of new rows hold {share:.0%} of the calibration "
                    "rows. Intervals keep their coverage, but would be shorter without fit, which "
                    "learns from rows set aside from calibration; ffcp.Auto compares both"
                )
        return self._inner.finish(result)
