"""FCP and FCQR: the score is a distance in feature space, the interval bounds the head.

They are what FFCP is compared with. Each score needs an optimisation
(:mod:`ffcp.regression.fcp.inversion`), each interval bound propagation (:mod:`ffcp.bounds`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch  # noqa: F401 - for the examples
from torch import nn

from ffcp.arguments import known_only
from ffcp.calibrated import Counts
from ffcp.calibration_loop import BatchRunner, Result
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.rank import requested_alpha
from ffcp.metrics import Coverage
from ffcp.network.features import resolve
from ffcp.network.model_output import picking
from ffcp.predictor import steady
from ffcp.regression.common import Common
from ffcp.regression.fcp.feature_ball import FeatureBallScore, QuantileBallScore
from ffcp.regression.joint import AUTO, BONFERRONI, BOTH, checked_joint
from ffcp.regression.regression_predictor import RegressionPredictor

if TYPE_CHECKING:
    from typing_extensions import Unpack


class FCP(RegressionPredictor):
    """Feature conformal prediction (Teng et al., 2022), the slow method that FFCP replaces.

    The score of a row is the distance from its feature to the nearest feature for which the head
    gives y; the interval bounds the head over the ball whose radius is the threshold.

    Parameters
    ----------
    model : nn.Module
        A trained network with one input tensor.
    feature : str or nn.Module
        Where to cut: a dotted module name, a module, or ``"input"``. Nothing but the feature may
        pass the cut.
    norm : float, default=math.inf
        Norm of the ball: ``inf`` (as in the paper) or 2.
    bound : str, default="ibp"
        ``"ibp"`` (as in the paper) or ``"crown"``, which is tighter and slower.
    invert : str, default="descent"
        ``"descent"``, as in the paper: gradient descent, stopped after ``steps`` steps.
        ``"exact"``: until the head provably takes the value y within the distance.
    steps : int, default=None
        Number of steps of the descent. ``None`` selects it on a part of the calibration data that
        is then left out of the scores.
    lr : float, default=0.01
        Step size of the descent.
    optimizer : str, default="sgd"
        ``"sgd"`` or ``"adam"``.
    head : nn.Module, default=None
        The module from feature to output, if it cannot be read out of the model.
    calibration : Calibration, default=None
        How scores become thresholds, :class:`ffcp.calibrations.Marginal` by default;
        :class:`ffcp.calibrations.Weighted` under covariate shift.
    **common : dict
        As in :class:`ffcp.IntervalPredictor`; ``side`` can only be ``"both"``. With several outputs
        ``joint=False`` inverts each on its own and gives it a threshold, so that each is covered
        with probability 1 - alpha; ``"bonferroni"`` does so at alpha / m and covers all at once.
        ``True`` has one ball for all outputs: with ``"descent"`` the feature moves until all
        outputs say y at once, as in the paper; with ``"exact"`` its radius is the largest of the
        distances of the outputs, so that the box provably covers. A share, as 0.9, asks for that
        share of the outputs (``"exact"`` only). ``selection_fraction`` of the rows choose
        ``steps``; ``output`` needs a ``head``, too.

    Attributes
    ----------
    steps : int or None
        The number of steps in use.
    step_coverage : dict
        For each number of steps tried, the coverage of its intervals on the rows set aside.
    unconverged : list of int
        The rows of the last calibration that the exact inversion gave up, counted from 0. They
        count as infinitely far.

    Notes
    -----
    With ``invert="exact"`` the interval covers y with probability at least 1 - alpha. With
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
    >>> interval = predictor.predict_interval(x, alpha=0.1)
    >>> bool(interval.contains(y).double().mean() >= 0.9)
    True
    """

    _family: ClassVar[type[FeatureBallScore]] = FeatureBallScore

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
        calibration: Calibration | None = None,
        **common: Unpack[Common],
    ) -> None:
        known_only(type(self), common, Common)
        for name, allowed in (("side", (BOTH,)), ("output_scales", (AUTO, None))):
            if common.pop(name, allowed[0]) not in allowed:  # type: ignore[misc]
                raise ValueError(
                    f"{type(self).__name__} bounds the head over a ball in feature space, which "
                    f"has neither sides nor units of outputs: leave out {name}"
                )
        self.feature = resolve(model, feature)
        ball = self._family(
            picking(model, common.get("output")),
            self.feature,
            head,
            norm=norm,
            bound=bound,
            invert=invert,
            steps=steps,
            lr=lr,
            optimizer=optimizer,
            joint=checked_joint(common.pop("joint", False)),
        )
        super().__init__(model, ball, calibration, joint=ball.joint, **common)  # type: ignore[misc]

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments, but for the model."""
        config = {**super().config(), **self._given[0].config()}
        del config["side"]
        return config

    @property
    def steps(self) -> int | None:
        """The number of descent steps in use; ``None`` until it is selected."""
        steps: int | None = self._state.score.steps
        return steps

    @property
    def step_coverage(self) -> dict[int, float]:
        """For each number of steps tried, the coverage of its intervals on the rows set aside."""
        choice = self._state.report.get("steps")
        return {} if choice is None else {int(n): share for n, share in choice.coverage.items()}

    @property
    def unconverged(self) -> list[int]:
        """The calibration rows for which no feature was found that gives y."""
        return list(self._state.counts.unconverged)

    def _runner(self, update: bool) -> BatchRunner:
        return _ConvergenceCounter(self.model)

    @steady
    def feature_coverage(
        self,
        /,
        x: Any,
        y: Any,
        alpha: Any = None,
        *,
        confidence_level: Any = None,
        **unknown: NoReturn,
    ) -> Coverage:
        """Return the coverage in feature space: the share of rows whose score is in the ball.

        The published code reports it beside the length of the *output* interval, though it
        describes another object: with an inversion stopped early, a row can be covered here and
        missed by its interval. Compare with ``metrics.coverage`` of the interval.

        Parameters
        ----------
        x : array-like, frame, tuple or dict
            Inputs, a row each.
        y : array-like
            Targets, a row each.
        alpha : float, default=None
            Miscoverage level, 0.1 by default.
        confidence_level : float, default=None
            1 - alpha, in place of ``alpha``.
        """
        requested = requested_alpha(alpha, confidence_level, unknown)
        if self.calibration.traits.rows:
            raise ValueError(
                "feature_coverage needs one threshold for all rows: calibrate with "
                "ffcp.calibrations.Marginal and without groups"
            )
        exact = self.alpha_of_each(requested, self.calibration.scores.shape[1])
        scores = self.score(x, y)
        scores = scores.reshape(len(scores), -1)
        inside = (scores <= self.calibration.quantile(exact)).double()
        inside = inside.masked_fill(scores.isnan(), math.nan)  # of targets that are not known
        inside = inside.amin(dim=1) if self.joint == BONFERRONI else inside
        counted = ~inside.reshape(len(inside), -1).isnan().all(dim=1)
        return Coverage(float(inside.nanmean()), int(counted.sum()))


