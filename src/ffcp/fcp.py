"""FCP and FCQR: the score is a distance in feature space, the band bounds the head over a ball.

The opponents of FFCP. Each point to score needs an optimisation (:mod:`ffcp.surrogate`), each
band a propagation of bounds (:mod:`ffcp.bounds`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ffcp import bounds, files, surrogate
from ffcp.bands import Interval, as_float64
from ffcp.bounds import Bounds
from ffcp.choose import RowSplit
from ffcp.conformal.rank import exact_alpha
from ffcp.errors import FFCPWarning
from ffcp.metrics import Coverage
from ffcp.network import checks, heads, inputs, passes
from ffcp.network.features import resolve, undisturbed
from ffcp.notes import Pairs, Points
from ffcp.pieces import Needs
from ffcp.predictors import BONFERRONI, BandPredictor, Joint
from ffcp.quantiles import ScoreBuffer

#: The numbers of descent steps that ``steps=None`` chooses from.
STEP_COUNTS = (1, 2, 3, 5, 8, 12, 20, 30, 50, 80, 120, 200)
_ENOUGH_ROWS = 1000
_MOST_OUTPUTS = 4096  # that are inverted one by one
_BOUNDS: dict[str, Callable[..., Bounds]] = {"ibp": bounds.ibp, "crown": bounds.crown}

_Chosen = tuple[Tensor, Tensor, Tensor]  # prediction, feature and target of some rows


class FCP(BandPredictor):
    """Feature conformal prediction (Teng et al., 2022), the slow method that FFCP replaces.

    The score of a point is the distance from its feature to the nearest feature for which the
    head says y; the band is a bound on the head over the ball whose radius is the threshold.

    Parameters
    ----------
    model
        A trained network with one input tensor.
    feature
        Where to cut: a dotted module name, a module, or ``"input"``. Nothing but the feature may
        pass the cut.
    norm
        Norm of the ball: ``inf`` (as in the paper) or 2.
    bound
        ``"ibp"`` (as in the paper) or ``"crown"``, which is tighter and slower.
    invert
        ``"descent"``, as in the paper: gradient descent, stopped after ``steps`` steps.
        ``"exact"``: until the head provably takes the value y within the distance.
    steps, lr, optimizer
        Of the descent. ``steps=None`` chooses the number on a part of the calibration data that
        is then left out of the scores; ``optimizer`` is ``"sgd"`` or ``"adam"``.
    head
        The module from feature to output, if it cannot be read out of the model.
    joint
        With several outputs: ``False`` inverts each on its own and gives it a threshold, so that
        each is covered with probability 1 - alpha; ``"bonferroni"`` does so at alpha / m and
        covers all at once. ``True`` has one ball for all outputs: with ``"descent"`` the feature
        moves until all outputs say y at once, as in the paper; with ``"exact"`` its radius is the
        largest of the distances of the outputs, so that the box provably covers. A share, as
        0.9, asks for that share of the outputs (``"exact"`` only).
    missing
        Whether NaN in ``y`` stands for a target that is not known.
    choose_fraction, choose_alpha, seed
        Of the choice of ``steps``.
    batch_size
        Rows per batch; by default at most 8,192.

    Attributes
    ----------
    steps : int or None
        The number of steps in use.
    step_coverage : dict
        For each number of steps tried, the coverage of its bands on the choosing points.
    unconverged : list of int
        The rows of the last calibration that the exact inversion gave up, counted from 0. They
        count as infinitely far.

    Notes
    -----
    With ``invert="exact"`` the band covers y with probability at least 1 - alpha. With
    ``"descent"`` only the *feature-space* coverage (:meth:`feature_coverage`) has that
    guarantee: stopped early, the feature reached does not give y, its distance is too small, and
    so is the ball. A loose bound hides this; a tight one shows it. Report both coverages.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), nn.Linear(8, 1))  # yours is trained
    >>> x = torch.randn(100, 2)
    >>> y = model(x).detach()[:, 0] + 0.02 * torch.randn(100)
    >>> predictor = FCP(model, "0", invert="exact").calibrate(x, y)
    >>> band = predictor.predict_interval(x, alpha=0.1)
    >>> bool(((band.lower[:, 0] <= y) & (y <= band.upper[:, 0])).double().mean() >= 0.9)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        feature: str | nn.Module,
        *,
        norm: float = math.inf,
        bound: str = "ibp",
        invert: str = "descent",
        steps: int | None = None,
        lr: float = 0.01,
        optimizer: str = "sgd",
        head: nn.Module | None = None,
        joint: Joint = False,
        missing: bool = False,
        choose_fraction: float = 0.2,
        choose_alpha: float = 0.1,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(model, joint=joint, missing=missing, batch_size=batch_size)
        if isinstance(self.joint, float) and invert == "descent":
            raise ValueError("a share of the outputs needs invert='exact'; or take joint=True")
        if norm not in (2, math.inf):
            raise ValueError(f"norm must be 2 or float('inf'), got {norm!r}")
        if bound not in _BOUNDS:
            raise ValueError(f"bound must be 'ibp' or 'crown', got {bound!r}")
        if invert not in ("descent", "exact"):
            raise ValueError(f"invert must be 'descent' or 'exact', got {invert!r}")
        if steps is not None and steps < 1:
            raise ValueError(f"steps must be at least 1, or None to choose it, got {steps}")
        if not 0 < lr < math.inf:
            raise ValueError(f"lr must be a positive number, got {lr}")
        if not 0 < choose_fraction < 1:
            raise ValueError(f"choose_fraction must lie between 0 and 1, got {choose_fraction}")
        if optimizer not in surrogate.OPTIMIZERS:
            known = ", ".join(surrogate.OPTIMIZERS)
            raise ValueError(f"optimizer must be one of {known}, got {optimizer!r}")
        exact_alpha(choose_alpha)
        self.feature = resolve(model, feature)
        self.norm, self.bound, self.invert = norm, bound, invert
        self.lr, self.optimizer = lr, optimizer
        self.choose_fraction, self.choose_alpha, self.seed = choose_fraction, choose_alpha, seed
        self.steps = steps
        self._search = steps is None and invert == "descent"
        self.step_coverage: dict[int, float] = {}
        self.unconverged: list[int] = []
        with undisturbed(model):  # so that tracing sees dropout switched off
            cut = heads.head(model, self.feature) if head is None else head
        # In a list, which hides them from state_dict: the model holds these parameters already.
        self._head = [cut]
        self._traced = [bounds.trace(cut)]

    def _features(self) -> list[str]:
        return [self.feature]

    def _settings(self) -> dict[str, Any]:
        return {
            **super()._settings(),
            "feature": self.feature,
            "norm": float(self.norm),
            "bound": self.bound,
            "invert": self.invert,
            "steps": self.steps,
            "lr": self.lr,
            "optimizer": self.optimizer,
        }

    def set_extra_state(self, state: Tensor) -> None:
        """Take over the number of steps that was saved; check all other settings."""
        settings = files.unpack(state)
        if self._search:
            self.steps = settings.get("steps")
        self._must_match(settings, "the loaded calibration")

    # -- one batch ------------------------------------------------------------------------

    def _blocks(self, x: Any) -> Iterator[slice]:
        # Features are large; one batch of them at a time.
        rows = inputs.row_count(x)
        size = self.batch_size or inputs.default_batch(x, rows)
        return (slice(start, start + size) for start in range(0, rows, size))

    def _run(self, x: Any, first_row: int) -> tuple[Tensor, ...]:
        seen = passes.see(self.model, x, Needs(values=(self.feature,)), first_row)
        prediction, v = seen.output, seen.values[self.feature]
        if not first_row:
            self._check_head(prediction[:8], v[:8])
        return prediction, v

    @contextmanager
    def _head_at_rest(self) -> Iterator[nn.Module]:
        """Give the head in eval mode with frozen parameters."""
        with ExitStack() as stack:
            stack.enter_context(undisturbed(self.model))
            stack.enter_context(undisturbed(self._head[0]))
            yield self._head[0]

    def _check_head(self, prediction: Tensor, v: Tensor) -> None:
        with self._head_at_rest() as head, torch.no_grad():
            again = head(v)
        if again.shape != prediction.shape or not torch.allclose(
            again, prediction, rtol=1e-2, atol=1e-3 * float(prediction.abs().max())
        ):
            raise ValueError(
                f"the head behind {self.feature!r} does not give the model's output from the "
                "feature alone: cut elsewhere, or pass the right head=..."
            )

    def _distance(
        self, v: Tensor, y: Tensor, columns: Tensor | None, steps: Sequence[int]
    ) -> Tensor:
        """Distance to y, (n, outputs), or in a column (n, 1) each, after each number of steps."""
        with self._head_at_rest() as head:

            def chosen(moving: Tensor) -> Tensor:
                outputs: Tensor = head(moving)
                outputs = outputs.reshape(len(moving), -1)
                return outputs if columns is None else outputs.gather(1, columns)

            y = y.to(v)
            if self.invert == "exact":
                return surrogate.exact_distance(
                    lambda moving: chosen(moving)[:, 0], v, y[:, 0], norm=self.norm
                )[None]
            return surrogate.descend(
                chosen, v, y, steps, lr=self.lr, norm=self.norm, optimizer=self.optimizer
            )

    def _ball_bounds(self, v: Tensor, radius: Tensor) -> Bounds:
        """Bounds on the head's outputs, (n, outputs), over a ball around each row."""
        with self._head_at_rest():
            low, high = _BOUNDS[self.bound](self._traced[0], v, radius.to(v), self.norm)
        # The bounds round as the head does; widen them by more than that.
        guard = 32 * torch.finfo(low.dtype).eps * (low.abs() + high.abs())
        guard = guard.nan_to_num(0.0, 0.0)
        rows = len(v)
        return Bounds((low - guard).reshape(rows, -1), (high + guard).reshape(rows, -1))

    # -- scores and bands -----------------------------------------------------------------

    def _score(self, run: tuple[Tensor, ...], y: Tensor) -> Tensor:
        prediction, v = run
        target = checks.target(y, self._outcome(prediction)).reshape(len(y), -1)
        return as_float64(self._scores_after(prediction, v, target, [self.steps or 1])[0])

    def _scores_after(
        self, prediction: Tensor, v: Tensor, y: Tensor, steps: Sequence[int]
    ) -> Tensor:
        """Scores (len(steps), n, outputs or 1) after each number of steps."""
        if self._one_ball and self.invert == "descent":
            return self._distance(v, y, None, steps)[..., None]
        return torch.stack([self._reduced(s) for s in self._each_distance(v, y, steps)])

    @property
    def _one_ball(self) -> bool:
        """Whether all outputs of a row share one radius."""
        return not self._per_output

    def _each_distance(self, v: Tensor, y: Tensor, steps: Sequence[int]) -> Tensor:
        """Give the distances (len(steps), n, outputs) of every output on its own."""
        rows, outputs = y.shape
        if outputs > _MOST_OUTPUTS:
            raise ValueError(
                f"FCP would have to invert each of {outputs} outputs on its own: take joint=True "
                "with invert='descent', which inverts all of them at once"
            )
        counts = len(steps) if self.invert == "descent" else 1
        found = v.new_empty(counts, rows, outputs)
        for column in range(outputs):
            place = torch.full((rows, 1), column, device=v.device)
            found[..., column] = self._distance(v, y[:, column : column + 1], place, steps)
        # The distance of a missing target means nothing.
        return found.masked_fill(y.isnan().to(found.device), math.nan)

    def _interval(self, run: Sequence[Tensor], threshold: Tensor) -> Interval:
        prediction, v = run
        outcome = self._outcome(prediction)
        self._check_outputs(outcome, threshold)
        radius = threshold.expand(len(v), threshold.shape[-1])
        lower, upper = self._ends(prediction, v, radius)
        return Interval(lower.view_as(outcome), upper.view_as(outcome), outcome)

    def _ends(self, prediction: Tensor, v: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        """Give the ends of the bands, (n, outputs) each, for thresholds (n, outputs or 1)."""
        if radius.shape[1] == 1:
            return self._ball_bounds(v, radius[:, 0])
        # Each output has a ball of its own, and of its bounds only that output counts.
        ends = [self._ball_bounds(v, own) for own in radius.T]
        lower, upper = (
            torch.stack([end[side][:, column] for column, end in enumerate(ends)], dim=1)
            for side in (0, 1)
        )
        return lower, upper

    def feature_coverage(self, x: Any, y: Any, alpha: Any = 0.1) -> Coverage:
        """Measure coverage in feature space: the share of points whose score is in the ball.

        This is what the published code reports beside the length of the *output* band, though
        it describes another object: with an inversion stopped early, a point can be covered
        here and missed by its band. Compare with ``metrics.coverage`` of the band.
        """
        exact = exact_alpha(alpha)
        if self.joint == BONFERRONI:
            exact /= self.calibration.coordinates
        scores = self.score(x, y)
        scores = scores.reshape(len(scores), -1)
        inside = (scores <= self.calibration.threshold(exact)).double()
        inside = inside.amin(dim=1) if self.joint == BONFERRONI else inside
        return Coverage(float(inside.mean()), len(inside))

    # -- calibrating ----------------------------------------------------------------------

    def _ready(self) -> None:
        if self._search and self.steps is None:
            raise RuntimeError("the number of steps is not chosen yet: call calibrate(x, y) first")

    def _run_calibration(self, pairs: Pairs, update: bool) -> Points:
        if not self._search or (update and self.steps is not None):
            scores, kept, _ = super()._run_calibration(pairs, update)
            lost = scores.isinf().any(dim=1).nonzero()[:, 0].tolist()
            return Points(scores, kept, (self.steps, self.step_coverage, lost))
        before, self.steps = self.steps, None
        try:
            scores, kept, coverage = self._choose_and_score(pairs)
            return Points(scores, kept, (self.steps, coverage, []))
        finally:
            self.steps = before

    def _commit(self, result: tuple[int | None, dict[int, float], list[int]]) -> None:
        self.steps, self.step_coverage, self.unconverged = result
        if self.unconverged:
            rows = ", ".join(map(str, self.unconverged[:5]))
            more = ", ..." if len(self.unconverged) > 5 else ""
            warnings.warn(
                f"the inversion found no feature that gives y for {len(self.unconverged)} "
                f"calibration points (rows {rows}{more}); they count as infinitely far, which "
                "widens the bands",
                FFCPWarning,
                stacklevel=3,
            )

    def _choose_and_score(self, pairs: Pairs) -> Points:
        split = RowSplit(self.choose_fraction, self.seed)
        kept: list[Tensor] = []
        waiting: list[tuple[Any, Tensor, int]] = []
        chosen: list[_Chosen] = []
        buffer = ScoreBuffer()
        coverage: dict[int, float] = {}
        for piece in self._checked(pairs, self._features()):
            pieces = [piece]
            if not coverage:
                waiting.append(self._set_aside(piece, split, chosen, kept))
                if sum(len(target) for _, _, target in chosen) < _ENOUGH_ROWS:
                    continue
                coverage, pieces, waiting = self._choose_steps(chosen), waiting, []
            for scores in self._scores(iter(pieces)):
                buffer.extend(scores)
        if not coverage:
            coverage = self._choose_steps(self._enough(chosen, kept))
            for scores in self._scores(iter(waiting)):
                buffer.extend(scores)
        return Points(buffer.scores, torch.cat(kept), coverage)

    @staticmethod
    def _enough(chosen: list[_Chosen], kept: list[Tensor]) -> list[_Chosen]:
        if not kept:
            raise ValueError("the calibration data is empty: there are no rows to score")
        if not chosen:
            raise ValueError(
                "too few rows to choose the number of steps on some and calibrate on the rest: "
                "give more rows, or steps=..."
            )
        return chosen

    def _set_aside(
        self,
        piece: tuple[Any, Tensor, int],
        split: RowSplit,
        chosen: list[_Chosen],
        kept: list[Tensor],
    ) -> tuple[Any, Tensor, int]:
        """Move the choosing rows of a piece to ``chosen``; return the others."""
        x, y, row = piece
        mask = split.mask(len(y))
        kept.append(~mask)
        if mask.any():
            prediction, v = self._run(inputs.take(x, mask), row)
            target = checks.target(y[mask], self._outcome(prediction))
            chosen.append((prediction, v, target.reshape(len(target), -1)))
        return inputs.take(x, ~mask), y[~mask], row

    def _choose_steps(self, chosen: list[_Chosen]) -> dict[int, float]:
        """Set ``steps`` to the smallest number whose bands cover enough of the chosen rows.

        One trajectory, and one sweep of bounds over all numbers of steps at once.
        """
        prediction, v, y = (torch.cat(part) for part in zip(*chosen, strict=True))
        scores = torch.cat(
            [
                self._scores_after(prediction[rows], v[rows], y[rows], STEP_COUNTS)
                for rows in self._blocks(v)
            ],
            dim=1,
        )
        level = 1 - exact_alpha(self.choose_alpha)
        rank = max(1, math.ceil(len(y) * level))
        thresholds = scores.nan_to_num(-math.inf, math.inf).kthvalue(rank, dim=1).values
        coverage = {
            count: self._chosen_coverage(prediction, v, y, threshold)
            for count, threshold in zip(STEP_COUNTS, thresholds, strict=True)
        }
        enough = [count for count, share in coverage.items() if share >= float(level)]
        self.steps = enough[0] if enough else STEP_COUNTS[-1]
        return coverage

    def _chosen_coverage(
        self, prediction: Tensor, v: Tensor, y: Tensor, threshold: Tensor
    ) -> float:
        """Measure the share of known targets, or of rows if all count at once, in the bands."""
        hits = torch.zeros((), dtype=torch.float64)
        known = torch.zeros((), dtype=torch.float64)
        for rows in self._blocks(v):
            radius = threshold.expand(len(v[rows]), len(threshold))
            lower, upper = self._ends(prediction[rows], v[rows], radius)
            target = y[rows].to(lower)
            inside = ((lower <= target) & (target <= upper)).cpu()
            counted = ~target.isnan().cpu()
            if self.joint is not False:
                inside = (inside | ~counted).all(dim=1, keepdim=True)
                counted = counted.any(dim=1, keepdim=True)
            hits += (inside & counted).sum()
            known += counted.sum()
        return float(hits / known.clamp_min(1))


class FCQR(FCP):
    """Feature conformalized quantile regression: FCP for a model of two quantiles.

    Parameters are those of :class:`FCP`; the model's output has shape (n, 2), the lower and the
    upper quantile. Quantiles that cross are put in order.

    Notes
    -----
    The score is the larger of two signed distances: how far the feature must move until the
    lower quantile comes down to y, and until the upper one comes up to it; negative if y is
    inside. A negative threshold could shrink the band only if distances were the exact minimum,
    which no descent proves, so the band is then the two quantiles themselves.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))  # yours is trained
    >>> x, y = torch.randn(100, 2), torch.randn(100)
    >>> predictor = FCQR(model, "0", steps=20).calibrate(x, y)
    >>> predictor.predict_interval(x).lower.shape
    torch.Size([100])
    """

    def _outcome(self, prediction: Tensor) -> Tensor:
        if prediction.dim() != 2 or prediction.shape[1] != 2:
            raise ValueError(
                f"the model's output has shape {tuple(prediction.shape)}; FCQR needs two outputs "
                "per row, the lower and the upper quantile: (n, 2). For a point prediction use FCP"
            )
        return prediction.mean(dim=-1)

    def _scores_after(
        self, prediction: Tensor, v: Tensor, y: Tensor, steps: Sequence[int]
    ) -> Tensor:
        ends, order = prediction.sort(dim=1)
        # Both ends of all rows in one batch: columns[:n] are the lower ends.
        columns = order.T.reshape(-1, 1)
        twice = v.repeat(2, *[1] * (v.dim() - 1))
        distance = self._distance(twice, y.repeat(2, 1), columns, steps)
        below, above = distance.chunk(2, dim=1)
        y = y[:, 0].to(ends)
        return torch.maximum(
            torch.where(ends[:, 0] > y, below, -below), torch.where(y > ends[:, 1], above, -above)
        )[..., None]

    def _ends(self, prediction: Tensor, v: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        ends, order = prediction.sort(dim=1)
        low, high = self._ball_bounds(v, radius[:, 0].clamp_min(0))
        shrunk = (radius < 0).to(v.device)
        lower = torch.where(shrunk, ends[:, :1], low.gather(1, order[:, :1]))
        upper = torch.where(shrunk, ends[:, 1:], high.gather(1, order[:, 1:]))
        return lower, upper
