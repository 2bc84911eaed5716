"""Auto: the best band that the network allows, chosen honestly among all that can be had."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ffcp.batch import Requires
from ffcp.conformal.calibration import Calibration, Marginal
from ffcp.conformal.columns import Columns
from ffcp.conformal.local import Local
from ffcp.conformal.mondrian import Mondrian
from ffcp.conformal.rank import exact_alpha, rows_needed
from ffcp.conformal.selection import Aside, Selected, Selection
from ffcp.conformal.weighted import Weighted
from ffcp.network import checks, forward, inputs
from ffcp.predictor import known_only
from ffcp.regression.common import Common
from ffcp.regression.comparison import CRITERIA, SCORE, AutoChoice, Comparison, MethodCandidate
from ffcp.regression.intervals import Point, columns
from ffcp.regression.joint import (
    BOTH,
    FEWEST_ROWS,
    Joint,
    checked_joint,
    checked_side,
    has_own_thresholds,
    shared_out,
)
from ffcp.regression.learned.feature_columns import KINDS, FeatureColumns, On, checked_on
from ffcp.regression.learned.learned_score import LearnedScore, cross_fitted, taught
from ffcp.regression.learned.learners import BOOSTING, NETWORK, ModelQuantiles, checked_learner
from ffcp.regression.learned.learners import KINDS as LEARNERS
from ffcp.regression.learned.nested import CENTRAL, FAMILIES, KNOTS
from ffcp.regression.learned.training_rows import LearnsFromTraining, no_output_scales
from ffcp.regression.scaled_score import ScaledScore
from ffcp.regression.scales import Constant, GradientNorm

if TYPE_CHECKING:
    from typing_extensions import Unpack

Self = TypeVar("Self", bound="Auto")
PLAIN, LOCAL, OWN, BOTH_LEARNERS = "CP", "LCP", "quantiles of the model", "both"
_FEWEST = 60  # rows set aside below which nothing is learned from them
_COMPARE = 9  # ... below which they cannot compare what was learned elsewhere, and ...
_TIMES = 4  # ... times as many where nothing was: fewer are missed more than they help
_EARLY = 1000  # rows of which twice the usual share is set aside


@dataclass(frozen=True)
class MethodSelection(Selection):
    """Selects the method: what one pass gives for the rows set aside serves all candidates."""

    on: Sequence[On]
    criterion: str
    joint: Joint
    side: str
    seed: int
    learners: Sequence[str]
    alpha: Any
    early_rows: int = 0
    can_localize: bool = True
    quantiles: str | None = None
    sight: FeatureColumns | None = None
    learned: Mapping[str, LearnedScore] = field(default_factory=dict)
    what = "the method"
    selects_calibration = True

    def prepared(self, model: Any, x: Any) -> MethodSelection:
        """Find the layers of the model."""
        if self.quantiles is not None:
            _check_quantiles(model, x, self._own.requires())
        return replace(self, sight=self.sight or FeatureColumns.of(model, x, self.on))

    def prediction(self, output: Tensor) -> Tensor:
        """Return the point prediction: the output itself."""
        return output

    def requires(self) -> Requires:
        """Return all that any candidate looks at, once the model is known."""
        if self.sight is None:
            return Requires()
        own = Requires() if self.quantiles is None else self._own.requires()
        return self.sight.requires().joined(own)

    @property
    def fewest_rows(self) -> int:  # type: ignore[override]
        """How many rows set aside can teach or compare anything."""
        if not has_own_thresholds(self.joint):
            return FEWEST_ROWS  # which teach the scales of outputs
        rows = max(_COMPARE, rows_needed(shared_out(self.alpha, self.side, False, 1)))
        return rows if self.learned or self.quantiles is not None else _TIMES * rows

    def without_rows(self, rows: int, alpha: Any) -> Selected:
        """Take the simplest method, and no row to select it."""
        score = self._scaled(Constant()) if self.quantiles is None else self._own
        level = float(exact_alpha(alpha))
        choice = AutoChoice(self._simplest, {}, self.criterion, 0, level, self.side)
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
        """Intervals between the quantiles that the model gives itself."""
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
        """What is taken unless another is clearly better."""
        return PLAIN if self.quantiles is None else f"{OWN}, {CENTRAL}"

    def select(self, aside: Aside) -> Selected:
        """Compare all candidates on rows set aside, and make the best of them."""
        y = checks.target(aside.y, aside.out.output)
        weights = _inner(aside.calibration).metadata(aside.out).get("weight")
        judge = Comparison(
            aside.out, columns(y), aside.alpha, self.side, self.joint, weights, aside.left
        )
        candidates = dict(self._candidates(judge, aside))
        trials = {name: judge.trial(one, candidates[PLAIN]) for name, one in candidates.items()}
        best = min(trials, key=lambda name: getattr(trials[name], self.criterion))
        # The best of many is a little lucky: where rows tell no difference, the simplest is taken.
        simplest = candidates[self._simplest]
        if not judge.is_clearly_better(candidates[best], simplest, self.criterion):
            best = self._simplest
        level = float(exact_alpha(aside.alpha))
        choice = AutoChoice(best, trials, self.criterion, len(y), level, self.side)
        calibration, bandwidth = aside.calibration, candidates[best].bandwidth
        if bandwidth is not None:
            calibration = localized(calibration, bandwidth)
        return Selected(candidates[best].make(), calibration, {"method": choice})

    def _candidates(self, judge: Comparison, aside: Aside) -> Iterator[tuple[str, MethodCandidate]]:
        assert self.sight is not None
        plain = judge.scaled(self._scaled(Constant()))
        yield PLAIN, judge.fixed(plain)
        for layer in self.sight.norms:
            scaled = judge.scaled(self._scaled(GradientNorm(layer)))
            yield f"FFCP at {layer!r}", judge.fixed(scaled)
        # Localized thresholds have no density ratio.
        can_localize = self.can_localize and judge.weights is None
        if judge.rows >= 2 * judge.rows_needed and can_localize:
            yield LOCAL, judge.local(plain)
        learned = {f"Learned, training rows, {name}": one for name, one in self.learned.items()}
        if self.quantiles is not None:
            learned[OWN] = self._own
        for name, score in learned.items():
            for shape in FAMILIES:
                yield f"{name}, {shape}", judge.fixed(score.shaped(shape))
        if judge.rows >= _FEWEST:
            yield from self._from_aside(judge, aside)

    def _from_aside(self, judge: Comparison, aside: Aside) -> Iterator[tuple[str, MethodCandidate]]:
        """Learn from rows set aside: judged by folds, and made by all of them."""
        assert self.sight is not None
        for name, (kind, sight) in sights(self.sight, self.learners).items():
            ways: dict[str, Any] = {"joint": self.joint, "side": self.side, "seed": self.seed}
            score, out = cross_fitted(sight, aside.out, aside.y, kind=kind, **ways)
            learn = partial(taught, sight, aside.out, aside.y, kind=kind, **ways)
            for shape in FAMILIES:
                make = partial(learn, shape=shape, source="rows set aside")
                fixed = judge.fixed(score.shaped(shape), out)._replace(make=make)
                yield f"Learned, rows set aside, {name}, {shape}", fixed


def _inner(calibration: Calibration) -> Calibration:
    """Return the calibration of groups, or the calibration itself."""
    return calibration.inner if isinstance(calibration, Mondrian) else calibration


def sights(sight: FeatureColumns, learners: Sequence[str]) -> dict[str, tuple[str, FeatureColumns]]:
    """Give who learns from what: from everything, and networks from prediction and norms alone.

    Trees leave out by themselves what tells them nothing.
    """
    tried = {}
    if NETWORK in learners:
        tried["all"] = (NETWORK, sight)
        if sight.few() != sight:
            tried["few"] = (NETWORK, sight.few())
    if BOOSTING in learners:
        tried["boosted"] = (BOOSTING, sight)
    return tried


def _check_quantiles(model: Any, x: Any, requires: Requires) -> None:
    """Refuse a layer that cannot give the quantiles of one target."""
    out = forward.see(model, inputs.take(x, slice(0, 2)), requires)
    (layer,) = requires.values
    rows, shape = len(out.rows), tuple(out.values[layer].shape)
    if shape != (rows, len(KNOTS)) or out.output.numel() != rows:
        raise ValueError(
            f"quantiles={layer!r} must give {len(KNOTS)} quantiles of a model's one output, got "
            f"shape {shape} for an output of {tuple(out.output.shape)}"
        )


def localized(calibration: Calibration, bandwidth: float) -> Calibration:
    """Return the calibration of LCP, also in groups.

    >>> type(localized(Mondrian(), 20.0).inner).__name__
    'Local'
    """
    if isinstance(calibration, Mondrian):
        return Mondrian(localized(calibration.inner, bandwidth), calibration.by)
    return Local("nearest", bandwidth=bandwidth)


def _checked(calibration: Calibration | None, pac: bool) -> Calibration:
    """Refuse calibrations under which candidates cannot be compared, or give no PAC coverage."""
    calibration = Marginal() if calibration is None else calibration
    inner = _inner(calibration)
    if type(inner) not in (Marginal, Weighted):
        also = " LCP is among the candidates already." if isinstance(inner, Local) else ""
        raise ValueError(
            "Auto compares methods under Marginal or Weighted, also in the groups of Mondrian, got "
            f"{type(inner).__name__}.{also} For others use ffcp.IntervalPredictor or ffcp.Learned"
        )
    if pac and isinstance(inner, Weighted):
        raise ValueError(
            "Weighted has no PAC coverage, whose law is known only for calibration rows that count "
            "alike: leave out pac=True, or the calibration"
        )
    return calibration


class Auto(LearnsFromTraining):
    """The best band that the network allows: all methods compared, honestly.

    Candidates are CP, FFCP at every layer, LCP with the nearest predictions (not with ``missing``,
    as it needs all targets), and :class:`Learned`, taught by training rows (:meth:`fit`) and by
    rows set aside, with everything that a pass sees and with prediction and norms alone, with
    central and with grown sets. They are compared on a share of the calibration rows, which then
    does not calibrate (what these rows themselves taught is judged by folds), so the guarantee is
    that of every other method. The share is ``selection_fraction`` if that is given; by itself two
    fifths of the first 1,000 rows and a fifth of those after, since few rows calibrate well, but
    teach and choose badly. Where fewer than 36 rows would be set aside (of about 90, unless
    ``selection_fraction`` is given) comparing loses more than it gains: none are, and Auto is CP.
    After :meth:`fit`, or with ``quantiles``, what is learned is known, and 9 rows are enough;
    10 to learn the scales of outputs that share a threshold. For alpha below 0.1 it is more rows,
    in proportion. With :class:`ffcp.calibrations.Weighted` rows count by their density ratio in
    that comparison too: it is about the inputs to come.

    Parameters
    ----------
    model
        A trained network; forward returns one tensor with a row per input row, at most 64
        numbers each.
    criterion
        What decides: ``"score"``, the interval score (length plus 2 / alpha times the miss), or
        ``"length"``, the mean length.
    on
        What is learned from, as in :class:`Learned`.
    learner
        Which learner is tried, as in :class:`Learned`; ``"both"``: both are.
    calibration
        :class:`ffcp.calibrations.Marginal` (the default), :class:`ffcp.calibrations.Weighted` or,
        of either, :class:`ffcp.calibrations.Mondrian`; LCP is no candidate with
        :class:`ffcp.calibrations.Weighted`. Groups have thresholds of their own, and are not looked
        at when methods are compared.
    quantiles
        A layer of the model, by name, that gives quantiles of the target itself, as learned by
        the pinball loss: of every row nine, at the levels 0.01, 0.05, 0.15, 0.3, 0.5, 0.7, 0.85,
        0.95 and 0.99. Sets between them are then among the candidates.
    pac
        Whether PAC coverage will be asked for: LCP, which has none, is then no candidate.
    **common
        As in :class:`ffcp.IntervalPredictor`.

    Attributes
    ----------
    choice : AutoChoice or None
        What was compared, and what was taken.

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
        on: On | Sequence[On] = KINDS,
        learner: str = NETWORK,
        calibration: Calibration | None = None,
        quantiles: str | None = None,
        pac: bool = False,
        **common: Unpack[Common],
    ) -> None:
        known_only(type(self), common, Common)
        if criterion not in CRITERIA:
            raise ValueError(f"criterion must be one of {', '.join(CRITERIA)}, got {criterion!r}")
        no_output_scales(common)
        joint = checked_joint(common.pop("joint", False))
        side = checked_side(common.pop("side", BOTH), joint)
        self.criterion, self.on, self.learner = criterion, checked_on(on), learner
        self.quantiles, self.pac = quantiles, pac
        self._learners = LEARNERS if learner == BOTH_LEARNERS else (checked_learner(learner),)
        selection = MethodSelection(
            self.on,
            criterion,
            joint,
            side,
            common.get("seed") or 0,
            self._learners,
            common.get("selection_alpha", 0.1),
            early_rows=0 if "selection_fraction" in common else _EARLY,
            # Localized thresholds need all targets, those of rows that will calibrate too, and
            # cover on average over calibration sets only.
            can_localize=not common.get("missing") and not pac,
            quantiles=quantiles,
        )
        super().__init__(  # type: ignore[misc]
            model, selection, _checked(calibration, pac), joint=joint, side=side, **common
        )

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments, but for the model."""
        names = ("criterion", "on", "learner", "quantiles", "pac")
        return {**{name: getattr(self, name) for name in names}, **super().config()}

    def pac_quantiles(
        self, alphas: Sequence[Fraction], sure: Fraction, metadata: Columns
    ) -> Tensor:
        """Return thresholds with PAC coverage, which LCP has not."""
        if self.method == LOCAL:
            raise ValueError(
                "LCP was selected, which has no PAC coverage: make the predictor with pac=True, "
                "and calibrate it again without such candidates"
            )
        return super().pac_quantiles(alphas, sure, metadata)

    def fit(self: Self, x: Any, y: Any = None, *, disjoint: bool = False) -> Self:
        """Let rows teach that will not calibrate: those that trained the model will do.

        Parameters
        ----------
        x, y
            As in :meth:`calibrate`. At most 20,000 rows teach: of arrays a random part, of a
            loader the first, so let it shuffle.
        disjoint
            Whether calibration rows are known to be others, because the caller divided the data.
            Otherwise they are compared with these, and a calibration is refused if far more of
            them are equal than the data's own repeated rows explain.
        """
        selection, _ = self._given
        lesson = self._lesson(x, y, disjoint)
        ways = {"joint": self.joint, "side": self.side, "source": "training rows"}
        learned = {
            name: taught(
                sight, *lesson[1:], kind=kind, seed=self.seed or 0, hashes=self._taught, **ways
            )
            for name, (kind, sight) in sights(lesson.sight, self._learners).items()
        }
        self._learn(replace(selection, learned=learned, sight=lesson.sight))
        return self

    @property
    def choice(self) -> AutoChoice | None:
        """What was compared, and what was taken; ``None`` until it is."""
        choice: AutoChoice | None = self._state.report.get("method")
        return choice

    @property
    def method(self) -> str | None:
        """The method in use; ``None`` until it is chosen."""
        if isinstance(self._state.score, Selection):
            return None
        return PLAIN if self.choice is None else self.choice.method
