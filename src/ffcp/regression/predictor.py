"""Bands from a family and a calibration: score, predict_interval, once for all methods."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import Table, take
from ffcp.conformal.marginal import Marginal
from ffcp.conformal.rank import exact_alpha
from ffcp.network import checks, inputs
from ffcp.network.picking import Output
from ffcp.pieces import Seen
from ffcp.predictor import Predictor, steady
from ffcp.recipes import public
from ffcp.regression.bands import Interval
from ffcp.regression.bases import Base, Point
from ffcp.regression.family import Family, SlackBands
from ffcp.regression.joint import BONFERRONI, Joint, checked_joint, has_own_thresholds
from ffcp.regression.layers import Choice
from ffcp.regression.slacks import as_slack

_BLOCK = 2**17  # numbers per step of the float64 arithmetic
Self = TypeVar("Self", bound="BandPredictor")


class BandPredictor(Predictor):
    """A family of nested bands and a calibration that says which of them covers."""

    task = "bands"
    _scorer: Family

    def __init__(
        self,
        model: nn.Module,
        family: Family,
        calibration: Calibration | None = None,
        *,
        missing: bool = False,
        choose_fraction: float = 0.2,
        choose_alpha: float = 0.1,
        seed: int | None = None,
        batch_size: int | None = None,
        output: Output = None,
    ) -> None:
        calibration = Marginal() if calibration is None else calibration
        if missing and not calibration.takes_missing:
            raise ValueError(
                f"{type(calibration).__name__} needs all targets: leave out missing=True, and "
                "rows whose target is not known"
            )
        self.joint, self.missing = family.joint, missing
        super().__init__(
            model,
            family,
            calibration,
            choose_fraction=choose_fraction,
            choose_alpha=choose_alpha,
            seed=seed,
            batch_size=batch_size,
            output=output,
        )

    def _own_settings(self) -> dict[str, Any]:
        return {"joint": self.joint, "missing": self.missing}

    def _checked_target(self, y: Tensor, first_row: int) -> Tensor:
        """Refuse NaN, unless it stands for a missing target, and infinity."""
        checks.finite(y.masked_fill(y.isnan(), 0) if self.missing else y, "y", first_row)
        return y

    def alpha_of_each(self, alpha: Any, thresholds: int) -> Fraction:
        """Give the share of misses that each of several thresholds allows."""
        exact = exact_alpha(alpha)
        return exact / thresholds if self.joint == BONFERRONI else exact

    @property
    def _takes_nan(self) -> bool:
        return self.missing

    def _check_points(self) -> None:
        super()._check_points()
        if not has_own_thresholds(self.joint) and self.calibration.coordinates > 1:
            raise ValueError("it has several scores for outputs that are covered jointly")

    # -- using the calibration --------------------------------------------------------------

    @steady
    def score(self, x: Any, y: Any = None) -> Tensor:
        """Return the non-conformity scores of points, in float64.

        ``x`` may be a loader of pairs ``(x, y)``, passed alone. Shape (n,) for one output or if
        they are covered jointly, else the shape of the output.
        """
        self._must_be_settled()
        buffer, shape = inputs.RowBuffer(None), torch.Size()
        for seen, target in self._targeted(x, y):
            for part, rows in _blocks(seen):
                buffer.add({"score": self._scorer.note(part, target[rows])["score"]})
            shape = target.shape[1:]
        scores = buffer["score"].cpu()
        return scores[:, 0] if scores.shape[1] == 1 else scores.view(-1, *shape)

    def forward(self, x: Any, alpha: Any = 0.1, *, groups: Any = None) -> Interval:
        """Give bands, as :meth:`predict_interval` does: ``predictor(x)``."""
        return self.predict_interval(x, alpha, groups=groups)

    @steady
    def predict_interval(
        self, x: Any, alpha: Any = 0.1, *, groups: Any = None, first_row: int | None = None
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
            Share of misses allowed, in (0, 1). Any value, without calibrating again.
        groups
            The group of each point, if the calibration had groups.
        first_row
            For randomised methods, and a job that must be repeated exactly: the number of the
            first row of ``x`` in it. By default random numbers go on from call to call.

        Returns
        -------
        Interval
            ``(lower, upper, prediction)`` in the shape and type of the model's output. Where the
            calibration says too little about a point its band is infinite, and a warning says
            what to do.
        """
        exact_alpha(alpha)  # what is no level is refused first
        self._must_be_calibrated()
        exact = self.alpha_of_each(alpha, self.calibration.coordinates)
        given = self._rows(x)
        buffer, infinite = inputs.RowBuffer(given.count), Table()
        for seen, notes, thresholds in self._looked_up(given, exact, groups, first_row):
            lost = thresholds.isinf().any(dim=-1).expand(len(seen.rows))
            if bool(lost.any()):
                infinite.add(take(notes, lost))
            for part, rows in _blocks(seen):
                own = thresholds if thresholds.dim() == 1 else thresholds[rows]
                buffer.add(self._band(part, own)._asdict())
        if len(infinite):
            assert given.count is not None
            self._warn_of_infinite(exact, infinite, given.count)
        return Interval(*(buffer[name] for name in Interval._fields))

    def _band(self, seen: Seen, threshold: Tensor) -> Interval:
        outcome = self._scorer.prediction(seen.output)
        outputs = outcome[0].numel()
        if has_own_thresholds(self.joint) and outputs != threshold.shape[-1]:
            raise ValueError(
                f"calibrated on {threshold.shape[-1]} outputs, but the model now gives {outputs}"
            )
        lower, upper = self._scorer.interval(seen, threshold)
        lower, upper = (end.to(outcome.device).reshape(outcome.shape) for end in (lower, upper))
        return Interval(lower, upper, outcome)

    def _warn_of_infinite(self, alpha: Any, infinite: Table, rows: int) -> None:
        notes = infinite.columns
        some = f"{len(infinite)} of {rows} bands are"
        what = some if self.calibration.is_local else "the band is"
        self._warn(f"{what} infinite{self._why_infinite(alpha, notes)}")

    def _must_be_settled(self) -> None:
        """Raise if something must be chosen before there are scores at all."""
        if self._scorer.is_open:
            raise RuntimeError(
                f"{self._scorer.what_is_open} is not chosen yet: call calibrate(x, y) first, or "
                "give it when the predictor is made"
            )


