"""Prediction intervals from a base, a scale and a calibration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ffcp.arguments import known_only
from ffcp.batch import BatchOutput
from ffcp.calibration_loop import Batch
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.selection import Aside
from ffcp.network import forward, inputs
from ffcp.regression.common import Common
from ffcp.regression.ellipsoid import EllipsoidScore
from ffcp.regression.intervals import Base, Point
from ffcp.regression.joint import AUTO, BOTH, ELLIPSOID, has_own_thresholds, learned_output_scales
from ffcp.regression.layer_selection import Choice
from ffcp.regression.regression_predictor import RegressionPredictor
from ffcp.regression.scaled_score import IntervalScore, ScaledScore

if TYPE_CHECKING:
    from typing_extensions import Unpack

Self = TypeVar("Self", bound="IntervalPredictor")
_OF_SCALED = ("joint", "side", "output_scales")  # arguments of the score of a base and a scale


class IntervalPredictor(RegressionPredictor):
    """Prediction intervals from a base, a scale and a calibration.

    Every named regression method is such a combination: ``CP`` is ``Point`` with ``Constant``
    and ``Marginal``, ``FFLCQR`` is ``Quantiles`` with ``GradientNorm`` and ``Local``.

    Parameters
    ----------
    model : nn.Module
        A trained network; forward returns one tensor with a row per input row.
    base : Base, default=None
        Which outputs are the ends of the interval: :class:`ffcp.scores.Point` (the default) or
        :class:`ffcp.scores.Quantiles`.
    scale : Scale, callable or list, default=None
        What residuals are divided by: :class:`ffcp.scales.Constant` (the default),
        :class:`ffcp.scales.GradientNorm`, any function of an :class:`ffcp.BatchOutput`, or a list
        of them to select from.
    calibration : Calibration, default=None
        How scores become thresholds: :class:`ffcp.calibrations.Marginal` (the default),
        :class:`ffcp.calibrations.Mondrian` or :class:`ffcp.calibrations.Local`.
    score : IntervalScore, default=None
        An :class:`ffcp.scores.IntervalScore` of your own, in place of base and scale.
    **common : dict
        The following, which all named methods take:

    joint : bool, float, str or tuple, default=False
        With several outputs: ``False`` covers each on its own with probability 1 - alpha.
        ``True`` covers all of them at once, by the largest of their scores. ``0.9`` (any number
        between 0 and 1) covers at least that share of the outputs of a row at once.
        ``"bonferroni"`` covers all at once too, with a threshold of its own for every output at
        level alpha / m. ``"ellipsoid"`` covers all at once by an
        :class:`~ffcp.regression.ellipsoid.Ellipsoid` that
        follows their correlation, for point predictions. With ``missing``, ``"known"`` covers all
        known outputs of a row at once, and ``(0.9, "known")`` at least that share of them.
    side : str, default="both"
        ``"both"``: the target is between the two ends with probability 1 - alpha. ``"lower"`` or
        ``"upper"``: it is above the lower, or below the upper end with that probability; the
        other end is infinite, or the end of the support. ``"each"``: it is below the lower end
        with probability alpha / 2 at most, and above the upper end likewise; each end has a
        threshold of its own, which suits skewed noise.
    support : tuple of float or None, default=None
        The smallest and the largest value that targets can take, ``None`` where there is none:
        ``(0, None)``. Intervals are clipped to it, the prediction is not, and other targets are an
        error.
    output_scales : sequence of float or str, default="auto"
        The scale of each output, where they share a threshold (``joint=True`` or a share), so that
        intervals do not depend on the units of the outputs: one positive number per output;
        ``"auto"``, learned on calibration rows that then do not calibrate, unless
        :meth:`fit_output_scales` has learned them from other rows; or ``None``, no scaling. With
        one output, more than 4,096, or too few rows, ``"auto"`` is ``None``.
    missing : bool, default=False
        Whether NaN in ``y`` means a missing target. Each output is calibrated on the rows that
        have it; with ``joint=True`` or a share only complete rows calibrate. The guarantee then
        holds for all targets if they are missing completely at random. With ``joint="known"``
        every row with a known target calibrates, and the guarantee is about the known outputs of
        rows with the same missingness.
    selection_fraction : float, default=0.2
        Where something is to be selected: the share of the calibration rows that are used for it
        and do not calibrate.
    selection_alpha : float, default=0.1
        Level at which candidates are compared.
    seed : int, default=None
        Seed of the split.
    batch_size : int, default=None
        Rows per pass over arrays; by default about 16 MB of input (2 MB of images), at most
        8,192 rows.
    output : str, int or callable, default=None
        Which part of what the model returns is the prediction, if it returns a tuple, a dict or
        the like: a key (``"logits"``), an index, or a function of what it returns.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = nn.Linear(2, 1), torch.randn(300, 2), torch.randn(300)  # yours is trained
    >>> predictor = IntervalPredictor(model, scale=lambda out: 1 + out.output.abs()).calibrate(x, y)
    >>> predictor.predict_interval(x[:5], alpha=0.1).lower.shape
    torch.Size([5])
    """

    _base: ClassVar[type[Base]] = Point  # that of the named methods

    def __init__(
        self,
        model: nn.Module,
        base: Base | None = None,
        scale: Any = None,
        calibration: Calibration | None = None,
        *,
        score: IntervalScore | None = None,
        **common: Unpack[Common],
    ) -> None:
        known_only(type(self), common, Common)
        if score is None:
            joint = common.pop("joint", False)
            family = EllipsoidScore if joint == ELLIPSOID else ScaledScore
            if joint == ELLIPSOID and common.get("support") is not None:
                raise ValueError(
                    "support= clips boxes, not ellipsoids: leave it out, or use joint=True"
                )
            side, output_scales = common.pop("side", BOTH), common.pop("output_scales", AUTO)
            score = family(base or Point(), scale, joint, side, output_scales)
        elif base or scale or common.keys() & _OF_SCALED:
            raise ValueError(
                f"'score' replaces base, scale, {', '.join(_OF_SCALED)}: leave these out"
            )
        super().__init__(  # type: ignore[misc]
            model, score, calibration, joint=score.joint, side=score.side, **common
        )

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments, but for the model."""
        score, shared = self._given[0], super().config()
        if not isinstance(score, ScaledScore):
            others = {name: value for name, value in shared.items() if name not in _OF_SCALED}
            return {"score": score, **others}
        parts = {"base": score.base, "scale": score.scale, "output_scales": score.output_scales}
        return {**parts, **shared}

    @property
    def scale(self) -> Any:
        """The scale in use; ``None`` for a score without one."""
        return getattr(self._state.score, "scale", None)

    @property
    def feature(self) -> str | None:
        """The layer whose gradient is taken; ``None`` until it is selected, or if there is none."""
        is_open = getattr(self.scale, "is_open", False)
        return None if is_open else getattr(self.scale, "feature", None)

    @property
    def choice(self) -> Choice | None:
        """The report of the selection of the scale."""
        choice: Choice | None = self._state.report.get("layer")
        return choice

    @property
    def output_scales(self) -> Tensor | None:
        """The scale of each output, if outputs share a threshold and it is known."""
        scales = getattr(self._state.score, "output_scales", None)
        return None if scales in (None, AUTO) else torch.tensor(scales, dtype=torch.float64)

    def fit(self: Self, x: Any, y: Any) -> Self:
        """Select missing arguments on rows that will not calibrate, so that all others can.

        Scales of outputs, their covariance, a bandwidth, the directions of a layer. Training rows
        may be used.

        Parameters
        ----------
        x : array-like, frame, tuple or dict
            Inputs, a row each.
        y : array-like
            Targets, a row each.
        """
        selection, is_ellipsoid = self._given[1].selection(), self.joint == ELLIPSOID
        if is_ellipsoid:
            self._fit_covariance(x, y)
        if selection is not None and not selection.takes_new:
            self._fit_calibration(x, y, None)
        elif not is_ellipsoid:
            self.fit_output_scales(x, y)
        return self

    def _fit_covariance(self, x: Any, y: Any) -> None:
        """Learn the covariance of residuals from rows that will not calibrate."""
        score = replace(self._given[0], covariance=None)
        if getattr(score.scale, "is_open", False):
            raise RuntimeError(
                f"{score.scale.what} is not selected yet, and the covariance depends on it: name "
                "it when the predictor is made, or leave the covariance to calibrate"
            )
        self._set_score(score.fitted(self._measured(score.residuals, x, y)))

    def fit_output_scales(self: Self, x: Any, y: Any) -> Self:
        """Learn the scales of outputs on rows that will not calibrate, so that all others do.

        Training rows may be used: only the ratios of the scales matter. Only for outputs that
        share a threshold, and scales that were not given.

        Parameters
        ----------
        x : array-like, frame, tuple or dict
            Inputs, a row each.
        y : array-like
            Targets, a row each.
        """
        score = self._given[0]
        if has_own_thresholds(self.joint) or not isinstance(score, ScaledScore):
            raise ValueError("there are no scales of outputs to learn here: call calibrate(x, y)")
        if score.output_scales != AUTO and not self._has_fitted_output_scales:
            raise ValueError(
                "'output_scales' was given when the predictor was made: leave it out there, or do "
                "not call fit_output_scales"
            )
        alone = replace(score, joint=False, output_scales=None)
        if (selection := alone.selection()) is not None:
            raise RuntimeError(
                f"{selection.what} is not selected yet, and scales depend on it: name it "
                "when the predictor is made, or leave the scales to calibrate"
            )
        learned = learned_output_scales(self._measured(alone.score, x, y), self.selection_alpha)
        self._set_score(replace(score, output_scales=learned))
        self._has_fitted_output_scales = True
        return self

    _has_fitted_output_scales = False

    def _measured(self, measure: Callable[[BatchOutput, Tensor], Tensor], x: Any, y: Any) -> Tensor:
        """Return what ``measure`` gives for outputs and targets, for all rows."""
        with torch.inference_mode(False):
            parts = [measure(self._output_of(batch), batch.y).cpu() for batch in self.batches(x, y)]
        if not parts:
            raise ValueError("x has no rows")
        return torch.cat(parts)

    def _set_score(self, score: Any) -> None:
        """Set the score to calibrate; scores of an earlier calibration stay until then."""
        self._given = (score, self._given[1])
        if not len(self.calibration):
            self._state = replace(self._state, score=score)

    def _output_of(self, batch: Batch) -> BatchOutput:
        score, calibration = self._given
        requires = score.requires().joined(calibration.requires())
        out = forward.run_batch(self.model, batch.x, requires, batch.row)
        return out._replace(columns=batch.columns)

    def _fit_calibration(self, x: Any, y: Any, planned: int | None) -> None:
        """Run the selection of the calibration on rows that will not calibrate."""
        score = self._given[0]
        has_open_scales = getattr(score, "output_scales", None) == AUTO
        if has_open_scales and replace(score, output_scales=None).selection() is None:
            self.fit_output_scales(x, y)  # from the same rows
        self.must_be_settled()
        score, calibration = self._given
        selection = calibration.selection()
        assert selection is not None
        with torch.inference_mode(False):
            ((x, y),) = inputs.pairs(x, y, inputs.Reader(self.model))
            order = np.random.default_rng(self.seed or 0).permutation(len(y))
            picked = torch.from_numpy(np.sort(order[: selection.most_rows]))
            batches = list(self.batches(inputs.take(x, picked), y[picked]))
            out = forward.joined([self._output_of(batch) for batch in batches])
            aside = Aside(
                out,
                y=torch.cat([batch.y for batch in batches]),
                score=score,
                calibration=calibration,
                alpha=self.selection_alpha,
                left=planned or len(y),
                alpha_of_each=self.alpha_of_each,
                target_inputs=lambda: iter(()),
            )
            selected = selection.select(aside)
        self._given = (score, selected.calibration)
        self._fitted = {**self._fitted, **selected.report}
        if not len(self.calibration):
            report = {**self._state.report, **selected.report}
            self._state = replace(self._state, calibration=selected.calibration, report=report)
