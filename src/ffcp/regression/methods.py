"""The named regression methods: combinations of a base, a scale and a calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch  # noqa: F401 - for the examples
from torch import Tensor, nn

from ffcp.arguments import known_only
from ffcp.conformal.bandwidth_selection import BandwidthChoice
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.local import FEATURE, Local, Localizer
from ffcp.network import jacobian
from ffcp.network.jacobian import Method
from ffcp.regression.common import Common
from ffcp.regression.interval_predictor import IntervalPredictor
from ffcp.regression.intervals import Quantiles
from ffcp.regression.scales import AUTO, Constant, GradientNorm, gradient_norm

if TYPE_CHECKING:
    from typing_extensions import Unpack

Feature = str | nn.Module | Sequence[str | nn.Module]
Self = TypeVar("Self", bound="Localized")


class CP(IntervalPredictor):
    """Split conformal prediction: intervals of one width for all inputs.

    Parameters
    ----------
    model : nn.Module
        A trained network; forward returns one tensor with a row per input row.
    calibration : Calibration, default=None
        How scores become thresholds, :class:`ffcp.calibrations.Marginal` by default;
        :class:`ffcp.calibrations.Weighted` under covariate shift.
    **common : dict
        ``joint``, ``side``, ``support``, ``missing``, ``selection_fraction``, ``selection_alpha``,
        ``seed``, ``batch_size`` and ``output``, as in :class:`ffcp.IntervalPredictor`.

    Examples
    --------
    >>> x = torch.linspace(0, 1, 200)[:, None]
    >>> y = 2 * x + 0.1 * torch.sin(50 * x)
    >>> model = nn.Linear(1, 1)  # yours is trained
    >>> interval = CP(model).calibrate(x[::2], y[::2]).predict_interval(x[1::2], alpha=0.1)
    >>> interval.lower.shape
    torch.Size([100, 1])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        calibration: Calibration | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(model, self._base(), Constant(), calibration, **common)

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments, but for the model."""
        return _without(super().config(), "base", "scale")


class CQR(CP):
    """Conformalized quantile regression (Romano, Patterson and Candes, 2019).

    The model returns two quantiles of the target; calibration moves both ends by the same
    amount, outward where they cover too little and inward where they cover too much.

    Parameters
    ----------
    model : nn.Module
        A trained network whose output has shape (n, 2), lower and upper quantile, or (n, m, 2)
        for m targets. See :func:`ffcp.pinball_loss`. Quantiles that cross are put in order.
    calibration : Calibration, default=None
        How scores become thresholds, :class:`ffcp.calibrations.Marginal` by default;
        :class:`ffcp.calibrations.Weighted` under covariate shift.
    **common : dict
        ``joint``, ``side``, ``support``, ``missing``, ``selection_fraction``, ``selection_alpha``,
        ``seed``, ``batch_size`` and ``output``, as in :class:`ffcp.IntervalPredictor`.

    Notes
    -----
    ``prediction`` of the interval is the middle of the two quantiles. An interval that would be
    empty is returned as a point.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Linear(3, 2)  # yours is trained
    >>> interval = CQR(model).calibrate(torch.randn(200, 3), torch.randn(200)).predict_interval(
    ...     torch.randn(5, 3), alpha=0.1
    ... )
    >>> interval.lower.shape
    torch.Size([5])
    """

    _base = Quantiles


class AtLayer(IntervalPredictor):
    """Arguments and attributes of methods that use gradient norms."""

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments, but for the model."""
        config = super().config()
        return {**_without(config, "base", "scale"), **config["scale"].config()}

    @property
    def norm(self) -> float:
        """Norm of the gradient."""
        return float(self.scale.norm)

    @property
    def floor(self) -> float:
        """Smallest scale."""
        return float(self.scale.floor)

    @property
    def method(self) -> Method:
        """How the gradients of many outputs are computed."""
        method: Method = self.scale.method
        return method