@public
class Bands(BandPredictor):
    """Prediction bands put together from pieces: a base, a slack and a calibration.

    Every named regression method is such a combination: ``CP`` is ``Point`` with ``Constant``
    and ``Marginal``, ``FFLCQR`` is ``Quantiles`` with ``GradientNorm`` and ``Local``.

    Parameters
    ----------
    model
        A trained network; forward returns one tensor with a row per input row.
    base
        Which outputs are the ends of the band: :class:`ffcp.Point` (the default) or
        :class:`ffcp.Quantiles`.
    slack
        How wide one unit of the threshold is at each input: :class:`ffcp.Constant` (the
        default), :class:`ffcp.GradientNorm`, any function of what one pass saw
        (:class:`ffcp.Seen`), or a list of them to choose from.
    calibration
        How scores are kept and thresholds looked up: :class:`ffcp.Marginal` (the default),
        :class:`ffcp.Mondrian` or :class:`ffcp.Local`.
    joint
        With several outputs: ``False`` covers each on its own with probability 1 - alpha.
        ``True`` covers all of them at once, by the largest of their scores. ``0.9`` (any number
        between 0 and 1) covers at least that share of the outputs of a row at once.
        ``"bonferroni"`` covers all at once too, with a threshold of its own for every output at
        level alpha / m.
    missing
        Whether NaN in ``y`` stands for a target that is not known. Such outputs of a row do not
        calibrate; bands are promised for targets that are known, as if the others did not exist.
    choose_fraction, choose_alpha, seed
        Where something is left open: the share of the calibration rows that choose it and then
        do not calibrate, the level at which candidates are compared, and the seed of the
        division.
    batch_size
        Rows per pass over arrays; by default about 16 MB of input (2 MB of images), at most
        8,192 rows.
    output
        Which part of what the model returns is the prediction, if it returns a tuple, a dict or
        the like: a key (``"logits"``), an index, or a function of what it returns.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = nn.Linear(2, 1), torch.randn(300, 2), torch.randn(300)  # yours is trained
    >>> predictor = Bands(model, slack=lambda seen: 1 + seen.output.abs()).calibrate(x, y)
    >>> predictor.predict_interval(x[:5], alpha=0.1).lower.shape
    torch.Size([5, 1])
    """

    def __init__(
        self,
        model: nn.Module,
        base: Base | None = None,
        slack: Any = None,
        calibration: Calibration | None = None,
        *,
        joint: Joint = False,
        missing: bool = False,
        choose_fraction: float = 0.2,
        choose_alpha: float = 0.1,
        seed: int | None = None,
        batch_size: int | None = None,
        output: Output = None,
    ) -> None:
        super().__init__(
            model,
            SlackBands(base or Point(), as_slack(slack), checked_joint(joint)),
            calibration,
            missing=missing,
            choose_fraction=choose_fraction,
            choose_alpha=choose_alpha,
            seed=seed,
            batch_size=batch_size,
            output=output,
        )

    @property
    def slack(self) -> Any:
        """The slack in use."""
        return self._family.slack

    @property
    def feature(self) -> str | None:
        """The layer whose gradient is taken; ``None`` until it is chosen, or if there is none."""
        feature: str | None = getattr(self.slack, "feature", None)
        return feature

    @property
    def choice(self) -> Choice | None:
        """What the automatic choice of the slack saw and took."""
        choice: Choice | None = self._choices.get("layer")
        return choice

    @property
    def _family(self) -> SlackBands:
        assert isinstance(self._scorer, SlackBands)
        return self._scorer

    def _fit_calibration(self, x: Any, y: Any, planned: int | None) -> None:
        """Choose what the calibration leaves open on points of their own."""
        self._must_be_settled()
        _, calibration = self._given
        with torch.inference_mode(False):
            ((x, y),) = inputs.pairs(x, y, inputs.Reader(self.model))
            order = np.random.default_rng(self.seed or 0).permutation(len(y))
            order = order[: calibration.most_rows]
            picked = torch.from_numpy(np.sort(order))
            run, table = self._calibrating(self._scorer, calibration, update=False), Table()
            for batch in self._batches(inputs.take(x, picked), y[picked], None):
                table.add(run.note(batch))
            run.choose_calibration(table.columns, planned or len(y))
        self._given = (self._given[0], run.calibration)
        self._fitted.update(run.choices)
        if not len(self.calibration):
            self.calibration = run.calibration.empty()
            self._choices.update(run.choices)


def _blocks(seen: Seen) -> Iterator[tuple[Seen, slice]]:
    """Cut what a pass saw, so that float64 intermediates stay small beside the result."""
    rows = len(seen.rows)
    size = max(1, _BLOCK // max(1, seen.output[0].numel()))
    if rows <= size:
        yield seen, slice(0, rows)
        return
    for start in range(0, rows, size):
        part = slice(start, min(start + size, rows))
        yield _part(seen, part), part


def _part(seen: Seen, rows: slice) -> Seen:
    return Seen(
        inputs.take(seen.x, rows),
        seen.output[rows],
        {name: norms[rows] for name, norms in seen.norms.items()},
        {name: values[rows] for name, values in seen.values.items()},
        seen.rows[rows],
        None,
    )


__all__ = ["BandPredictor", "Bands"]
