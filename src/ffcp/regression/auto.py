"""Auto: compare interval methods on rows that do not calibrate, and use the best one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ffcp.batch import BatchOutput, Requires
from ffcp.conformal.calibration import Calibration, Marginal, as_calibration
from ffcp.conformal.mondrian import Mondrian
from ffcp.conformal.rank import exact_alpha, rows_needed
from ffcp.conformal.selection import Aside, Selected, Selection
from ffcp.conformal.weighted import Weighted
from ffcp.network import arrays, forward, inputs
from ffcp.network.forward import candidates
from ffcp.progress import progress
from ffcp.regression.common import Common
from ffcp.regression.comparison import (
    CRITERIA,
    SCORE,
    AutoChoice,
    Comparison,
    MethodCandidate,
    RowCounts,
)
from ffcp.regression.intervals import Point, columns
from ffcp.regression.joint import (
    FEWEST_ROWS,
    Joint,
    has_own_thresholds,
    shared_out,
)
from ffcp.regression.learned import boosting
from ffcp.regression.learned.feature_columns import NORMS, FeatureColumns, On
from ffcp.regression.learned.learned_score import LearnedScore
from ffcp.regression.learned.learners import BOOSTING, NETWORK, ModelQuantiles
from ffcp.regression.learned.learners import BOTH as MEAN
from ffcp.regression.learned.nested import CENTRAL, FAMILIES, KNOTS
from ffcp.regression.learned.quantile_fitting import (
    CALIBRATION_ROWS,
    CROSS_FITTED,
    CrossFitted,
    LearningSelection,
    QuantileFitter,
    Rows,
    folds_of,
    judged,
    stacked,
    tail_of,
)
from ffcp.regression.learned.training_rows import (
    LearnsFromTraining,
    TrainingRows,
)
from ffcp.regression.scaled_score import ScaledScore
from ffcp.regression.scales import Constant, GradientNorm

if TYPE_CHECKING:
    from typing_extensions import Unpack

Self = TypeVar("Self", bound="Auto")
PLAIN, OWN = "CP", "quantiles of the model"
_BY = {NETWORK: "networks", BOOSTING: "trees", MEAN: "trees and networks"}
_FEWEST = 60  # rows set aside; with fewer, nothing is learned from them alone
_COMPARE = 9  # rows needed to compare candidates that were learned from other rows
_TIMES = 4  # times as many are needed without such candidates


@dataclass(frozen=True)
class MethodSelection(LearningSelection):
    """Selects the method; all candidates share one pass over the rows set aside."""

    on: Sequence[On] | None
    criterion: str
    joint: Joint
    side: str
    seed: int
    alpha: Any
    calibrate_rows: int | None = None
    quantiles: str | None = None
    features: FeatureColumns | None = None
    layers: Sequence[str] = ()
    training: TrainingRows | None = None
    what = "the method"
    is_optional = True

    def prepared(self, model: Any, x: Any) -> MethodSelection:
        """Return the selection with the layers of the model."""
        if self.quantiles is not None:
            _check_quantiles(model, x, self._own.requires())
        layers = candidates(model, x) if self.on is None or NORMS in self.on else None
        known = self.training and self.training.features
        features = known or FeatureColumns.of(model, x, self.on, layers)
        return replace(self, features=features, layers=layers or ())

    def requires(self) -> Requires:
        """Return the features that any candidate requires; none until the model is known."""
        if self.features is None:
            return Requires()
        own = Requires() if self.quantiles is None else self._own.requires()
        norms = Requires(norms=tuple(self.layers))
        return self.features.requires().joined(own).joined(norms)

    @property
    def fewest_rows(self) -> int:  # type: ignore[override]
        """The fewest rows set aside that can train or compare candidates."""
        if not has_own_thresholds(self.joint):
            return FEWEST_ROWS  # from which the scales of outputs are learned
        rows = max(_COMPARE, rows_needed(shared_out(self.alpha, self.side, False, 1)))
        is_known = self.training is not None or self.quantiles is not None
        return rows if is_known else _TIMES * rows

    def without_rows(self, rows: int, alpha: Any) -> Selected:
        """Return the simplest method, for calibration sets too small to select."""
        score = self._scaled(Constant()) if self.quantiles is None else self._own
        level = float(exact_alpha(alpha))
        choice = AutoChoice(
            self._simplest, {}, self.criterion, RowCounts(0, 0, rows), level, self.side
        )
        return Selected(score, None, {"method": choice})

    def accepts(self, score: Any) -> bool:
        """Whether a score is one of the candidates."""
        is_candidate = isinstance(score, (ScaledScore, LearnedScore))
        return is_candidate and (score.joint, score.side) == (self.joint, self.side)

    # -- candidates -------------------------------------------------------------------------

    def _scaled(self, scale: Any) -> ScaledScore:
        return ScaledScore(Point(), scale, self.joint, self.side)

    @property
    def _own(self) -> LearnedScore:
        """The score of the quantiles that the model itself predicts."""
        return LearnedScore(
            FeatureColumns(values=self.quantiles),
            ModelQuantiles.kind,
            CENTRAL,
            self.joint,
            self.side,
            "the model",
            learner=ModelQuantiles(),
            typical=torch.ones(1, dtype=torch.float32),
        )

    @property
    def _simplest(self) -> str:
        """The candidate that is selected unless another is clearly better."""
        return PLAIN if self.quantiles is None else OWN

    def select(self, aside: Aside) -> Selected:
        """Compare all candidates on the rows set aside, and return the best."""
        y = arrays.target_like(aside.y, aside.out.output)
        kinds, not_tried = self._learners(aside.out, len(y))
        used = judged(len(y)) if kinds else torch.ones(len(y), dtype=torch.bool)
        out = forward.part_of(aside.out, used)
        weights = _inner(aside.calibration).metadata(out).get("weight")
        judge = Comparison(
            out, columns(y)[used], aside.alpha, self.side, self.joint, weights, aside.left
        )
        with progress(len(kinds) * (folds_of(len(y)) + 1), "learning") as step:
            tried = dict(self._candidates(judge, aside, kinds, step))
            trials = {name: judge.trial(tried[name], tried[PLAIN]) for name in tried}
            best = min(trials, key=lambda name: getattr(trials[name], self.criterion))
            # The best of many is partly luck: without a significant difference the simplest is
            # selected, or else, among what was learned, the mean of both learners.
            means = (name for name, candidate in tried.items() if candidate.is_mean)
            for name in (self._simplest, *means):
                if not judge.is_clearly_better(tried[best], tried[name], self.criterion):
                    best = name
                    break
            score = tried[best].make()
        trained = 0 if self.training is None else len(self.training.rows.weights)
        rows = RowCounts(len(y) + trained if kinds else 0, int(used.sum()), aside.left)
        level = float(exact_alpha(aside.alpha))
        choice = AutoChoice(best, trials, self.criterion, rows, level, self.side, not_tried)
        return Selected(score, aside.calibration, {"method": choice})

    def _candidates(
        self, judge: Comparison, aside: Aside, kinds: Sequence[str], step: Callable[[], object]
    ) -> Iterator[tuple[str, MethodCandidate]]:
        yield PLAIN, judge.fixed(judge.scaled(self._scaled(Constant())))
        for layer in self.layers:
            scaled = judge.scaled(self._scaled(GradientNorm(layer)))
            yield f"FFCP at {layer!r}", judge.fixed(scaled)
        if self.quantiles is not None:
            for shape in FAMILIES:
                yield _named(OWN, shape), judge.fixed(self._own.shaped(shape))
        if kinds:
            yield from self._learned(judge, aside, kinds, step)

    def _learners(self, out: BatchOutput, rows: int) -> tuple[list[str], tuple[str, ...]]:
        """Return the learners to try, and the reasons why others are not."""
        if self.training is None and rows < _FEWEST:
            return [], ()
        reason = boosting.why_not(out.output[0].numel())
        return ([NETWORK, BOOSTING], ()) if reason is None else ([NETWORK], (reason,))

    def _learned(
        self, judge: Comparison, aside: Aside, kinds: Sequence[str], step: Callable[[], object]
    ) -> Iterator[tuple[str, MethodCandidate]]:
        """Learn from rows set aside and training rows: cross-fitted to compare, refitted on all."""
        assert self.features is not None
        config: dict[str, Any] = {"joint": self.joint, "side": self.side}
        training = None if self.training is None else self.training.rows
        tail = tail_of(self.alpha, self.side)
        fitter = QuantileFitter(self.features, self.seed, tail, training)
        fresh = Rows.of(self.features, aside.out, aside.y)
        fits = {kind: fitter.cross_fitted(kind, fresh, step) for kind in kinds}
        if len(kinds) > 1:
            fits[MEAN] = stacked(fits[NETWORK], fits[BOOSTING], fresh.residuals)
        source = CALIBRATION_ROWS if training is None else f"training and {CALIBRATION_ROWS}"
        used = judged(len(fresh.weights))

        def make(kind: str, shape: str) -> LearnedScore:
            hashes = None if self.training is None else self.training.hashes
            fit = fits[kind]
            score = fitter.learned_score(kind, fresh, fit, shape=shape, source=source, **config)
            return replace(score, rows=hashes)

        for kind, fit in fits.items():
            out = judge.out._replace(values={CROSS_FITTED: fit.quantiles[used]})
            for shape in FAMILIES:
                candidate = judge.fixed(CrossFitted(self.features, kind, shape, **config), out)
                name, is_mean = f"learned from {source}, by {_BY[kind]}", kind == MEAN
                candidate = candidate._replace(make=partial(make, kind, shape))
                yield _named(name, shape), candidate._replace(is_mean=is_mean and shape == CENTRAL)


def _named(name: str, shape: str) -> str:
    """Return the name of a candidate with nested sets of a family."""
    return name if shape == CENTRAL else f"{name}, from the densest part"


def _inner(calibration: Calibration) -> Calibration:
    """Return the calibration of groups, or the calibration itself."""
    return calibration.inner if isinstance(calibration, Mondrian) else calibration


def _check_quantiles(model: Any, x: Any, requires: Requires) -> None:
    """Raise if the layer does not return the quantiles of one target."""
    out = forward.run_batch(model, inputs.take(x, slice(0, 2)), requires)
    (layer,) = requires.values
    rows, shape = len(out.rows), tuple(out.values[layer].shape)
    if shape != (rows, len(KNOTS)) or out.output.numel() != rows:
        raise ValueError(
            f"quantiles={layer!r} must return {len(KNOTS)} quantiles for a model with one output, "
            f"got shape {shape} for an output of {tuple(out.output.shape)}"
        )


def _checked(calibration: Calibration | None) -> Calibration:
    """Raise if candidates cannot be compared under a calibration."""
    calibration = as_calibration(calibration)
    inner = _inner(calibration)
    if type(inner) not in (Marginal, Weighted):
        raise ValueError(
            "Auto compares methods under Marginal or Weighted, also in the groups of Mondrian, got "
            f"{type(inner).__name__}. For others use ffcp.IntervalPredictor or ffcp.Learned"
        )
    return calibration


class Auto(LearnsFromTraining):
    """Intervals of the best method, selected on rows that do not calibrate.

    Candidates are CP, FFCP at up to 8 layers, and quantiles of the residual that are learned from
    training rows (:meth:`fit`) and calibration rows together: by boosted trees (``pip install
    'ffcp[trees]'``), by small networks, and as the mean of both, with central sets and with sets
    grown from the densest part.

    About 1,000 calibration rows calibrate (as many as miss an interval a hundred times: 10,000 for
    alpha = 0.01; in groups as many in each, on average; of few rows at least two fifths, and of
    every group and output as many known targets as alpha needs, if there are) and are used for the
    final quantile only. All others train and compare the candidates, by cross-fitting. So the
    guarantee is that of every other method. Where fewer than 36 rows would be left to learn from
    (of about 90), learning loses more than it gains: all rows calibrate, and Auto is CP. After
    :meth:`fit`, or with ``quantiles``, 9 rows are enough; 10 to learn the scales of outputs that
    share a threshold. For alpha below 0.1 it is more rows, in proportion. With
    :class:`ffcp.calibrations.Weighted` rows count by their density ratio in that comparison too: it
    is about the inputs to come.

    Parameters
    ----------
    model : nn.Module
        A trained network; forward returns one tensor with a row per input row, at most 64
        numbers each.
    criterion : {"score", "length"}, default="score"
        What decides: ``"score"``, the interval score (length plus 2 / alpha times the miss), or
        ``"length"``, the mean length.
    on : str, callable or a sequence of them, default=None
        What is learned from, as in :class:`Learned`; without ``"norms"`` FFCP is no candidate.
    calibration : Calibration, default=None
        :class:`ffcp.calibrations.Marginal` (the default), :class:`ffcp.calibrations.Weighted` or,
        of either, :class:`ffcp.calibrations.Mondrian`. Groups have thresholds of their own, and are
        not looked at when methods are compared.
    quantiles : str, default=None
        A layer of the model, by name, that gives quantiles of the target itself, as learned by
        the pinball loss: of every row nine, at the levels 0.01, 0.05, 0.15, 0.3, 0.5, 0.7, 0.85,
        0.95 and 0.99. Sets between them are then among the candidates.
    calibrate_rows : int, default=None
        How many rows calibrate, or more where a group needs them; by default as said above.
    **common : dict
        As in :class:`ffcp.IntervalPredictor`.

    Attributes
    ----------
    choice : AutoChoice or None
        The comparison of methods, and the one selected.

    Examples
    --------
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> x = torch.rand(2000, 1)
    >>> y = x[:, 0] * torch.randn(2000)  # noise grows to the right
    >>> model = nn.Linear(1, 1)  # yours is trained
    >>> predictor = Auto(model, seed=0).calibrate(x, y)
    >>> predictor.choice.trials["CP"].score > predictor.choice.trials[predictor.method].score
    True
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: str = SCORE,
        on: On | Sequence[On] | None = None,
        calibration: Calibration | None = None,
        quantiles: str | None = None,
        calibrate_rows: int | None = None,
        **common: Unpack[Common],
    ) -> None:
        shared = self._checked_arguments(on, calibrate_rows, common)
        if criterion not in CRITERIA:
            raise ValueError(f"criterion must be one of {', '.join(CRITERIA)}, got {criterion!r}")
        self.criterion, self.quantiles = criterion, quantiles
        selection = MethodSelection(criterion=criterion, quantiles=quantiles, **shared)
        super().__init__(model, selection, _checked(calibration), **common)  # type: ignore[misc]

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments, but for the model."""
        names = ("criterion", "quantiles")
        return {**{name: getattr(self, name) for name in names}, **super().config()}

    def fit(self: Self, x: Any, y: Any = None, *, disjoint: bool = False) -> Self:
        """Learn from rows that will not calibrate, for example the training rows of the model.

        Parameters
        ----------
        x : array-like, frame, tuple, dict or loader
        y : array-like, default=None
            As in :meth:`calibrate`. At most 20,000 rows are used: of arrays a random part, of a
            loader the first, so let it shuffle.
        disjoint : bool, default=False
            Whether calibration rows are known to be others, because the caller divided the data.
            Otherwise they are compared with these, and a calibration is refused if far more of
            them are equal than the data's own repeated rows explain.
        """
        selection, _ = self._given
        self._learn(replace(selection, training=self._training_rows(x, y, disjoint)))
        return self

    @property
    def choice(self) -> AutoChoice | None:
        """The comparison of methods and the one selected; ``None`` before calibrating."""
        choice: AutoChoice | None = self._state.report.get("method")
        return choice

    @property
    def method(self) -> str | None:
        """The method in use; ``None`` until it is selected."""
        if isinstance(self._state.score, Selection):
            return None
        return PLAIN if self.choice is None else self.choice.method
