"""Auto: the best band that the network allows, chosen honestly among all that can be had."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ffcp import files
from ffcp.batch import BatchOutput, Requires
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import Columns, take
from ffcp.conformal.local import Local, Localizer
from ffcp.conformal.marginal import Marginal
from ffcp.conformal.mondrian import Mondrian
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import exact_alpha, rows_needed
from ffcp.conformal.selection import Chosen
from ffcp.conformal.weighted import Weighted
from ffcp.network import checks, forward, inputs
from ffcp.predictor import known_only
from ffcp.recipes import public
from ffcp.regression import recorded_rows
from ffcp.regression.bases import Point, columns
from ffcp.regression.common import Common
from ffcp.regression.comparison import CRITERIA, SCORE, AutoChoice, Comparison, MethodCandidate
from ffcp.regression.joint import (
    FEWEST_ROWS,
    Joint,
    checked_joint,
    checked_output_scales,
    has_own_thresholds,
)
from ffcp.regression.learned.feature_columns import KINDS, FeatureColumns, On, checked_on
from ffcp.regression.learned.knots import KNOTS
from ffcp.regression.learned.learned_score import LearnedScore, taught
from ffcp.regression.learned.learners import BOOSTING, NETWORK, checked_learner
from ffcp.regression.learned.learners import KINDS as LEARNERS
from ffcp.regression.learned.model_quantiles import ModelQuantiles
from ffcp.regression.learned.nested import CENTRAL, FAMILIES
from ffcp.regression.learned.training_rows import LearnsFromTraining, no_output_scales
from ffcp.regression.scaled_score import RegressionScore, ScaledScore
from ffcp.regression.scales import Constant, GradientNorm
from ffcp.regression.sides import BOTH, checked_side, shared_out

if TYPE_CHECKING:
    from typing_extensions import Unpack

Self = TypeVar("Self", bound="Auto")
PLAIN, LOCAL, OWN, BOTH_LEARNERS = "CP", "LCP", "quantiles of the model", "both"
_FEWEST = 60  # rows set aside below which nothing is learned from them
_COMPARE = 9  # ... below which they cannot compare what was learned elsewhere, and ...
_TIMES = 4  # ... times as many where nothing was: fewer are missed more than they help
_EARLY = 1000  # rows of which twice the usual share is set aside


class MethodSelection(RegressionScore):
    """Bands whose method is being chosen: what the model says is noted of every row."""

    is_open = True
    what_is_open = "the method"

    def __init__(
        self,
        on: Sequence[On],
        criterion: str,
        joint: Joint,
        side: str,
        seed: int,
        missing: bool = False,
        learners: Sequence[str] = (NETWORK,),
        early_rows: int = 0,
        quantiles: str | None = None,
        pac: bool = False,
        alpha: Any = 0.1,
    ) -> None:
        # Localized thresholds need all targets, those of rows that will calibrate too, and cover
        # on average over calibration sets only.
        self._may_be_local = not missing and not pac
        self._learners, self.early_rows = tuple(learners), early_rows
        self._on, self._criterion, self.joint, self.side = tuple(on), criterion, joint, side
        self._seed, self._alpha = seed, alpha  # the level at which candidates are compared
        self._learned: Mapping[str, LearnedScore] = {}
        self._sight: FeatureColumns | None = None
        self._own = None if quantiles is None else self._of_model(quantiles)

    def requires(self) -> Requires:
        """Ask for all that any candidate looks at, once the model is known."""
        if self._sight is None:
            return Requires()
        return self._sight.requires().joined(
            Requires() if self._own is None else self._own.requires()
        )

    def settings(self) -> dict[str, Any]:
        """Say nothing: nothing is chosen yet."""
        return {}

    def taught_by(
        self, learned: Mapping[str, LearnedScore], sight: FeatureColumns
    ) -> MethodSelection:
        """Give the same, with what training rows have taught among the candidates."""
        same = copy.copy(self)
        same.__dict__.update(_learned=dict(learned), _sight=sight)
        return same

    def prepared(self, model: Any, x: Any) -> MethodSelection:
        """Find the layers of the model."""
        if self._own is not None:
            _check_quantiles(model, x, self._own.requires())
        return self.taught_by(self._learned, self._sight or FeatureColumns.of(model, x, self._on))

    def record(self, out: BatchOutput, y: Any) -> dict[str, Any]:
        """Note all that may be learned from."""
        assert self._sight is not None
        target = checks.target(y, out.output)
        return recorded_rows.noted(self._sight.watched(out), target, self._sight.takes_input)

    @property
    def fewest_rows(self) -> int:  # type: ignore[override]
        """How many rows set aside can teach or compare anything."""
        if not has_own_thresholds(self.joint):
            return FEWEST_ROWS  # which teach the scales of outputs
        rows = max(_COMPARE, rows_needed(shared_out(self._alpha, self.side, False, 1)))
        return rows if self._learned or self._own is not None else _TIMES * rows

    def without_choice(self, rows: int, alpha: Any) -> Chosen:
        """Take the simplest method, and no row to choose it."""
        method, family = self._simplest
        level = float(exact_alpha(alpha))
        choice = AutoChoice(method, {}, self._criterion, 0, level, self.side)
        return Chosen(family, {"method": choice})

    @property
    def _simplest(self) -> tuple[str, RegressionScore]:
        """What is taken unless another is clearly better."""
        return (PLAIN, self._plain()) if self._own is None else (f"{OWN}, {CENTRAL}", self._own)

    def recalled(self, settings: Mapping[str, Any], state: Mapping[str, Tensor]) -> Any:
        """Give the family that was chosen and saved."""
        if settings.get("family") == "learned":
            functions = [one for one in self._on if callable(one)]
            return LearnedScore.from_state(settings, state, functions, self.joint, self.side)
        if state:
            raise ValueError(f"it holds {', '.join(sorted(state))}, where nothing is learned")
        families: dict[str, Callable[[], ScaledScore]] = {
            "constant": self._plain,
            "gradient norm": lambda: self._at(files.rebuilt(str, settings.get("feature"))),
        }
        if settings.get("scale") not in families:
            return self
        saved = files.rebuilt(tuple[float, ...] | None, settings.get("output_scales"))
        output_scales = None if saved is None else checked_output_scales(saved, self.joint)
        return families[str(settings["scale"])]().with_output_scales(output_scales)

    def choices_from(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Build the choice again."""
        method = saved.get("method")
        return {} if method is None else {"method": files.rebuilt(AutoChoice, method)}

    # -- candidates -------------------------------------------------------------------------

    def _plain(self) -> ScaledScore:
        return ScaledScore(Point(), Constant(), self.joint, self.side)

    def _at(self, layer: str) -> ScaledScore:
        return ScaledScore(Point(), GradientNorm(layer), self.joint, self.side)

    def _of_model(self, layer: str) -> LearnedScore:
        """Give bands between the quantiles that the model gives itself."""
        ways = (CENTRAL, self.joint, self.side, "the model")
        return LearnedScore(
            FeatureColumns(values=layer),
            ModelQuantiles(),
            torch.ones(1, dtype=torch.float32),
            *ways,
        )

    def choose(
        self, aside: Columns, alpha: Any, left: int = 0, weights: Tensor | None = None
    ) -> Chosen:
        """Compare all candidates on rows set aside, and make the best of them."""
        pair = recorded_rows.replay(aside)
        assert pair is not None
        out, y = pair
        judge = Comparison(out, columns(y), alpha, self.side, weights, left)
        candidates = dict(self._candidates(aside, judge))
        trials = {name: judge.trial(one, candidates[PLAIN]) for name, one in candidates.items()}
        best = min(trials, key=lambda name: getattr(trials[name], self._criterion))
        # The best of many is a little lucky: where rows tell no difference, the simplest is taken.
        simplest, _ = self._simplest
        if not judge.is_clearly_better(candidates[best], candidates[simplest], self._criterion):
            best = simplest
        family, bandwidth = candidates[best].make()
        level = float(exact_alpha(alpha))
        choice = AutoChoice(best, trials, self._criterion, len(y), level, self.side)
        near = None if bandwidth is None else partial(localized, bandwidth=bandwidth)
        return Chosen(family, {"method": choice}, None, near)

    def _candidates(
        self, aside: Columns, judge: Comparison
    ) -> Iterator[tuple[str, MethodCandidate]]:
        assert self._sight is not None
        plain = judge.scaled(self._plain())
        yield PLAIN, judge.fixed(plain)
        for layer in self._sight.norms:
            yield f"FFCP at {layer!r}", judge.fixed(judge.scaled(self._at(layer)))
        # Localized thresholds have no density ratio.
        can_localize = self._may_be_local and judge.weights is None
        if judge.rows >= 2 * rows_needed(judge.of_each) and can_localize:
            yield LOCAL, judge.local(plain)
        learned = {f"Learned, training rows, {name}": one for name, one in self._learned.items()}
        if self._own is not None:
            learned[OWN] = self._own
        for name, family in learned.items():
            for shape in FAMILIES:
                yield f"{name}, {shape}", judge.fixed(family.shaped(shape))
        if judge.rows >= _FEWEST:
            yield from self._from_aside(aside, judge)

    def _from_aside(
        self, aside: Columns, judge: Comparison
    ) -> Iterator[tuple[str, MethodCandidate]]:
        """Learn from rows set aside: judged by folds, and made by all of them."""
        assert self._sight is not None
        for name, (learner, sight) in sights(self._sight, self._learners).items():
            learn = partial(self._taught, sight, aside, learner)
            folds = judge.folds(learn)

            for shape in FAMILIES:
                make = partial(self._made, learn, shape)
                name_of_it = f"Learned, rows set aside, {name}, {shape}"
                yield name_of_it, MethodCandidate(*judge.crossed(folds, shape), make)

    def _taught(
        self, sight: FeatureColumns, aside: Columns, learner: str, rows: Tensor | None = None
    ) -> LearnedScore:
        some = aside if rows is None else take(aside, rows)
        ways = (self.joint, self.side, "rows set aside", self._seed)
        return taught(sight, some, *ways, learner=learner)

    @staticmethod
    def _made(learn: Callable[[], LearnedScore], shape: str) -> tuple[RegressionScore, None]:
        return learn().shaped(shape), None


