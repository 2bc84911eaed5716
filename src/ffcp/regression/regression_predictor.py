"""Bands from a family and a calibration: score, predict_interval, once for all methods."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from ffcp.batch import BatchOutput
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import Columns, Table, prefixed, take
from ffcp.conformal.coverage_level import requested_alphas
from ffcp.conformal.density_ratio import ShiftChoice
from ffcp.conformal.marginal import Marginal
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import exact_alpha, rows_needed
from ffcp.network import checks, forward
from ffcp.network.frozen import gives_back
from ffcp.network.row_buffer import RowBuffer
from ffcp.predictor import Predictor, Running, steady
from ffcp.regression.distribution import Distribution
from ffcp.regression.intervals import Interval
from ffcp.regression.joint import has_own_thresholds, is_of_known, needs_whole_rows
from ffcp.regression.scaled_score import RegressionScore
from ffcp.regression.sides import BOTH, EACH, LOWER, columns_of, ends_at, shared_out
from ffcp.regression.support import checked_support
from ffcp.warnings import warn

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MARGINAL = Marginal()  # what predictors have is an empty copy of what they are given
_BLOCK = 2**18  # numbers per step of the float64 arithmetic


class RegressionPredictor(Predictor):
    """A family of nested bands and a calibration that says which of them covers."""

    task = "bands"

    def __init__(
        self,
        model: nn.Module,
        family: RegressionScore,
        calibration: Calibration | None = None,
        *,
        missing: bool = False,
        support: Sequence[float | None] | None = None,
        **running: Unpack[Running],
    ) -> None:
        calibration = _MARGINAL if calibration is None else calibration
        if calibration.looks_at_labels:
            raise ValueError(
                f"{type(calibration).__name__} looks at the classes of targets, and a band has "
                "none: it is for label sets, as LAC and RAPS"
            )
        if missing and not calibration.takes_missing:
            raise ValueError(
                f"{type(calibration).__name__} needs all targets: leave out missing=True, and "
                "rows whose target is not known"
            )
        if is_of_known(family.joint) and not missing:
            raise ValueError(
                f"joint={family.joint!r} is for missing targets: add missing=True, or take "
                "joint=True or a share where all targets are known"
            )
        self.joint, self.side, self.missing = family.joint, family.side, missing
        self.support = checked_support(support)
        super().__init__(model, family, calibration, **running)

    @property
    def shift_choice(self) -> ShiftChoice | None:
        """What learning a density ratio saw, with :class:`ffcp.calibrations.Weighted`."""
        choice: ShiftChoice | None = self._state.choices.get("shift")
        return choice

    def _own_settings(self) -> dict[str, Any]:
        joint = list(self.joint) if isinstance(self.joint, tuple) else self.joint  # as in files
        own: dict[str, Any] = {"joint": joint, "missing": self.missing}
        own.update({} if self.side == BOTH else {"side": self.side})
        own.update({} if self.support is None else {"support": self.support.settings()})
        return own

    def _checked_target(self, y: Tensor, first_row: int) -> Tensor:
        """Refuse NaN, unless it stands for a missing target, infinity, and what has no support."""
        checks.finite(y.masked_fill(y.isnan(), 0) if self.missing else y, "y", first_row)
        if self.support is not None:
            self.support.check(y, first_row)
        return y

    def alpha_of_each(self, alpha: Any, thresholds: int) -> Fraction:
        """Give the share of misses that each of several thresholds allows."""
        return shared_out(alpha, self.side, self.joint, thresholds)

    @property
    def _takes_nan(self) -> bool:
        return self.missing

    def check_scores(self) -> None:
        """Refuse, by ValueError, a loaded calibration with scores that cannot be."""
        super().check_scores()
        columns = self.calibration.coordinates
        if not has_own_thresholds(self.joint) and columns > columns_of(self.side, self.joint, 1):
            raise ValueError("it has several scores for outputs that are covered jointly")
        if len(self.calibration) and columns % columns_of(self.side, True, 1):
            raise ValueError("it has scores of one side only, where each has its own")

    # -- using the calibration --------------------------------------------------------------

    @steady
    def score(self, x: Any, y: Any = None) -> Tensor:
        """Return the non-conformity scores of points, in float64.

        ``x`` may be a loader of pairs ``(x, y)``, passed alone. They have the shape of the targets
        that calibrated, or (n,) if outputs are covered jointly. With ``side="each"`` the scores
        below and those above come one after the other in a last dimension of two.
        """
        self._must_be_settled()
        buffer, shape = RowBuffer(None), torch.Size()
        for out, target in self._targeted(x, y):
            for part, rows in _blocks(out):
                buffer.add({"score": self._scorer.record(part, target[rows])["score"]})
            if has_own_thresholds(self.joint):
                shape = checks.like_target(target, self.layout).shape[1:]
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
        """Give bands that hold the truth with probability at least 1 - alpha.

        Parameters
        ----------
        x
            Inputs, as the model takes them; or a loader of such batches, whose bands come back
            in one piece. A loader may yield pairs ``(x, y)``, of which x is taken, if the model
            has one argument; a model of two arguments takes both as inputs, and where either
            could be meant that is an error. A list is an input, never a loader.
        alpha
            Share of misses allowed, in (0, 1); 0.1 if nothing is given. Any value, without
            calibrating again. A sequence of them gives ``lower`` and ``upper`` a first dimension
            of levels, from one pass.
        confidence_level
            In place of ``alpha``: the coverage asked for, 1 - alpha. 0.9 is alpha = 0.1.
        pac
            PAC coverage: at least 1 - alpha for these calibration rows, with this probability
            over calibration sets, 0.95 say. Without it the coverage is 1 - alpha on average over
            calibration sets. For :class:`ffcp.calibrations.Marginal` and
            :class:`ffcp.calibrations.Mondrian`, where it is so in every group by itself.
        groups
            The group of each point, if the calibration had groups.
        first_row
            For randomised methods, and a job that must be repeated exactly: the number of the
            first row of ``x`` in it. By default random numbers go on from call to call.
        weights
            The weight of each point, for ``ffcp.calibrations.Weighted("given")``.

        Returns
        -------
        Interval
            ``(lower, upper, prediction)`` in the shape of the targets that calibrated, (n,) or
            (n, m), and in the type of the model's output. Where the calibration says too little
            about a point its band is infinite, and a warning says what to do.
        """
        asked, are_many = requested_alphas(alpha, confidence_level, unknown)
        self._must_be_calibrated()
        alphas = [self.alpha_of_each(level, self.calibration.coordinates) for level in asked]
        sure = None
        if pac is not None:
            doubt = 1 - exact_alpha(pac, "pac")
            sure = 1 - self.alpha_of_each(doubt, self.calibration.coordinates)
        given, strictest = self._rows(x), alphas.index(min(alphas))
        ends, predictions = (
            RowBuffer(given.count, int(are_many)),
            RowBuffer(given.count),
        )
        infinite = Table()
        look_up = partial(self.calibration.thresholds, alphas)
        if sure is not None:
            look_up = partial(self._pac_intervals, alphas, sure)
        finite: Tensor | None = None  # thresholds that are, where the next batch has the same
        looked_up = self._looked_up(given, look_up, groups, first_row, weights)
        for out, metadata, thresholds in looked_up:
            if thresholds is not finite:
                finite = thresholds
                if thresholds.numel() > 1 or math.isinf(thresholds.item()):
                    lost = thresholds[strictest].isinf().any(dim=-1).expand(len(out.rows))
                    if bool(lost.any()):
                        infinite.add(take({"row": torch.tensor(out.rows), **metadata}, lost))
                        finite = None
            for part, rows in _blocks(out, len(alphas)):
                own = thresholds if thresholds.shape[1] == 1 else thresholds[:, rows]
                band = self.interval_at(part, own, are_many)
                ends.add({"lower": band.lower, "upper": band.upper})
                predictions.add({"prediction": band.prediction})
        if len(infinite):
            assert given.count is not None
            self._warn_of_infinite(alphas[strictest], infinite, given.count, sure)
        lower, upper, prediction = ends["lower"], ends["upper"], predictions["prediction"]
        if gives_back(self.model):  # what may be the caller's own array, who may write to it
            prediction = prediction.clone()
        if are_many:
            return Interval(lower, upper, prediction, tuple(map(float, asked)))
        return Interval(lower, upper, prediction, float(asked[0]))

    @steady
    def predict_distribution(
        self, x: Any, *, groups: Any = None, first_row: int | None = None
    ) -> Distribution:
        """Give the distribution of the target: a conformal predictive system.

        Parameters
        ----------
        x, groups
            As in :meth:`predict_interval`.
        first_row
            For random numbers that must be repeated, as in :meth:`predict_interval`.

        Returns
        -------
        Distribution
            With ``quantile(levels)``, ``cdf(y)``, ``p_value(y)``, ``crps(y)`` and ``sample(n)``.
            1 / (n + 1) of its mass lies at each infinity.

        Raises
        ------
        ValueError
            If the score of the method has no sign, or the calibration keeps none.
        """
        self._must_be_calibrated()
        parts = getattr(self.calibration, "parts", lambda: {None: self.calibration})()
        tables = [self._signed_scores(part) for part in parts.values()]
        number = {label: place for place, label in enumerate(parts)}
        given = self._rows(x)
        buffer = RowBuffer(given.count)
        curve: dict[str, Tensor] | None = None
        for out in self.batch_outputs(given, groups):
            curve, outcome = self._scorer.curve(out), self._prediction(out)
            if curve is None:
                raise ValueError(self._no_distribution(self._scorer.why_unsigned))
            self._must_be_signed(tables[0], outcome[0].numel())
            labels = self.calibration.metadata(out).get("group", [None] * len(outcome))
            self._must_know(labels, number)
            rows = {
                "group": torch.tensor([number[label] for label in labels]),
                "row": self._row_numbers(out, first_row),
            }
            buffer.add({"prediction": outcome.cpu(), **rows, **prefixed("curve.", curve)})
        return Distribution(
            self._scorer,
            {name: buffer[f"curve.{name}"] for name in curve or ()},
            buffer["prediction"],
            [table for table in tables if table is not None],
            buffer["group"],
            buffer["row"],
            self._stream.entropy(pinned=first_row is not None),
            self.support,
        )

    def _must_know(self, labels: Sequence[Any], known: Mapping[Any, int]) -> None:
        unseen = [label for label in dict.fromkeys(labels) if label not in known]
        if unseen:
            raise ValueError(
                f"no calibration point belongs to group {', '.join(map(repr, unseen[:8]))}: "
                "calibrate with points of that group, or merge it into another"
            )

    def _signed_scores(self, part: Calibration) -> Tensor | None:
        """Return the signed scores of points, each column sorted, NaN last."""
        if not part.keeps_signs:
            raise ValueError(
                self._no_distribution(
                    f"{type(part).__name__} keeps no signs of scores, and its thresholds are no "
                    "quantiles of one distribution: calibrate with ffcp.calibrations.Marginal or "
                    "ffcp.calibrations.Mondrian"
                )
            )
        if self.side == BOTH:
            return part.signed()
        above = part.scores.chunk(2, dim=1)[1] if self.side == EACH else part.scores
        return (-above).sort(dim=0).values if self.side == LOWER else above

    def _must_be_signed(self, scores: Tensor | None, outputs: int) -> None:
        if not has_own_thresholds(self.joint) and outputs > 1:
            why = f"with joint={self.joint!r} one score is kept of all outputs: leave out joint="
            raise ValueError(self._no_distribution(why))
        if scores is None:
            why = "its calibration was saved before signs of scores were kept: calibrate again"
            raise ValueError(self._no_distribution(why))
        if outputs != scores.shape[1]:
            raise ValueError(
                f"calibrated on {scores.shape[1]} outputs, but the model now gives {outputs}"
            )

    def _no_distribution(self, why: str) -> str:
        return f"{type(self).__name__} has no distribution of the target: {why}"

    def _pac_intervals(
        self, alphas: Sequence[Fraction], sure: Fraction, metadata: Columns, random: Draws
    ) -> Tensor:
        return self.calibration.pac_thresholds(alphas, sure, metadata)

    def _prediction(self, out: BatchOutput) -> Tensor:
        """Return the point prediction in the shape of the targets that calibrated."""
        return checks.like_target(self._scorer.prediction(out.output), self.layout)

    def interval_at(self, out: BatchOutput, threshold: Tensor, has_levels: bool = True) -> Interval:
        """Give bands whose ends have a first dimension of levels, unless there is only one."""
        outcome = self._prediction(out)
        columns = columns_of(self.side, self.joint, outcome.numel() // outcome.shape[0])
        if columns != threshold.shape[-1]:
            sides = 2 if self.side == EACH else 1
            raise ValueError(
                f"calibrated on {threshold.shape[-1] // sides} outputs, but the model now gives "
                f"{columns // sides}"
            )
        lower, upper = ends_at(self._scorer, out, threshold)
        if self.support is not None:
            lower, upper = self.support.cut(lower, upper)
        if lower.device != outcome.device:
            lower, upper = lower.to(outcome.device), upper.to(outcome.device)
        shape = (len(threshold), *outcome.shape) if has_levels else outcome.shape
        if lower.shape != shape:
            lower, upper = lower.reshape(shape), upper.reshape(shape)
        return Interval(lower, upper, outcome)

    def _warn_of_infinite(self, alpha: Any, infinite: Table, rows: int, pac: Any = None) -> None:
        metadata = infinite.columns
        some = f"{len(infinite)} of {rows} bands are"
        what = some if self.calibration.is_local else "the band is"
        if pac is None:
            why = self._why_infinite(alpha, metadata)
        else:
            each = " in each group" if self.calibration.takes_groups else ""
            why = (
                f": alpha={float(alpha):g} with pac={float(pac):g} needs at least "
                f"{rows_needed(alpha, pac)} calibration points{each}"
            )
        if self.missing and needs_whole_rows(self.joint):
            why += (
                f". With joint={self.joint!r} only rows without a missing target calibrate: "
                "joint='known' covers known outputs, and takes all rows"
            )
        warn(f"{what} infinite{why}")

    def _must_be_settled(self) -> None:
        """Raise if something must be chosen before there are scores at all."""
        if self._scorer.is_open:
            raise RuntimeError(
                f"{self._scorer.what_is_open} is not chosen yet: call calibrate(x, y) first, or "
                "give it when the predictor is made"
            )


def _blocks(out: BatchOutput, levels: int = 1) -> Iterator[tuple[BatchOutput, slice]]:
    """Cut what a pass saw, so that float64 intermediates stay small beside the result."""
    rows, numbers = len(out.rows), levels * out.output.numel()
    if numbers <= _BLOCK:
        yield out, slice(0, rows)
        return
    size = max(1, _BLOCK * rows // numbers)
    for start in range(0, rows, size):
        part = slice(start, min(start + size, rows))
        yield forward.part_of(out, part), part
