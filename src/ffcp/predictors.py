"""The named methods: each a thin composition of base band, slack and quantile."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ffcp import bands, files
from ffcp.bands import Base, Interval
from ffcp.calibrated import Calibrated
from ffcp.choose import Candidate, Choice, Chooser, Trial
from ffcp.conformal.rank import exact_alpha
from ffcp.errors import FFCPWarning
from ffcp.network import checks, inputs, jacobian, passes
from ffcp.network.features import OUTPUT, candidates, resolve
from ffcp.notes import GroupNotes, Notes, Pairs, Points, group_labels
from ffcp.quantiles import ScoreBuffer

AUTO = "auto"
BONFERRONI = "bonferroni"
# How the outputs of a row are covered: each on its own (False), all at once (True), at least a
# share of them at once (a number), or all at once by a union bound ("bonferroni").
Joint = bool | float | str
# What looks up thresholds, given inputs, what the model said of them, and where they stand.
Thresholds = Callable[[Any, Sequence[Tensor], slice], Tensor]
_BLOCK = 2**17  # numbers per step of the band arithmetic
_CHOICE_ROWS = 2**16
_MOST_OUTPUTS = 4096  # of a model whose layer is chosen
Self = TypeVar("Self", bound="BandPredictor")


class BandPredictor(Calibrated):
    """What all regression methods share: calibrate, score, predict, merge and save.

    A method says what the base band and the slack of a batch are (:meth:`_base`); everything
    else is here. The model runs in eval mode and is left as it was found.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        joint: Joint = False,
        missing: bool = False,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(model, batch_size)
        self.joint = _checked_joint(joint)
        self.missing = missing

    # -- what a method defines ------------------------------------------------------------

    def _run(self, x: Any, first_row: int) -> tuple[Tensor, ...]:
        """Run the model on rows: all a band needs to know of them, the prediction first."""
        raise NotImplementedError

    def _base(self, *run: Tensor) -> Base:
        """Turn what :meth:`_run` gave into base band and slack, each of shape (n, m)."""
        raise NotImplementedError

    def _outcome(self, prediction: Tensor) -> Tensor:
        """Give what the target is compared with; it has the target's shape."""
        return prediction

    def _sides(self, prediction: Tensor, slack: Tensor) -> Base:
        """Give the base band, of shape (n, m), of the model's output and a slack of its shape."""
        return bands.symmetric(_columns(prediction), _columns(slack))

    def _blocks(self, x: Any) -> Iterator[slice]:
        """Say how many rows :meth:`_run` takes at once; it cuts them into batches itself."""
        yield slice(0, inputs.row_count(x))

    def _features(self) -> list[str]:
        """Name the features whose gradients must stay within their row."""
        return []

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "joint": self.joint, "missing": self.missing}

    # -- calibrating ----------------------------------------------------------------------

    def calibrate(
        self: Self, x: Any, y: Any = None, *, groups: Any = None, update: bool = False
    ) -> Self:
        """Score held-out points; every later band rests on these scores.

        Parameters
        ----------
        x, y
            Inputs and targets, as tensors or arrays; or ``x`` alone, a loader that yields
            pairs ``(x, y)``. The points must not have trained the model.
        groups
            A label for each point (strings or numbers), or a function from a batch of inputs to
            labels: every group then gets a threshold of its own, and the guarantee holds
            inside every group (Mondrian calibration). New points need a label too.
        update
            Add to the scores there are instead of replacing them.

        Returns
        -------
        self
            Unchanged if anything goes wrong on the way.
        """
        with torch.inference_mode(False):  # the scores outlive the caller's inference_mode
            notes = self._notes(groups)
            points = self._run_calibration(notes.watch(self._pairs(x, y)), update)
            result = self._store(points, notes, update)
        self._commit(result)
        return self

    def _notes(self, groups: Any) -> Notes:
        """Say what, besides its score, is noted of every point."""
        return Notes() if groups is None else GroupNotes(groups)

    def _store(self, points: Points, notes: Notes, update: bool) -> Any:
        """Keep the scores; return what is to be committed when all has gone well."""
        (self.calibration.add if update else self.calibration.replace)(
            points.scores, notes.of(points.kept)
        )
        return points.result

    def _run_calibration(self, pairs: Pairs, update: bool) -> Points:
        buffer = ScoreBuffer()
        for scores in self._scores(self._checked(pairs, self._features())):
            buffer.extend(scores)
        if not len(buffer.scores):
            raise ValueError("the calibration data is empty: there are no rows to score")
        return Points(buffer.scores)

    def _commit(self, result: Any) -> None:
        """Take over what calibration found besides scores."""

    def _pairs(self, x: Any, y: Any) -> Pairs:
        """Yield batches with the number of their first row."""
        row = 0
        for batch, target in inputs.pairs(x, y, self.model):
            rows = inputs.row_count(batch)
            if rows:
                self._check_target(target, row)
                yield batch, target, row
            row += rows

    def _check_target(self, y: Tensor, first_row: int = 0) -> None:
        """Refuse NaN, unless it stands for a missing target, and infinity."""
        checks.finite(y.masked_fill(y.isnan(), 0) if self.missing else y, "y", first_row)

    def _checked(self, pairs: Pairs, features: Sequence[str]) -> Pairs:
        """Look for mixed rows in the first batch."""
        for batch, target, row in pairs:
            if not row:
                passes.check_rows(self.model, batch, features)
            yield batch, target, row

    def _scores(self, pairs: Pairs) -> Iterator[Tensor]:
        for x, y, row in pairs:
            for part in self._blocks(x):
                run = self._run(inputs.take(x, part), row + part.start)
                yield self._score(run, y[part]).cpu()

    def _score(self, run: tuple[Tensor, ...], y: Tensor) -> Tensor:
        target = checks.target(y, self._outcome(run[0]))
        return self._reduced(bands.score(self._base(*run), _columns(target)))

    def _reduced(self, scores: Tensor) -> Tensor:
        """Turn the scores (n, m) of all outputs into those that are kept: (n, 1) if joint."""
        return scores if self._per_output else _covering(scores, float(self.joint))

    @property
    def _per_output(self) -> bool:
        """Whether every output has a threshold of its own."""
        return self.joint is False or self.joint == BONFERRONI

    # -- using the calibration ------------------------------------------------------------

    def score(self, x: Any, y: Any) -> Tensor:
        """Return the non-conformity scores of points, in float64.

        Shape (n,) for one output or if they are covered jointly, else the shape of the output.
        """
        self._ready()
        if y is None:
            raise TypeError("score(x, y) needs the targets y")
        ((x, y),) = inputs.pairs(x, y, self.model)
        if not len(y):
            raise ValueError("x has no rows")
        self._check_target(y)
        scores = torch.cat(list(self._scores(iter([(x, y, 0)]))))
        return scores[:, 0] if scores.shape[1] == 1 else scores.view_as(y)

    def predict_interval(self, x: Any, alpha: Any = 0.1, *, groups: Any = None) -> Interval:
        """Give bands that hold the truth with probability at least 1 - alpha.

        Parameters
        ----------
        x
            Inputs, as the model takes them.
        alpha
            Share of misses allowed, in (0, 1). Any value, without calibrating again.
        groups
            The group of each point, if the calibration had groups.

        Returns
        -------
        Interval
            ``(lower, upper, prediction)`` in the shape and type of the model's output.
        """
        exact = exact_alpha(alpha)
        self._must_be_calibrated()
        x = inputs.to_tensors(x, self.model)
        rows = inputs.row_count(x)
        if not rows:
            raise ValueError("x has no rows")
        if self.joint == BONFERRONI:
            exact /= self.calibration.coordinates
        thresholds = self._thresholds(x, exact, groups)
        buffer = inputs.RowBuffer(rows)
        for part in self._blocks(x):
            some = inputs.take(x, part)
            run = self._run(some, part.start)
            buffer.add(self._interval(run, thresholds(some, run, part))._asdict())
        return Interval(*(buffer[name] for name in Interval._fields))

    def _thresholds(self, x: Any, alpha: Fraction, groups: Any) -> Thresholds:
        """Give what looks up the thresholds of some rows, (m,) for all or (n, m) for each."""
        labels = None if groups is None else group_labels(groups, x, inputs.row_count(x))
        found = self.calibration.threshold(alpha, labels)
        return lambda some, run, rows: found if labels is None else found[rows]

    def _interval(self, run: Sequence[Tensor], threshold: Tensor) -> Interval:
        outcome = self._outcome(run[0])
        self._check_outputs(outcome, threshold)
        # In blocks, so that the float64 intermediates stay small beside the result.
        size = max(1, _BLOCK // max(1, outcome[0].numel()))
        blocks = zip(*(part.split(size) for part in run), strict=True)
        buffer = inputs.RowBuffer(len(outcome))
        for number, block in enumerate(blocks):
            own = threshold if threshold.dim() == 1 else threshold[number * size :][:size]
            lower, upper = bands.interval(self._base(*block), own, outcome.dtype)
            buffer.add({"lower": lower, "upper": upper})
        lower, upper = (buffer[name].view_as(outcome) for name in ("lower", "upper"))
        return Interval(lower.to(outcome.device), upper.to(outcome.device), outcome)

    def _check_outputs(self, outcome: Tensor, threshold: Tensor) -> None:
        outputs = outcome[0].numel()
        if self._per_output and outputs != threshold.shape[-1]:
            raise ValueError(
                f"calibrated on {threshold.shape[-1]} outputs, but the model now gives {outputs}"
            )

    def _ready(self) -> None:
        """Raise if the method needs calibration before it can score at all."""

    # -- sharing the calibration ----------------------------------------------------------

    def merge(self: Self, other: BandPredictor) -> Self:
        """Add the scores of another predictor of the same model, calibrated on other points.

        So calibration can be divided over workers and put together here.
        """
        if not isinstance(other, BandPredictor):
            raise TypeError(f"cannot merge a {type(other).__name__}")
        self._must_match(other._settings(), "the predictor to merge")
        if other is self:
            raise ValueError("a predictor cannot be merged with itself: points would count twice")
        self._take_over(other)
        return self

    def _take_over(self, other: Any) -> None:
        self.calibration.add(
            other.calibration.scores,
            other.calibration.labels() if other.calibration.groups else None,
        )


class CP(BandPredictor):
    """Split conformal prediction: one band width for every input.

    Parameters
    ----------
    model
        A trained network; forward returns one tensor with a row per input row.
    joint
        With several outputs: ``False`` covers each on its own with probability 1 - alpha.
        ``True`` covers all of them at once, by the largest of their scores. ``0.9`` (any number
        between 0 and 1) covers at least that share of the outputs of a row at once.
        ``"bonferroni"`` covers all at once too, with a threshold of its own for every output at
        level alpha / m.
    missing
        Whether NaN in ``y`` stands for a target that is not known. Such outputs of a row do not
        calibrate; bands are promised for targets that are known, as if the others did not exist.
    batch_size
        Rows per pass over arrays; by default about 16 MB of input (2 MB of images), at most
        8,192 rows.

    Examples
    --------
    >>> x = torch.linspace(0, 1, 200)[:, None]
    >>> y = 2 * x + 0.1 * torch.sin(50 * x)
    >>> model = nn.Linear(1, 1)  # yours is trained
    >>> band = CP(model).calibrate(x[::2], y[::2]).predict_interval(x[1::2], alpha=0.1)
    >>> band.lower.shape
    torch.Size([100, 1])
    """

    def _run(self, x: Any, first_row: int) -> tuple[Tensor, ...]:
        prediction, _ = passes.run(
            self.model, x, [], batch_size=self.batch_size, first_row=first_row
        )
        return (prediction,)

    def _base(self, *run: Tensor) -> Base:
        return self._sides(run[0], torch.ones((), device=run[0].device))


class FFCP(BandPredictor):
    """Fast feature conformal prediction: the band is as wide as the gradient is long.

    The score of a point is its residual divided by the norm of the gradient of the output with
    respect to a hidden layer (Algorithm 2 of the paper), so every input gets its own band, at
    the price of one backward pass through the layers behind the feature.

    Parameters
    ----------
    model
        A trained network; forward returns one tensor with a row per input row.
    feature
        Where the gradient is taken: a dotted module name, a module, ``"input"``, ``"output"``
        (which is plain CP), ``"auto"``, or a list of candidates for the automatic choice.
        ``"auto"`` tries at most 8 layers spread over the depth, and plain CP.
    norm
        Norm of the gradient: 1, 2 or ``inf``.
    floor
        Smallest slack, for gradients that vanish. A constant; it must not be estimated from
        the calibration data.
    method
        How the gradients of many outputs are taken, see :func:`ffcp.gradient_norms`: ``"auto"``,
        ``"exact"``, ``"coloured"``, ``ffcp.Sketch(probes)`` or ``ffcp.Smooth(sigma, samples)``.
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
        For the automatic choice: the share of the calibration rows that choose and then do not
        calibrate, the level at which lengths are compared, and the seed of the division.
    batch_size
        Rows per pass over arrays; by default about 16 MB of input (2 MB of images), at most
        8,192 rows.

    Attributes
    ----------
    feature : str or None
        The feature in use; ``None`` until the automatic choice is made.
    choice : Choice or None
        What the automatic choice saw and took.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))  # yours is trained
    >>> x = torch.linspace(-2, 2, 400)[:, None]
    >>> y = model(x).detach() + 0.1 * torch.randn(400, 1)
    >>> predictor = FFCP(model, feature="0").calibrate(x[::2], y[::2])
    >>> band = predictor.predict_interval(x[1::2], alpha=0.1)
    >>> (band.upper - band.lower).std() > 0  # not one width for all
    tensor(True)
    """

    def __init__(
        self,
        model: nn.Module,
        feature: str | nn.Module | Sequence[str | nn.Module] = AUTO,
        norm: float = 2,
        floor: float = 1e-6,
        *,
        method: jacobian.Method = jacobian.AUTO,
        joint: Joint = False,
        missing: bool = False,
        choose_fraction: float = 0.2,
        choose_alpha: float = 0.1,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(model, joint=joint, missing=missing, batch_size=batch_size)
        if not (0 < floor < math.inf):
            raise ValueError(f"floor must be a positive number, got {floor}")
        if not 0 < choose_fraction < 1:
            raise ValueError(f"choose_fraction must lie between 0 and 1, got {choose_fraction}")
        exact_alpha(choose_alpha)
        self.norm = jacobian.checked_norm(norm)
        self.method = jacobian.checked_method(method)
        self.floor = floor
        self.choose_fraction = choose_fraction
        self.choose_alpha = choose_alpha
        self.seed = seed
        self.choice: Choice | None = None
        self.feature: str | None = None
        self._candidates: list[str] | None = None  # None: to be found in the model
        self._tried: list[str] = []
        self._automatic = True
        if isinstance(feature, (str, nn.Module)) and feature != AUTO:
            self._automatic = False
            self.feature = resolve(model, feature)
        elif not isinstance(feature, (str, nn.Module)):
            self._candidates = [resolve(model, f) for f in feature]
            if not self._candidates:
                raise ValueError("the list of candidate features is empty")
        if missing and self._automatic:
            raise ValueError("with missing=True name one feature: the choice needs all targets")

    def _features(self) -> list[str]:
        return [self.feature] if self.feature else []

    def _settings(self) -> dict[str, Any]:
        return {
            **super()._settings(),
            "feature": self.feature,
            "norm": float(self.norm),
            "floor": self.floor,
            "gradient": str(self.method),
        }

    def _run(self, x: Any, first_row: int) -> tuple[Tensor, ...]:
        assert self.feature is not None
        prediction, norms = passes.run(
            self.model, x, [self.feature], self.norm, self.batch_size, first_row, self.method
        )
        return prediction, norms[self.feature]

    def _base(self, *run: Tensor) -> Base:
        prediction, norms = run
        return self._sides(prediction, bands.floored(norms, self.floor))

    def _ready(self) -> None:
        if self.feature is None:
            raise RuntimeError(
                "the feature is not chosen yet: call calibrate(x, y) first, or name a feature"
            )

    # -- the automatic choice -------------------------------------------------------------

    def _run_calibration(self, pairs: Pairs, update: bool) -> Points:
        if not self._automatic or (update and self.feature is not None):
            return super()._run_calibration(pairs, update)
        before = self.feature
        try:
            self.feature = None
            return self._choose_and_score(self._checked(pairs, self._candidates or []))
        finally:
            self.feature = before

    def _choose_and_score(self, pairs: Pairs) -> Points:
        chooser: Chooser | None = None
        chosen: Points | None = None
        buffer = ScoreBuffer()
        for batch, target, row in _in_blocks(pairs):
            if chosen is not None:
                for scores in self._scores(iter([(batch, target, row)])):
                    buffer.extend(scores)
                continue
            chooser = chooser or self._chooser(batch)
            self._show(chooser, batch, target, row)
            if chooser.enough:
                chosen = self._chosen(chooser, buffer)
                self.feature = chosen.result.feature
        if chooser is None:
            raise ValueError("the calibration data is empty: there are no rows to score")
        if chosen is None:
            chosen = self._chosen(chooser, buffer)
        return Points(buffer.scores, chosen.kept, chosen.result)

    @staticmethod
    def _chosen(chooser: Chooser, buffer: ScoreBuffer) -> Points:
        choice, scores, kept = chooser.choose()
        buffer.extend(scores)
        return Points(scores, kept, choice)

    def _chooser(self, batch: Any) -> Chooser:
        names = self._candidates
        if names is None:
            names = candidates(self.model, batch)
            passes.check_rows(self.model, batch, names)
        # Plain CP, the model's output, is always a candidate.
        self._tried = [OUTPUT, *(name for name in dict.fromkeys(names) if name != OUTPUT)]
        return Chooser(self.choose_fraction, self.seed, self.choose_alpha)

    def _show(self, chooser: Chooser, x: Any, y: Tensor, row: int) -> None:
        prediction, norms = passes.run(
            self.model, x, self._tried, self.norm, self.batch_size, row, self.method
        )
        target = _columns(checks.target(y, self._outcome(prediction)))
        if target.shape[1] > _MOST_OUTPUTS:
            raise ValueError(
                f"the model has {target.shape[1]} outputs, and the automatic choice keeps the "
                f"scores of all candidates: name one feature above {_MOST_OUTPUTS} outputs"
            )
        trials = {}
        for name in self._tried:
            slack = norms[name] if name == OUTPUT else bands.floored(norms[name], self.floor)
            base = self._sides(prediction, slack)
            slacks = base.slack_lo + base.slack_hi
            scores = self._reduced(bands.score(base, target))
            trials[name] = Trial(scores.cpu(), slacks.cpu())
        chooser.add((base.hi - base.lo).cpu(), trials)

    def _commit(self, result: Choice | None) -> None:
        if result is None:
            return
        self.choice = result
        self.feature = result.feature
        if result.feature == OUTPUT:
            warnings.warn(_why_cp(result), FFCPWarning, stacklevel=3)

    # -- carrying the choice along --------------------------------------------------------

    def _remembered(self) -> dict[str, Any]:
        choice = None if self.choice is None else asdict(self.choice)
        return {**super()._remembered(), "choice": choice}

    def set_extra_state(self, state: Tensor) -> None:
        """Take over the choice that was saved; check all other settings."""
        settings = files.unpack(state)
        if self._automatic:
            self.feature = settings.get("feature")
            choice = settings.get("choice")
            self.choice = None if choice is None else _choice_from(choice)
        self._must_match(settings, "the loaded calibration")


class _TwoQuantiles(BandPredictor):
    """For models that return a lower and an upper quantile in the last dimension."""

    def _outcome(self, prediction: Tensor) -> Tensor:
        if prediction.dim() < 2 or prediction.shape[-1] != 2:
            raise ValueError(
                f"the model's output has shape {tuple(prediction.shape)}; a quantile method needs "
                "two outputs per target, the lower and the upper quantile, in the last dimension: "
                "(n, 2), or (n, m, 2) for m targets. For a point prediction use CP or FFCP"
            )
        return prediction.mean(dim=-1)

    def _sides(self, prediction: Tensor, slack: Tensor) -> Base:
        base = bands.two_sided(prediction, slack)
        return Base(*(_columns(part) for part in base))


class CQR(_TwoQuantiles, CP):
    """Conformalized quantile regression (Romano, Patterson and Candes, 2019).

    The model returns two quantiles of the target; calibration moves both ends by the same
    amount, outward where they cover too little and inward where they cover too much.

    Parameters
    ----------
    model
        A trained network whose output has shape (n, 2), lower and upper quantile, or (n, m, 2)
        for m targets. See :func:`ffcp.pinball_loss`. Quantiles that cross are put in order.
    joint, batch_size
        As in :class:`CP`.

    Notes
    -----
    ``prediction`` of the band is the middle of the two quantiles. A band that would shrink to
    less than nothing is returned as a point.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Linear(3, 2)  # yours is trained
    >>> band = CQR(model).calibrate(torch.randn(200, 3), torch.randn(200)).predict_interval(
    ...     torch.randn(5, 3), alpha=0.1
    ... )
    >>> band.lower.shape
    torch.Size([5])
    """


class FFCQR(_TwoQuantiles, FFCP):
    """CQR with the gradient norm of each quantile as its slack (the paper's FFCQR).

    Parameters are those of :class:`FFCP`; the model is one for :class:`CQR`. The norms of both
    quantiles come from the same forward pass.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))  # yours is trained
    >>> predictor = FFCQR(model, feature="0").calibrate(torch.randn(200, 3), torch.randn(200))
    >>> predictor.predict_interval(torch.randn(5, 3)).upper.shape
    torch.Size([5])
    """


def _checked_joint(joint: Joint) -> Joint:
    if isinstance(joint, bool) or joint == BONFERRONI:
        return joint
    if isinstance(joint, float) and 0 < joint <= 1:
        return joint == 1 or joint
    raise ValueError(
        "joint must be False, True, a share of the outputs between 0 and 1, or 'bonferroni', "
        f"got {joint!r}"
    )


def _covering(scores: Tensor, share: float) -> Tensor:
    """Give for each row the smallest threshold that covers this share of its known outputs.

    >>> scores = torch.tensor([[1.0, 4.0, 2.0, 3.0], [5.0, torch.nan, 6.0, torch.nan]])
    >>> _covering(scores, 0.75)[:, 0], _covering(scores, 1)[:, 0]
    (tensor([3., 6.]), tensor([4., 6.]))
    """
    known = (~scores.isnan()).sum(dim=1)
    if share == 1:
        largest = scores.nan_to_num(-math.inf, math.inf).amax(dim=1)
    else:
        exact = exact_alpha(share)
        ranks = {count: math.ceil(exact * count) for count in known.unique().tolist()}
        place = torch.tensor([ranks[count] for count in known.tolist()], device=scores.device)
        in_order = scores.sort(dim=1).values  # NaN comes last
        largest = in_order.gather(1, (place - 1).clamp_min(0)[:, None])[:, 0]
    return largest.masked_fill(known == 0, math.nan)[:, None]


def _in_blocks(pairs: Pairs) -> Pairs:
    """Cut large arrays, so that choosing can stop early there as in a stream."""
    for x, y, row in pairs:
        for start in range(0, len(y), _CHOICE_ROWS):
            rows = slice(start, start + _CHOICE_ROWS)
            yield inputs.take(x, rows), y[rows], row + start


def _why_cp(choice: Choice) -> str:
    cp = choice.candidates[OUTPUT]
    others = {name: c for name, c in choice.candidates.items() if name != OUTPUT}
    if not others:
        return "plain CP is used: no layer of this model passes a gradient to the output"
    name = min(others, key=lambda key: others[key].mean_length)
    best = others[name]
    return (
        f"plain CP was chosen: on {choice.rows} rows set aside no layer gave shorter bands (best: "
        f"{name!r} with mean length {best.mean_length:.4g} against {cp.mean_length:.4g}). The "
        "gradient says little about the noise here: its rank correlation with the residual is "
        f"{best.rank_correlation:+.2f}"
    )


def _choice_from(saved: Mapping[str, Any]) -> Choice:
    shown = {name: Candidate(**values) for name, values in saved["candidates"].items()}
    return Choice(saved["feature"], shown, saved["rows"], saved["alpha"])


def _columns(values: Tensor) -> Tensor:
    """Lay out values as (rows, outputs); a single number stays one."""
    return values.reshape(len(values), -1) if values.dim() else values
