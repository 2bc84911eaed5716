"""Localized methods: the threshold at x comes from the calibration points near x."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ffcp import files, localize
from ffcp.bands import Interval
from ffcp.choose import RowSplit
from ffcp.conformal.rank import exact_alpha, points_needed
from ffcp.errors import FFCPWarning
from ffcp.localize import (
    AUTO,
    FEATURE,
    PREDICTION,
    BandwidthChoice,
    BandwidthTrial,
    Localizer,
    LocalStore,
)
from ffcp.network import checks, inputs, passes
from ffcp.network.features import INPUT, resolve
from ffcp.network.jacobian import Method
from ffcp.notes import EmbeddingNotes, Notes, Points
from ffcp.pieces import Needs
from ffcp.predictors import CP, CQR, FFCP, FFCQR, BandPredictor, Joint, Thresholds

GUARANTEES = {"marginal": "level", "level": "level", "random": "random", "none": "none"}
_CHOOSING_ROWS = 2000  # enough for a bandwidth; the work grows with their square
_ROUNDS, _AFFORDABLE = 8, 4 * 10**8  # of that advice: tries, and pairs of points for each
_SHOWN = 16  # infinite bands that the advice on the bandwidth looks at
Self = TypeVar("Self", bound="_Localized")


class _Localized(BandPredictor):
    """Exchanges the one threshold for a threshold at every point."""

    calibration: LocalStore  # type: ignore[assignment]

    def _set_up(
        self,
        localizer: Localizer | str,
        guarantee: str,
        choose_fraction: float,
        choose_alpha: float,
        seed: int,
    ) -> None:
        if isinstance(localizer, str):
            localizer = Localizer(localizer)
        if not isinstance(localizer, Localizer):
            raise TypeError(f"localizer must be an ffcp.Localizer or a kernel, got {localizer!r}")
        if guarantee not in GUARANTEES:
            raise ValueError(
                f"unknown guarantee {guarantee!r}: choose one of {', '.join(GUARANTEES)}"
            )
        if GUARANTEES[guarantee] == "random" and localizer.kernel == "nearest":
            raise ValueError(
                "guarantee 'random' draws from the kernel as a density, and 'nearest' is none: "
                "use guarantee='level', or another kernel"
            )
        if not 0 < choose_fraction < 1:
            raise ValueError(f"choose_fraction must lie between 0 and 1, got {choose_fraction}")
        exact_alpha(choose_alpha)
        self.localizer = localizer
        self.guarantee = GUARANTEES[guarantee]
        self.choose_fraction, self.choose_alpha, self.seed = choose_fraction, choose_alpha, seed
        self.bandwidth = None if localizer.bandwidth == AUTO else float(localizer.bandwidth)
        self.bandwidth_choice: BandwidthChoice | None = None
        self._fitted = self.bandwidth is not None  # so that all rows calibrate
        self.calibration = LocalStore()
        on = localizer.on
        self._layer: str | None = None
        if isinstance(on, str) and on not in (INPUT, PREDICTION, FEATURE):
            self._layer = resolve(self.model, on)
        if on == FEATURE and not isinstance(self, FFCP):
            raise ValueError(
                f"on='feature' is the layer whose gradient FFLCP takes; {type(self).__name__} "
                "takes none: name the layer itself"
            )
        if on == FEATURE and getattr(self, "feature", None) is None:
            raise ValueError(
                "on='feature' needs one feature by its name: the automatic choice would change "
                "the embedding on the way"
            )

    def _settings(self) -> dict[str, Any]:
        return {
            **super()._settings(),
            **self.localizer.described,
            "bandwidth": self.bandwidth,
            "guarantee": self.guarantee,
        }

    # -- where points lie -----------------------------------------------------------------

    def _embed(self, x: Any, run: Sequence[Tensor] | None = None) -> Tensor:
        """Embed a batch: rows (n, e) in float32 on the CPU."""
        on = self.localizer.on
        if callable(on):
            found = torch.as_tensor(on(x))
        elif on == INPUT:
            found = inputs.side_by_side(x)
        elif on == PREDICTION and run is not None:
            found = run[0]
        else:
            layer = getattr(self, "feature", None) if on == FEATURE else self._layer
            found = self._layer_values(x, layer)
        rows = inputs.row_count(x)
        if found.dim() == 0 or len(found) != rows:
            raise ValueError(
                f"the embedding has shape {tuple(found.shape)} for {rows} rows: it needs one row "
                "for each"
            )
        found = found.detach().reshape(rows, -1).to("cpu", torch.float32)
        checks.finite(found, "the embedding")
        return found

    def _layer_values(self, x: Any, layer: str | None) -> Tensor:
        """Run the model once more; beside the distances to all calibration points it is little."""
        buffer = inputs.RowBuffer(inputs.row_count(x))
        for batch in inputs.batches(x, self.batch_size):
            seen = passes.see(self.model, batch, Needs(values=(layer or INPUT,)))
            found = seen.output if layer is None else seen.values[layer]
            buffer.add({"value": found.reshape(len(found), -1)})
        return buffer["value"]

    # -- calibrating ----------------------------------------------------------------------

    def _notes(self, groups: Any) -> Notes:
        if groups is not None:
            raise TypeError(
                f"{type(self).__name__} takes no groups: its thresholds are local already. CP, "
                "FFCP, CQR and FFCQR take groups"
            )
        return EmbeddingNotes(lambda x, row: self._embed(x))

    def _store(self, points: Points, notes: Notes, update: bool) -> Any:
        scores, embedding = points.scores, notes.of(points.kept)
        choice = None
        if not self._fitted and not (update and self.bandwidth is not None):
            chosen = RowSplit(self.choose_fraction, self.seed + 1).mask(len(scores))
            chosen &= chosen.cumsum(0) <= _CHOOSING_ROWS
            choice = self._choose(scores[chosen], embedding[chosen], int((~chosen).sum()))
            scores, embedding = scores[~chosen], embedding[~chosen]
        (self.calibration.add if update else self.calibration.replace)(scores, embedding)
        if choice is not None:
            self.bandwidth, self.bandwidth_choice = choice.bandwidth, choice
        return points.result

    def _choose(self, scores: Tensor, embedding: Tensor, planned: int) -> BandwidthChoice:
        return localize.choose_bandwidth(
            self.localizer.kernel, scores, embedding, self.choose_alpha, planned
        )

    def fit_localizer(self: Self, x: Any, y: Any, planned: int | None = None) -> Self:
        """Choose the bandwidth on points of their own, so that all others can calibrate.

        Parameters
        ----------
        x, y
            Inputs and targets that will not calibrate; the training data will do.
        planned
            How many points will calibrate; by default as many as are given here.
        """
        if self.localizer.bandwidth != AUTO:
            raise ValueError(f"the bandwidth is given: {self.localizer.bandwidth}")
        self._ready()
        with torch.inference_mode(False):
            ((x, y),) = inputs.pairs(x, y, self.model)
            checks.finite(y, "y")
            few = np.random.default_rng(self.seed).permutation(len(y))[:_CHOOSING_ROWS]
            picked = torch.from_numpy(np.sort(few))
            some = inputs.take(x, picked)
            scores = torch.cat(list(self._scores(iter([(some, y[picked], 0)]))))
            self.bandwidth_choice = self._choose(scores, self._embed(some), planned or len(y))
        self.bandwidth = self.bandwidth_choice.bandwidth
        self._fitted = True
        return self

    # -- bands ----------------------------------------------------------------------------

    def predict_interval(self, x: Any, alpha: Any = 0.1, *, groups: Any = None) -> Interval:
        """Give bands that hold the truth with probability at least 1 - alpha.

        Where too few calibration points are near, the band is infinite; a warning says for how
        many rows, and which bandwidth would do. Parameters are those of
        :meth:`CP.predict_interval`.
        """
        thin: list[Tensor] = []
        self._thin = thin
        band = super().predict_interval(x, alpha, groups=groups)
        rows = sum(map(len, thin))
        if rows:
            warnings.warn(
                f"{rows} of {len(band.lower)} bands are infinite, for too little weight lies "
                f"around these points: {self._advice(torch.cat(thin), alpha)}",
                FFCPWarning,
                stacklevel=2,
            )
        return band

    def _thresholds(self, x: Any, alpha: Fraction, groups: Any) -> Thresholds:
        self._notes(groups)  # refuses them
        assert self.bandwidth is not None
        bandwidth, thin = self.bandwidth, self._thin
        random = np.random.default_rng(self.seed)

        def find(some: Any, run: Sequence[Tensor], rows: slice) -> Tensor:
            embedding = self._embed(some, run)
            found = self.calibration.threshold(
                alpha, embedding, self.localizer.kernel, bandwidth, self.guarantee, random
            )
            infinite = found.isinf().any(dim=1)
            if infinite.any():
                thin.append(embedding[infinite])
            return found

        return find

    def _advice(self, x: Tensor, alpha: Any) -> str:
        """Say which bandwidth would make bands finite at embedded points."""
        bandwidth = self.bandwidth_for(x, alpha)
        if bandwidth is None:
            return (
                f"alpha={float(alpha):g} needs more calibration points than the "
                f"{len(self.calibration)} there are"
            )
        if self.localizer.kernel == "nearest":
            return f"bandwidth={bandwidth:.0f} neighbours would do, instead of {self.bandwidth:.0f}"
        return f"a bandwidth of about {bandwidth:.3g} would do, instead of {self.bandwidth:.3g}"

    def bandwidth_for(self, embedding: Tensor, alpha: Any = 0.1) -> float | None:
        """Find a bandwidth that gives finite bands at embedded points; None if none does.

        At most 16 of the points are looked at, those with the least weight around them.
        """
        if len(self.calibration) < points_needed(alpha):
            return None
        if self.localizer.kernel == "nearest":
            return self._neighbours_for(alpha)
        store, kernel = self.calibration, self.localizer.kernel
        bandwidth = float(self.bandwidth or 1)
        around = store.around(kernel, bandwidth)
        weights = torch.cat([around.sums(part, 0).total for part in embedding.split(_SHOWN)])
        thinnest = embedding[weights.argsort()[:_SHOWN]]
        for _ in range(_ROUNDS):
            needed = self._weight_needed(bandwidth, alpha)
            if needed is None or needed >= len(store):
                return None
            found = localize.enough_bandwidth(store.embedding, thinnest, kernel, bandwidth, needed)
            # The recalibrated level moves with the bandwidth; on much data, once must do.
            small = len(store) * min(len(store), localize.LEVEL_ROWS) <= _AFFORDABLE
            if found <= bandwidth or self.guarantee != "level" or not small:
                break
            bandwidth = found
        # A little more than just enough: it is sums of rounded weights that count.
        return 1.01 * found

    def _weight_needed(self, bandwidth: float, alpha: Any) -> float | None:
        """How much weight around a point makes its band finite; None if no weight does."""
        level: Fraction | None = 1 - exact_alpha(alpha)
        if self.guarantee == "level":
            store = self.calibration
            around = store.around(self.localizer.kernel, bandwidth)
            levels = [store.level(around, o).at(alpha) for o in range(store.scores.shape[1])]
            level = None if None in levels else max(found for found in levels if found is not None)
        return None if level is None else float(level / (1 - level))

    def _neighbours_for(self, alpha: Any) -> float | None:
        wanted, store = points_needed(alpha), self.calibration
        while self.guarantee == "level" and wanted <= len(store):
            around = store.around("nearest", wanted)
            level = store.level(around, 0).at(alpha)
            if level is not None and localize.level_target(torch.tensor([wanted + 1]), level) <= (
                wanted
            ):
                break
            wanted += max(1, wanted // 2)
        return float(wanted) if wanted <= len(store) else None

    # -- sharing the calibration ----------------------------------------------------------

    def _take_over(self, other: Any) -> None:
        self.calibration.add(other.calibration.scores, other.calibration.embedding)

    def _remembered(self) -> dict[str, Any]:
        choice = None if self.bandwidth_choice is None else asdict(self.bandwidth_choice)
        return {**super()._remembered(), "bandwidth_choice": choice}

    def set_extra_state(self, state: Tensor) -> None:
        """Take over the bandwidth that was saved; check all other settings."""
        settings = files.unpack(state)
        if self.localizer.bandwidth == AUTO:
            self.bandwidth = settings.get("bandwidth")
            self.bandwidth_choice = _choice_from(settings.get("bandwidth_choice"))
        super().set_extra_state(state)


def _choice_from(saved: dict[str, Any] | None) -> BandwidthChoice | None:
    if saved is None:
        return None
    trials = tuple(BandwidthTrial(**trial) for trial in saved["trials"])
    return BandwidthChoice(**{**saved, "trials": trials})


class LCP(_Localized, CP):
    """Localized conformal prediction (Guan, 2023): near calibration points count more.

    Parameters
    ----------
    model
        A trained network; forward returns one tensor with a row per input row.
    localizer
        An :class:`ffcp.Localizer`, or the name of a kernel, ``"nearest"``, ``"gaussian"``,
        ``"laplace"`` or ``"box"``, on the prediction with an automatic bandwidth.
    guarantee
        ``"marginal"``: bands cover with probability at least 1 - alpha; it stands for
        ``"level"``, the recalibrated level (see :mod:`ffcp.localize`). ``"random"`` has the same
        guarantee by randomisation (Hore and Barber, 2023). ``"none"`` is the plain localized
        quantile, which has no guarantee.
    joint
        With several outputs, as in :class:`CP`.
    choose_fraction, choose_alpha, seed
        For an automatic bandwidth that :meth:`fit_localizer` has not chosen before: the share of
        the calibration rows that choose it (at most 2,000) and then do not calibrate, the level
        at which bandwidths are compared, and the seed of the division. The seed is also that of
        guarantee ``"random"``.
    batch_size
        Rows per pass over arrays.

    Attributes
    ----------
    bandwidth : float or None
        The bandwidth in use; ``None`` until it is chosen.
    bandwidth_choice : BandwidthChoice or None
        What the automatic choice saw and took.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> x = torch.rand(1000, 1)
    >>> y = x[:, 0] * torch.randn(1000)  # noise grows to the right
    >>> near = Localizer("gaussian", on="input")
    >>> predictor = LCP(nn.Linear(1, 1), near).calibrate(x, y)  # yours is trained
    >>> band = predictor.predict_interval(torch.tensor([[0.1], [0.9]]), alpha=0.1)
    >>> length = band.upper - band.lower
    >>> bool(length[0] < length[1])
    True
    """

    def __init__(
        self,
        model: nn.Module,
        localizer: Localizer | str = "nearest",
        *,
        guarantee: str = "marginal",
        joint: Joint = False,
        choose_fraction: float = 0.2,
        choose_alpha: float = 0.1,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(model, joint=joint, batch_size=batch_size)
        self._set_up(localizer, guarantee, choose_fraction, choose_alpha, seed)


class LCQR(LCP, CQR):
    """Localized conformalized quantile regression: :class:`LCP` on a model for :class:`CQR`.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> predictor = LCQR(nn.Linear(3, 2), "nearest").calibrate(
    ...     torch.randn(500, 3), torch.randn(500)
    ... )
    >>> predictor.predict_interval(torch.randn(5, 3)).lower.shape
    torch.Size([5])
    """


class FFLCP(_Localized, FFCP):
    """Localized fast feature conformal prediction (the paper's FFLCP).

    The score is that of :class:`FFCP`, the residual over the gradient norm; the threshold is
    that of :class:`LCP`, from the calibration points near x.

    Parameters
    ----------
    model, feature, norm, floor, method, joint, batch_size
        As in :class:`FFCP`.
    localizer, guarantee
        As in :class:`LCP`; a localizer on ``"feature"`` measures distances at the layer whose
        gradient is taken.
    choose_fraction, choose_alpha, seed
        For the automatic choices of the feature and of the bandwidth; each takes this share of
        the rows.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))  # yours is trained
    >>> x = torch.randn(600, 1)
    >>> predictor = FFLCP(model, "0", "laplace").calibrate(x, torch.randn(600))
    >>> predictor.predict_interval(x[:5]).upper.shape
    torch.Size([5, 1])
    """

    def __init__(
        self,
        model: nn.Module,
        feature: str | nn.Module | Sequence[str | nn.Module] = AUTO,
        localizer: Localizer | str = "nearest",
        norm: float = 2,
        floor: float = 1e-6,
        *,
        method: Method = "auto",
        guarantee: str = "marginal",
        joint: Joint = False,
        choose_fraction: float = 0.2,
        choose_alpha: float = 0.1,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(
            model,
            feature,
            norm,
            floor,
            method=method,
            joint=joint,
            choose_fraction=choose_fraction,
            choose_alpha=choose_alpha,
            seed=seed,
            batch_size=batch_size,
        )
        self._set_up(localizer, guarantee, choose_fraction, choose_alpha, seed)


class FFLCQR(FFLCP, FFCQR):
    """Localized FFCQR: :class:`FFLCP` on a model for :class:`CQR`.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))  # yours is trained
    >>> predictor = FFLCQR(model, "0").calibrate(torch.randn(500, 3), torch.randn(500))
    >>> predictor.predict_interval(torch.randn(5, 3)).upper.shape
    torch.Size([5])
    """