class FFCP(AtLayer):
    """Fast feature conformal prediction: widths proportional to the gradient norm.

    The score of a row is its residual divided by the norm of the gradient of the output with
    respect to a hidden layer (Algorithm 2 of the paper), so that widths depend on the input, for
    the cost of one backward pass through the layers behind the feature.

    Parameters
    ----------
    model : nn.Module
        A trained network; forward returns one tensor with a row per input row.
    feature : str, nn.Module or list, default="auto"
        Where the gradient is taken: a dotted module name, a module, ``"input"``, ``"output"``
        (which is plain CP), ``"auto"``, or a list of candidates to select from.
        ``"auto"`` tries at most 8 layers spread over the depth, and plain CP.
    norm : float, default=2
        Norm of the gradient: 1, 2 or ``inf``.
    floor : float, default=1e-6
        Smallest scale, for gradients that vanish. A constant; it must not be estimated from
        the calibration data.
    method : str, Sketch or Smooth, default="auto"
        How the gradients of many outputs are computed, see :func:`ffcp.gradient_norms`: ``"auto"``,
        ``"exact"``, ``"coloured"``, ``ffcp.scales.Sketch(probes)`` or ``ffcp.scales.Smooth(sigma,
        samples)``.
    calibration : Calibration, default=None
        How scores become thresholds, :class:`ffcp.calibrations.Marginal` by default;
        :class:`ffcp.calibrations.Weighted` under covariate shift.
    **common : dict
        ``joint``, ``side``, ``support``, ``missing``, ``selection_fraction``, ``selection_alpha``,
        ``seed``, ``batch_size`` and ``output``, as in :class:`ffcp.IntervalPredictor`.

    Attributes
    ----------
    feature : str or None
        The feature in use; ``None`` until it is selected.
    choice : Choice or None
        The report of the selection.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))  # yours is trained
    >>> x = torch.linspace(-2, 2, 400)[:, None]
    >>> y = model(x).detach() + 0.1 * torch.randn(400, 1)
    >>> predictor = FFCP(model, feature="0").calibrate(x[::2], y[::2])
    >>> interval = predictor.predict_interval(x[1::2], alpha=0.1)
    >>> interval.width.std() > 0  # not one width for all
    tensor(True)
    """

    def __init__(
        self,
        model: nn.Module,
        feature: Feature = AUTO,
        norm: float = 2,
        floor: float = 1e-6,
        *,
        method: Method = jacobian.AUTO,
        calibration: Calibration | None = None,
        **common: Unpack[Common],
    ) -> None:
        scale = gradient_norm(model, feature, norm, floor, method)
        super().__init__(model, self._base(), scale, calibration, **common)


class FFCQR(FFCP):
    """CQR with the gradient norm of each quantile as its scale (the paper's FFCQR).

    The norms of both quantiles come from the same forward pass.

    Parameters
    ----------
    model : nn.Module
        A network whose forward returns the lower and the upper quantile, (n, 2).
    feature : str, nn.Module or list, default="auto"
        As in :class:`FFCP`.
    norm : float, default=2
        As in :class:`FFCP`.
    floor : float, default=1e-6
        As in :class:`FFCP`.
    method : str, Sketch or Smooth, default="auto"
        As in :class:`FFCP`.
    calibration : Calibration, default=None
        As in :class:`FFCP`.
    **common : dict
        As in :class:`FFCP`.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))  # yours is trained
    >>> predictor = FFCQR(model, feature="0").calibrate(torch.randn(200, 3), torch.randn(200))
    >>> predictor.predict_interval(torch.randn(5, 3)).upper.shape
    torch.Size([5])
    """

    _base = Quantiles