class _ConvergenceCounter(BatchRunner):
    """Counts the rows for which the inversion found no feature that gives the target."""

    def finish(self, result: Result) -> Counts:
        """Return the rows whose score is infinite."""
        if result.infinite:
            count = len(result.infinite)
            rows = ", ".join(map(str, result.infinite[:5])) + (", ..." if count > 5 else "")
            result.warnings.append(
                f"the inversion found no feature that gives y for {count} calibration rows "
                f"({rows}); they count as infinitely far, which widens the intervals"
            )
        return Counts(unconverged=tuple(result.infinite))


class FCQR(FCP):
    """Feature conformalized quantile regression: FCP for a model of two quantiles.

    Notes
    -----
    The score of a target outside the two quantiles is how far the feature must move until the
    nearer one reaches it. Inside it is negative: how far the feature can move, straight along the
    steepest direction, before the lower quantile rises to y or the upper one falls to it. So a
    negative threshold shrinks the interval, and score and interval describe one nested family.

    Parameters
    ----------
    model : nn.Module
        A network whose forward returns the lower and the upper quantile, (n, 2). Quantiles that
        cross are put in order.
    feature : str or nn.Module
        As in :class:`FCP`.
    norm : float, default=math.inf
        As in :class:`FCP`.
    bound : str, default="ibp"
        As in :class:`FCP`.
    invert : str, default="descent"
        As in :class:`FCP`.
    steps : int, default=None
        As in :class:`FCP`.
    lr : float, default=0.01
        As in :class:`FCP`.
    optimizer : str, default="sgd"
        As in :class:`FCP`.
    head : nn.Module, default=None
        As in :class:`FCP`.
    calibration : Calibration, default=None
        As in :class:`FCP`.
    **common : dict
        As in :class:`FCP`.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))  # yours is trained
    >>> x, y = torch.randn(100, 2), torch.randn(100)
    >>> predictor = FCQR(model, "0", steps=20).calibrate(x, y)
    >>> predictor.predict_interval(x).lower.shape
    torch.Size([100])
    """

    _family = QuantileBallScore