def sights(sight: FeatureColumns, learners: Sequence[str]) -> dict[str, tuple[str, FeatureColumns]]:
    """Give who learns from what: from everything, and networks from prediction and norms alone.

    Trees leave out by themselves what tells them nothing.
    """
    tried = {}
    if NETWORK in learners:
        tried["all"] = (NETWORK, sight)
        if sight.few().settings() != sight.settings():
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


def localized(calibration: Calibration, bandwidth: float | None = None) -> Calibration:
    """Return the calibration of LCP, also in groups.

    >>> type(localized(Marginal())).__name__
    'Local'
    """
    if isinstance(calibration, Mondrian):
        return Mondrian(localized(calibration.inner, bandwidth), calibration.by)
    local = Local(Localizer("nearest"))
    local.bandwidth = bandwidth
    return local


def _checked(calibration: Calibration | None, pac: bool) -> Calibration:
    """Refuse calibrations under which candidates cannot be compared, or give no PAC coverage."""
    calibration = Marginal() if calibration is None else calibration
    inner = calibration.inner if isinstance(calibration, Mondrian) else calibration
    if type(inner) not in (Marginal, Weighted):
        also = " LCP is among the candidates already." if isinstance(inner, Local) else ""
        raise ValueError(
            "Auto compares methods under ffcp.calibrations.Marginal or ffcp.calibrations.Weighted, "
            "also in the groups of "
            f"ffcp.calibrations.Mondrian, got {type(inner).__name__}.{also} For others make the "
            f"method itself, "
            "as ffcp.IntervalPredictor or ffcp.Learned"
        )
    if pac and isinstance(inner, Weighted):
        raise ValueError(
            "ffcp.calibrations.Weighted has no PAC coverage, whose law is known for calibration "
            "rows that count "
            "alike only: leave out pac=True, or the calibration"
        )
    return calibration


