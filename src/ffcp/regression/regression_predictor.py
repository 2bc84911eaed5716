"""Prediction intervals from a score and a calibration, once for all regression methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from ffcp.arguments import Running
from ffcp.batch import BatchOutput
from ffcp.conformal.calibration import Calibration, as_calibration
from ffcp.conformal.columns import Columns, joined, prefixed, take
from ffcp.conformal.compressed import is_summary
from ffcp.conformal.mondrian import must_know, pac_quantiles
from ffcp.conformal.rank import exact_alpha, requested_alphas, rows_needed
from ffcp.conformal.selection import Selection
from ffcp.network import arrays, forward
from ffcp.network.inputs import RowBuffer
from ffcp.predictor import Predictor, steady
from ffcp.regression.distribution import Distribution
from ffcp.regression.intervals import Interval
from ffcp.regression.joint import (
    BOTH,
    EACH,
    LOWER,
    columns_of,
    has_own_thresholds,
    is_of_known,
    needs_whole_rows,
    shared_out,
)
from ffcp.regression.scaled_score import IntervalScore, TwoSidedScore
from ffcp.regression.support import checked_support
from ffcp.warnings import warn

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NO_SIDE = "its score has no side: a TwoSidedScore has"
_BLOCK = 2**18  # numbers per step of the float64 arithmetic


class RegressionPredictor(Predictor):
    """The base of all regression predictors: nested intervals and a calibration."""

    compared = ("joint", "side", "missing", "support", "output")

    def __init__(
        self,
        model: nn.Module,
        score: IntervalScore | Selection,
        calibration: Calibration | None = None,
        *,
        joint: Any = False,
        side: str = BOTH,
        missing: bool = False,
        support: Sequence[float | None] | None = None,
        **running: Unpack[Running],
    ) -> None:
        calibration = as_calibration(calibration)
        if calibration.traits.labels:
            raise ValueError(
                f"{type(calibration).__name__} needs class labels: use it with LAC or RAPS"
            )
        if missing and not calibration.traits.missing:
            raise ValueError(
                f"{type(calibration).__name__} needs all targets: leave out missing=True, and "
                "rows whose target is not known"
            )
        if is_of_known(joint) and not missing:
            raise ValueError(
                f"joint={joint!r} is for missing targets: add missing=True, or take joint=True or "
                "a share where all targets are known"
            )
        self.joint, self.side, self.missing = joint, side, missing
        self.takes_nan = missing
        self.support = checked_support(support)
        super().__init__(model, score, calibration, **running)

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments, but for the model."""
        support = None if self.support is None else self.support.config()
        own = {"joint": self.joint, "side": self.side, "missing": self.missing}
        return {**super().config(), **own, "support": support}

    def check_target(self, y: Tensor, first_row: int) -> None:
        """Raise ValueError for infinite targets, NaN unless ``missing``, and those off support."""
        arrays.check_finite(y.masked_fill(y.isnan(), 0) if self.missing else y, "y", first_row)
        if self.support is not None:
            self.support.check(y, first_row)

    def alpha_of_each(self, alpha: Any, thresholds: int) -> Fraction:
        """Return the level of each of several thresholds."""
        return shared_out(alpha, self.side, self.joint, thresholds)

    def check_scores(self) -> None:
        """Raise ValueError if loaded scores are impossible."""
        super().check_scores()
        columns = self.calibration.scores.shape[1]
        if not has_own_thresholds(self.joint) and columns > columns_of(self.side, self.joint, 1):
            raise ValueError("expected one score per row for outputs that are covered jointly")
        if columns % columns_of(self.side, True, 1):
            raise ValueError("expected scores of both sides")

    # -- using the calibration --------------------------------------------------------------

    @steady
    def score(self, x: Any, y: Any = None) -> Tensor:
        """Return the nonconformity scores of rows, in float64.

        ``x`` may be a loader of pairs ``(x, y)``, passed alone. Scores have the shape of the
        calibration targets, or (n,) if outputs are covered jointly. With ``side="each"`` they have
        a last dimension of two, for the scores below and above.

        Parameters
        ----------
        x : array-like, frame, tuple, dict or loader
            Inputs, a row each; or a loader of pairs ``(x, y)``, passed alone.
        y : array-like, default=None
            Targets, unless ``x`` is a loader.
        """
        self.must_be_settled()
        buffer, shape = RowBuffer(), torch.Size()
        for out, target in self.targeted(x, y):
            for part, rows in _blocks(out):
                buffer.add({"score": self._state.score.score(part, target[rows])})
            if has_own_thresholds(self.joint):
                shape = arrays.like_target(target, self._state.layout).shape[1:]
        scores = buffer["score"].cpu()
        if self.side == EACH:
            return scores.view(len(scores), 2, -1).movedim(1, -1).reshape(-1, *shape, 2)
        return scores.view(-1, *shape)

    def forward(self, x: Any, alpha: Any = None, **options: Any) -> Interval:
        """Return intervals, as :meth:`predict_interval` does: ``predictor(x)``."""
        return self.predict_interval(x, alpha, **options)

    @steady
    def predict_interval(
        self,
        /,
        x: Any,
        alpha: Any = None,
        *,
        confidence_level: Any = None,
        pac: Any = None,
        groups: Any = None,
        first_row: int | None = None,
        weights: Any = None,
        **unknown: NoReturn,
    ) -> Interval:
        """Return prediction intervals that contain the target with probability at least 1 - alpha.

        Parameters
        ----------
        x : array-like, frame, tuple, dict or loader
            Inputs, as the model takes them; or a loader of batches, whose intervals are returned
            together. A loader may yield pairs ``(x, y)``, of which x is used, if the model has one
            argument; a model of two arguments takes both as inputs, and an ambiguous pair is an
            error. A list is an input, never a loader.
        alpha : float or sequence of float, default=None
            The miscoverage level, in (0, 1); 0.1 by default. Any value, without calibrating
            again. A sequence of levels adds a first dimension to ``lower`` and ``upper``, from
            one pass.
        confidence_level : float or sequence of float, default=None
            In place of ``alpha``: the coverage, 1 - alpha. 0.9 is alpha = 0.1.
        pac : float, default=None
            PAC coverage: at least 1 - alpha for this calibration set, with this probability, for
            example 0.95. Without it the coverage is 1 - alpha on average over calibration sets.
            For :class:`ffcp.calibrations.Marginal` and :class:`ffcp.calibrations.Mondrian`, there
            in every group.
        groups : array-like, default=None
            The group of each row, if the calibration had groups.
        first_row : int, default=None
            For randomised methods whose results must be reproducible: the number of the first
            row of ``x`` in the job. By default random numbers continue from call to call.
        weights : array-like, default=None
            The weight of each row, for ``ffcp.calibrations.Weighted("given")``.

        Returns
        -------
        Interval
            ``(lower, upper, prediction)`` in the shape of the calibration targets, (n,) or
            (n, m), and in the type of the model's output. Where there are too few calibration
            rows an interval is infinite, and a warning says what to do.
        """
        requested, are_many = requested_alphas(alpha, confidence_level, unknown)
        calibration = self.calibrated().calibration
        thresholds = calibration.scores.shape[1]
        alphas = [self.alpha_of_each(level, thresholds) for level in requested]
        sure = None
        if pac is not None:
            sure = 1 - self.alpha_of_each(1 - exact_alpha(pac, "pac"), thresholds)
        data, strictest = self.rows(x), alphas.index(min(alphas))
        parts: list[Interval] = []
        infinite: list[Columns] = []
        for out, metadata, draws, _ in self.batch_outputs(data, groups, first_row, weights):
            if sure is None:
                q = calibration.quantiles(alphas, metadata, draws)
            else:
                q = pac_quantiles(calibration, alphas, sure, metadata)
            if q.max().item() == math.inf:
                is_infinite = q[strictest].isinf().any(dim=-1).expand(len(out.output))
                infinite.append(take({"number": torch.tensor(out.rows), **metadata}, is_infinite))
            for part, rows in _blocks(out, len(alphas)):
                thresholds_of_part = q if q.shape[1] == 1 else q[:, rows]
                parts.append(self.interval_at(part, thresholds_of_part, are_many))
        if infinite:
            assert data.count is not None
            self._warn_of_infinite(alphas[strictest], infinite, data.count, sure)
        levels = tuple(map(float, requested)) if are_many else float(requested[0])
        lower, upper, prediction = parts[0]
        if len(parts) > 1:
            lower = torch.cat([part.lower for part in parts], int(are_many))
            upper = torch.cat([part.upper for part in parts], int(are_many))
            prediction = torch.cat([part.prediction for part in parts])
        make: Callable[..., Interval] = getattr(self._state.score, "interval", Interval)
        return make(lower, upper, prediction, levels)

    @steady
    def predict_distribution(
        self, x: Any, *, groups: Any = None, first_row: int | None = None
    ) -> Distribution:
        """Return the distribution of the target: a conformal predictive system.

        Parameters
        ----------
        x : array-like, frame, tuple, dict or loader
            As in :meth:`predict_interval`.
        groups : array-like, default=None
            As in :meth:`predict_interval`.
        first_row : int, default=None
            For reproducible random numbers, as in :meth:`predict_interval`.

        Returns
        -------
        Distribution
            With ``quantile(levels)``, ``cdf(y)``, ``p_value(y)``, ``crps(y)`` and ``sample(n)``.
            1 / (n + 1) of its mass lies at each infinity. For compressed scores, which need a
            ``side``, only quantiles, rounded away from the middle.

        Raises
        ------
        ValueError
            If the score of the method has no sign, or the calibration keeps none.
        """
        calibration, score = self.calibrated().calibration, self._state.score
        parts = getattr(calibration, "parts", {None: calibration})
        tables = [self._signed_scores(part) for part in parts.values()]
        number = {label: place for place, label in enumerate(parts)}
        data = self.rows(x)
        buffer = RowBuffer(data.count)
        curve: dict[str, Tensor] | None = None
        for out, metadata, *_ in self.batch_outputs(data, groups):
            prediction = arrays.like_target(score.prediction(out.output), self._state.layout)
            curve = score.curve(out) if isinstance(score, TwoSidedScore) else None
            if curve is None:
                raise ValueError(self._no_distribution(getattr(score, "why_unsigned", _NO_SIDE)))
            self._must_be_signed(tables[0], prediction[0].numel())
            labels = metadata.get("group", [None] * len(prediction))
            must_know(labels, number)
            first = self.first_number(out, first_row)
            rows = {
                "group": torch.tensor([number[label] for label in labels]),
                "row": torch.arange(first, first + len(prediction)),
            }
            buffer.add({"prediction": prediction.cpu(), **rows, **prefixed("curve.", curve)})
        return Distribution(
            score,
            {name: buffer[f"curve.{name}"] for name in curve or ()},
            buffer["prediction"],
            tables,
            buffer["group"],
            buffer["row"],
            self._stream.entropy(pinned=first_row is not None),
            self.support,
        )

    def _signed_scores(self, part: Calibration) -> Tensor:
        """Return the signed scores of rows, each column sorted, NaN last."""
        if is_summary(part):
            why = "a summary keeps no signs of scores: calibrate without compressing"
            raise ValueError(self._no_distribution(why))
        if not part.traits.signs:
            raise ValueError(
                self._no_distribution(
                    f"{type(part).__name__} keeps no signs of scores: calibrate with "
                    "ffcp.calibrations.Marginal or ffcp.calibrations.Mondrian"
                )
            )
        if self.side == BOTH:
            signed: Tensor = part.signed  # type: ignore[attr-defined]
            return signed
        above = part.scores.chunk(2, dim=1)[1] if self.side == EACH else part.scores
        return (-above).sort(dim=0).values if self.side == LOWER else above

    def _must_be_signed(self, scores: Tensor, outputs: int) -> None:
        if not has_own_thresholds(self.joint) and outputs > 1:
            why = f"with joint={self.joint!r} one score is kept of all outputs: leave out joint="
            raise ValueError(self._no_distribution(why))
        if outputs != scores.shape[1]:
            raise ValueError(
                f"calibrated on {scores.shape[1]} outputs, but the model now gives {outputs}: "
                "calibrate again"
            )

    def _no_distribution(self, why: str) -> str:
        return f"{type(self).__name__} has no distribution of the target: {why}"

    def interval_at(self, out: BatchOutput, q: Tensor, has_levels: bool = True) -> Interval:
        """Return intervals; for several levels the ends have a first dimension of levels."""
        score = self._state.score
        prediction = arrays.like_target(score.prediction(out.output), self._state.layout)
        outputs, sides = prediction.numel() // len(prediction), 2 if self.side == EACH else 1
        if has_own_thresholds(self.joint) and q.shape[-1] != outputs * sides:
            raise ValueError(
                f"calibrated on {q.shape[-1] // sides} outputs, but the model now gives {outputs}: "
                "calibrate again"
            )
        lower, upper = score.region(out, q)
        if self.support is not None:
            lower, upper = self.support.cut(lower, upper)
        if lower.device != prediction.device:
            lower, upper = lower.to(prediction.device), upper.to(prediction.device)
        shape = (len(q), *prediction.shape) if has_levels else prediction.shape
        return Interval(lower.reshape(shape), upper.reshape(shape), prediction)

    def _warn_of_infinite(
        self, alpha: Any, infinite: Sequence[Columns], rows: int, pac: Any = None
    ) -> None:
        metadata = joined(infinite)
        intervals = "the interval is"
        if self.calibration.traits.rows:
            intervals = f"{len(metadata['number'])} of {rows} intervals are"
        if pac is None:
            why = self.explain_infinite(alpha, metadata)
        else:
            in_groups = " in each group" if self.calibration.traits.groups else ""
            why = (
                f": alpha={float(alpha):g} with pac={float(pac):g} needs at least "
                f"{rows_needed(alpha, pac)} calibration rows{in_groups}"
            )
        if self.missing and needs_whole_rows(self.joint):
            why += (
                f". With joint={self.joint!r} only rows without a missing target calibrate: "
                "joint='known' covers known outputs, and takes all rows"
            )
        warn(f"{intervals} infinite{why}")


def _blocks(out: BatchOutput, levels: int = 1) -> Iterator[tuple[BatchOutput, slice]]:
    """Split the output of a pass, so that float64 intermediates stay small."""
    rows, numbers = len(out.rows), levels * out.output.numel()
    if numbers <= _BLOCK:
        yield out, slice(0, rows)
        return
    size = max(1, _BLOCK * rows // numbers)
    for start in range(0, rows, size):
        part = slice(start, min(start + size, rows))
        yield forward.part_of(out, part), part