class Localized(IntervalPredictor):
    """Arguments and attributes of localized methods."""

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments, but for the model."""
        local: Any = self._given[1]
        own = {"localizer": local.localizer, "guarantee": local.guarantee}
        return {**_without(super().config(), "base", "scale", "calibration"), **own}

    @property
    def _local(self) -> Local:
        """The localized calibration; with groups, that of each group."""
        calibration: Any = self.calibration
        local: Local = getattr(calibration, "inner", calibration)
        return local

    @property
    def localizer(self) -> Localizer:
        """Which calibration rows are near."""
        localizer: Localizer = self._local.localizer  # type: ignore[assignment]
        return localizer

    @property
    def guarantee(self) -> str:
        """The guarantee: ``"level"``, ``"random"`` or ``"none"``."""
        return self._local.guarantee

    @property
    def bandwidth(self) -> float | None:
        """The bandwidth in use; ``None`` until it is selected."""
        return self._local.bandwidth

    @property
    def bandwidth_choice(self) -> BandwidthChoice | None:
        """The report of the selection of the bandwidth."""
        choice: BandwidthChoice | None = self._state.report.get("bandwidth")
        return choice

    def bandwidth_for(self, embedding: Tensor, alpha: Any = 0.1) -> float | None:
        """Return a bandwidth with finite intervals at embedded rows; None if there is none.

        With groups, one for all groups.
        """
        parts = getattr(self.calibration, "parts", {"all": self.calibration})
        wide = [part.bandwidth_for(embedding, alpha) for part in parts.values()]
        return None if None in wide else max(bandwidth for bandwidth in wide if bandwidth)

    def fit_localizer(self: Self, x: Any, y: Any, planned: int | None = None) -> Self:
        """Select the bandwidth on rows that will not calibrate, so that all others can.

        Parameters
        ----------
        x : array-like, frame, tuple, dict or loader
            Inputs of rows that will not calibrate, for example the training data.
        y : array-like
            Their targets.
        planned : int, default=None
            How many rows will calibrate; by default as many as are given here.
        """
        if self.localizer.bandwidth != AUTO:
            raise ValueError(
                f"'bandwidth' was given as {self.localizer.bandwidth}: leave out fit_localizer, or "
                "pass bandwidth='auto'"
            )
        score, local = self._given
        self._given = (score, replace(local, bandwidth=None))  # type: ignore[call-arg]
        self._fit_calibration(x, y, planned)
        return self


class LCP(Localized):
    """Localized conformal prediction (Guan, 2023): calibration rows near x have more weight.

    Parameters
    ----------
    model : nn.Module
        A trained network; forward returns one tensor with a row per input row.
    localizer : Localizer or str, default="nearest"
        An :class:`ffcp.kernels.Localizer`, or the name of a kernel, ``"nearest"``, ``"gaussian"``,
        ``"laplace"`` or ``"box"``, on the prediction with an automatic bandwidth.
    guarantee : str, default="marginal"
        ``"marginal"``: intervals cover with probability at least 1 - alpha; the same as
        ``"level"``, the recalibrated level (see :mod:`ffcp.conformal.local`). ``"random"`` has
        the same guarantee by randomisation (Hore and Barber, 2023). ``"none"`` is the plain
        localized quantile, which has no guarantee.
    **common : dict
        As in :class:`ffcp.IntervalPredictor`, but for ``missing``. An automatic bandwidth that
        :meth:`fit_localizer` has not selected is selected on ``selection_fraction`` of the rows,
        at most 2,000. ``seed`` is also that of guarantee ``"random"``; without it the operating
        system seeds those random numbers.

    Attributes
    ----------
    bandwidth : float or None
        The bandwidth in use; ``None`` until it is selected.
    bandwidth_choice : BandwidthChoice or None
        The report of the selection.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> x = torch.rand(1000, 1)
    >>> y = x[:, 0] * torch.randn(1000)  # noise grows to the right
    >>> near = Localizer("gaussian", on="input")
    >>> predictor = LCP(nn.Linear(1, 1), near).calibrate(x, y)  # yours is trained
    >>> interval = predictor.predict_interval(torch.tensor([[0.1], [0.9]]), alpha=0.1)
    >>> length = interval.width
    >>> bool(length[0] < length[1])
    True
    """

    def __init__(
        self,
        model: nn.Module,
        localizer: Localizer | str = "nearest",
        *,
        guarantee: str = "marginal",
        **common: Unpack[Common],
    ) -> None:
        known_only(type(self), common, Common)  # no calibration
        super().__init__(model, self._base(), Constant(), Local(localizer, guarantee), **common)


class LCQR(LCP):
    """Localized conformalized quantile regression: :class:`LCP` on a model for :class:`CQR`.

    Parameters
    ----------
    model : nn.Module
        A network whose forward returns the lower and the upper quantile, (n, 2).
    localizer : Localizer or str, default="nearest"
        As in :class:`LCP`.
    guarantee : str, default="marginal"
        As in :class:`LCP`.
    **common : dict
        As in :class:`LCP`.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> predictor = LCQR(nn.Linear(3, 2), "nearest").calibrate(
    ...     torch.randn(500, 3), torch.randn(500)
    ... )
    >>> predictor.predict_interval(torch.randn(5, 3)).lower.shape
    torch.Size([5])
    """

    _base = Quantiles


class FFLCP(Localized, AtLayer):
    """Localized fast feature conformal prediction (the paper's FFLCP).

    The score is that of :class:`FFCP`, the residual over the gradient norm; the threshold is
    that of :class:`LCP`, from the calibration rows near x.

    Parameters
    ----------
    model : nn.Module
        As in :class:`FFCP`.
    feature : str, nn.Module or list, default="auto"
        As in :class:`FFCP`.
    norm : float, default=2
        As in :class:`FFCP`.
    floor : float, default=1e-6
        As in :class:`FFCP`.
    method : str, Sketch or Smooth, default="auto"
        As in :class:`FFCP`.
    localizer : Localizer or str, default="nearest"
        As in :class:`LCP`.
    guarantee : str, default="marginal"
        As in :class:`LCP`; a localizer on ``"feature"`` measures distances at the layer whose
        gradient is taken.
    **common : dict
        As in :class:`ffcp.IntervalPredictor`, but for ``missing``. Feature and bandwidth are
        selected on the same rows.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))  # yours is trained
    >>> x = torch.randn(600, 1)
    >>> predictor = FFLCP(model, "0", "laplace").calibrate(x, torch.randn(600))
    >>> predictor.predict_interval(x[:5]).upper.shape
    torch.Size([5])
    """

    def __init__(
        self,
        model: nn.Module,
        feature: Feature = AUTO,
        localizer: Localizer | str = "nearest",
        norm: float = 2,
        floor: float = 1e-6,
        *,
        method: Method = jacobian.AUTO,
        guarantee: str = "marginal",
        **common: Unpack[Common],
    ) -> None:
        scale = gradient_norm(model, feature, norm, floor, method)
        local = Local(_on_feature(localizer, scale), guarantee)
        known_only(type(self), common, Common)  # no calibration
        super().__init__(model, self._base(), scale, local, **common)


class FFLCQR(FFLCP):
    """Localized FFCQR: :class:`FFLCP` on a model for :class:`CQR`.

    Parameters
    ----------
    model : nn.Module
        A network whose forward returns the lower and the upper quantile, (n, 2).
    feature : str, nn.Module or list, default="auto"
        As in :class:`FFCP`.
    norm : float, default=2
        As in :class:`FFCP`.
    floor : float, default=1e-6
        As in :class:`FFCP`.
    method : str, Sketch or Smooth, default="auto"
        As in :class:`FFCP`.
    localizer : Localizer or str, default="nearest"
        As in :class:`FFLCP`.
    guarantee : str, default="marginal"
        As in :class:`FFLCP`.
    **common : dict
        As in :class:`FFLCP`.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))  # yours is trained
    >>> predictor = FFLCQR(model, "0").calibrate(torch.randn(500, 3), torch.randn(500))
    >>> predictor.predict_interval(torch.randn(5, 3)).upper.shape
    torch.Size([5])
    """

    _base = Quantiles


def _without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def _on_feature(localizer: Localizer | str, scale: GradientNorm) -> Localizer | str:
    """Return the localizer with the layer that ``on="feature"`` means."""
    if not isinstance(localizer, Localizer) or localizer.on != FEATURE:
        return localizer
    if scale.is_open:
        raise ValueError(
            "on='feature' needs one named feature, since the embedding would depend on which "
            "one is selected: name it"
        )
    return replace(localizer, on=str(scale.feature))