@public
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
        joint, side = common.pop("joint", False), common.pop("side", BOTH)
        self._on = checked_on(on)
        seed = common.get("seed") or 0
        joint = checked_joint(joint)
        sides = (joint, checked_side(side, joint))
        self._learners = LEARNERS if learner == BOTH_LEARNERS else (checked_learner(learner),)
        missing = bool(common.get("missing"))
        early = 0 if "selection_fraction" in common else _EARLY
        level = common.get("selection_alpha", 0.1)
        family = MethodSelection(
            self._on, criterion, *sides, seed, missing, self._learners, early, quantiles, pac, level
        )
        super().__init__(model, family, _checked(calibration, pac), **common)  # type: ignore[misc]

    def _pac_intervals(
        self, alphas: Sequence[Fraction], sure: Fraction, metadata: Columns, random: Draws
    ) -> Tensor:
        try:
            return super()._pac_intervals(alphas, sure, metadata, random)
        except ValueError as error:
            if self.method != LOCAL:
                raise
            raise ValueError(
                "LCP was chosen, which has no PAC coverage: make the predictor with pac=True, and "
                "calibrate it again without such candidates"
            ) from error

    def _kept_by(self, calibration: Calibration, settings: Mapping[str, Any]) -> Calibration:
        """Give a localized calibration if that was chosen."""
        is_local = settings.get("calibration") == Local.__name__
        return localized(calibration) if is_local else calibration

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
        family, _ = self._given
        assert isinstance(family, MethodSelection)
        lesson = self._lesson(x, y, disjoint)
        learned = {
            name: taught(
                sight,
                lesson.rows,
                family.joint,
                family.side,
                "training rows",
                self.seed or 0,
                learner=learner,
                hashes=self._taught,
            )
            for name, (learner, sight) in sights(lesson.sight, self._learners).items()
        }
        self._learn(family.taught_by(learned, lesson.sight))
        return self

    @property
    def choice(self) -> AutoChoice | None:
        """What was compared, and what was taken; ``None`` until it is."""
        choice: AutoChoice | None = self._state.choices.get("method")
        return choice

    @property
    def method(self) -> str | None:
        """The method in use; ``None`` until it is chosen."""
        if self._scorer.is_open:
            return None
        return PLAIN if self.choice is None else self.choice.method
