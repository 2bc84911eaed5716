"""Prediction intervals from networks trained on folds: the jackknife+ and CV+.

Where rows are few, calibration rows are missed in training. Here every row is used for both: the
rows are divided into K folds, a network is trained without each of them, and a row's residual is
that of the network that was trained without it (Barber et al., 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ffcp import files
from ffcp.conformal.rank import conformal_rank, requested_alpha, rows_needed
from ffcp.network import arrays, forward, inputs
from ffcp.network.model import Identity, fingerprint
from ffcp.regression.intervals import Interval
from ffcp.regression.joint import BOTH, LOWER, UPPER
from ffcp.warnings import warn

Self = TypeVar("Self", bound="CrossConformal")
_FEW = 30  # rows up to which each is a fold
_COUNTS = range(10, 16)  # numbers of folds to choose from above
_ROUNDING = 4 * torch.finfo(torch.float64).eps
_BLOCK = 2**21  # numbers at a time: rows to predict, times rows that calibrate


class CrossConformal(nn.Module):
    """Intervals from K networks, each trained without one fold of the rows: jackknife+ and CV+.

    Parameters
    ----------
    models : sequence of nn.Module
        K trained networks of one output. Network k was trained without the rows of fold k: they
        neither fitted it nor stopped its training, chose its settings or scaled its inputs.
    folds : array-like
        For each row the number of its fold, from 0 to K - 1, in the order in which
        :meth:`calibrate` gets them. With a fold for every row this is the jackknife+. A row of
        fold -1 is in none: every network may have been trained with it, and it does not
        calibrate. Folds of one size have the best guarantee: :meth:`even_folds`.
    side : str, default="both"
        ``"both"``, or ``"lower"`` or ``"upper"`` for intervals that are infinite on the other
        side.
    batch_size : int, default=None
        Rows per pass over arrays.

    Notes
    -----
    With n rows, residuals R_i and mu_k the network of fold k(i), the interval goes from the
    floor(alpha (n + 1))-th smallest mu_k(x) - R_i to the ceil((1 - alpha)(n + 1))-th smallest
    mu_k(x) + R_i. Its guarantee is that of :meth:`guarantee`: 1 - 2 alpha for the jackknife+, a
    little less for CV+; 1 - alpha is usual, and not guaranteed. The training must not depend on
    the order of the rows, other than by random numbers.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(60, 2)
    >>> y = x.sum(dim=1) + 0.1 * torch.randn(60)
    >>> folds = CrossConformal.even_folds(60)
    >>> def least_squares(x, y):  # your training
    ...     model = nn.Linear(2, 1, bias=False)
    ...     model.weight.data = torch.linalg.lstsq(x, y[:, None]).solution.T
    ...     return model
    >>> models = [least_squares(x[folds != k], y[folds != k]) for k in range(10)]
    >>> predictor = CrossConformal(models, folds).calibrate(x, y)
    >>> interval = predictor.predict_interval(torch.randn(3, 2), alpha=0.1)
    >>> bool((interval.width > 0).all()), round(predictor.guarantee(0.1), 3)
    (True, 0.724)
    """

    scores: Tensor
    folds: Tensor

    def __init__(
        self,
        models: Sequence[nn.Module],
        folds: Any,
        *,
        side: str = BOTH,
        batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if side not in (BOTH, LOWER, UPPER):
            raise ValueError(f"'side' must be 'both', 'lower' or 'upper', got {side!r}")
        if len(models) < 2:
            raise ValueError(f"'models' must be at least two networks, got {len(models)}")
        self.models = nn.ModuleList(models)
        self.side, self.batch_size = side, batch_size
        self.register_buffer("folds", _checked_folds(folds, len(models)))
        self.register_buffer("scores", torch.empty(0, dtype=torch.float64))
        self._identities: list[Identity] = []
        self._layout: dict[str, Any] = {}  # of inputs and targets, as in inputs.Reader

    # -- folds and their guarantee ----------------------------------------------------------

    @staticmethod
    def even_folds(rows: int, seed: int = 0) -> Tensor:
        """Return the number of a fold for each row, in 10 to 15 folds of one size.

        With up to 30 rows each is its own fold. The number of folds is that which leaves out the
        fewest rows: these have the number -1.

        Parameters
        ----------
        rows : int
            Number of rows.
        seed : int, default=0
            Seed of the assignment of rows to folds.

        Examples
        --------
        >>> folds = CrossConformal.even_folds(43)
        >>> int(folds.max()) + 1, int((folds < 0).sum())
        (14, 1)
        """
        if rows < 2:
            raise ValueError(f"folds need at least two rows, got {rows}")
        count = rows if rows <= _FEW else min(_COUNTS, key=lambda number: (rows % number, number))
        folds = torch.full((rows,), -1)
        inside = np.random.default_rng(seed).permutation(rows)[: rows - rows % count]
        folds[torch.from_numpy(inside)] = torch.arange(len(inside)) % count
        return folds

    def guarantee(
        self, alpha: Any = None, *, confidence_level: Any = None, **unknown: NoReturn
    ) -> float:
        """Return the guaranteed coverage.

        For K folds of n / K rows it is 1 - 2 alpha - min(2 (1 - 1/K) / (n/K + 1),
        (1 - K/n) / (K + 1)) (Theorem 4 of Barber et al.), which for the jackknife+ is
        1 - 2 alpha (their Theorem 1). For folds of several sizes only the first of the two is
        known; it follows from the weighted mean of the folds' p-values (Vovk and Wang, 2020).

        Parameters
        ----------
        alpha : float, default=None
            Miscoverage level, 0.1 by default.
        confidence_level : float, default=None
            1 - alpha, in place of ``alpha``.
        """
        sizes = torch.bincount(self._in_folds)
        n, k = len(self._in_folds), len(self.models)
        lost = Fraction(2 * (k - 1), n + k)
        if len(sizes.unique()) == 1:
            lost = min(lost, (1 - Fraction(k, n)) / (k + 1))
        exact = requested_alpha(alpha, confidence_level, unknown)
        return float(max(Fraction(0), 1 - 2 * exact - lost))

    # -- calibrating and predicting ---------------------------------------------------------

    def calibrate(self: Self, x: Any, y: Any) -> Self:
        """Calibrate on the residual of every row by the network that was trained without it.

        Parameters
        ----------
        x : array-like, frame, tuple or dict
            All rows that the networks were trained with, in the order of ``folds``.
        y : array-like
            Their targets.
        """
        target = arrays.target_tensor(y)
        count = len(self.folds)
        readers = [inputs.Reader(model) for model in self.models]
        tensors = [read(x) for read in readers]
        if inputs.row_count(tensors[0]) != count or len(target) != count:
            raise ValueError(
                f"'folds' has {count} rows, x has {inputs.row_count(tensors[0])} y {len(target)}: "
                "give all rows, in the order of folds"
            )
        arrays.target_like(target, torch.empty(count))
        arrays.check_finite(target, "y")
        scores = torch.empty(count, dtype=torch.float64)
        identities = [Identity.of(model) for model in self.models]
        for fold, model in enumerate(self.models):
            rows = torch.nonzero(self.folds.cpu() == fold)[:, 0]
            held_out = inputs.take(tensors[fold], rows)
            # In float32: a network with float64 output may have computed in less.
            forward.check_rows(model, held_out, (), dtype=torch.float32)
            error = target[rows].double().reshape(-1) - _output(model, held_out, self.batch_size)
            scores[rows] = self._score(error)
        self.scores = scores[self.folds.cpu() >= 0].to(self.folds.device)
        self._identities = identities
        self._layout = {**readers[0].layout, "y": {"row": list(target.shape[1:])}}
        return self

    @property
    def _in_folds(self) -> Tensor:
        """The folds of the rows that are in one."""
        return self.folds[self.folds >= 0]

    def _score(self, error: Tensor) -> Tensor:
        """Return how far a target lies beyond a prediction, on the finite sides."""
        return {BOTH: error.abs(), LOWER: -error, UPPER: error}[self.side]

    def predict_interval(
        self, x: Any, alpha: Any = None, *, confidence_level: Any = None, **unknown: NoReturn
    ) -> Interval:
        """Return prediction intervals, whose coverage is that of :meth:`guarantee`.

        ``alpha`` is the miscoverage level, 0.1 by default; ``confidence_level``, in its place, is
        1 - alpha. The prediction is the median, over rows, of the predictions of the networks
        trained without them.

        Parameters
        ----------
        x : array-like, frame, tuple or dict
            Inputs, a row each.
        alpha : float, default=None
            Miscoverage level, 0.1 by default.
        confidence_level : float, default=None
            1 - alpha, in place of ``alpha``.
        """
        alpha = requested_alpha(alpha, confidence_level, unknown)
        self._must_be_ready()
        n = len(self.scores)
        rank = conformal_rank(n, alpha)
        read = [inputs.Reader(model, self._layout)(x) for model in self.models]
        pairs = zip(self.models, read, strict=True)
        outputs = [_output(model, tensors, self.batch_size) for model, tensors in pairs]
        folds, scores = self._in_folds.cpu(), self.scores.cpu()
        parts = []
        for block in torch.stack(outputs, dim=1).split(max(1, _BLOCK // n)):
            predictions = block[:, folds]  # for each calibration row, by the network without it
            middle = predictions.median(dim=1).values
            # Outward by their rounding errors: a target whose score ties must not be lost.
            reach = scores + _ROUNDING * (predictions.abs() + scores.abs())
            lower, upper = torch.full_like(middle, -torch.inf), torch.full_like(middle, torch.inf)
            if self.side != UPPER and rank <= n:
                lower = (predictions - reach).kthvalue(n + 1 - rank, dim=1).values
            if self.side != LOWER and rank <= n:
                upper = (predictions + reach).kthvalue(rank, dim=1).values
            parts.append((lower, upper, middle))
        if rank > n:
            warn(
                f"the interval is infinite: alpha={float(alpha):g} needs at least "
                f"{rows_needed(alpha)} rows and there are {n}: give more rows, or a larger alpha"
            )
        columns = (torch.cat(blocks) for blocks in zip(*parts, strict=True))
        lower, upper, middle = (arrays.like_target(column, self._layout) for column in columns)
        return Interval(lower, upper, middle, float(alpha))

    def forward(self, x: Any, alpha: Any = None, **options: Any) -> Interval:
        """Return intervals, as :meth:`predict_interval` does."""
        return self.predict_interval(x, alpha, **options)

    def _must_be_ready(self) -> None:
        if not len(self.scores):
            raise RuntimeError("call calibrate(x, y) first, with the rows of all folds")
        for model, identity in zip(self.models, self._identities, strict=True):
            identity.check(model)

    # -- files ------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the residuals, folds and settings to a safetensors file; the models are yours.

        Parameters
        ----------
        path : str or Path
            The file to write.
        """
        self._must_be_ready()
        points = {"scores": self.scores.cpu(), "folds": self.folds.cpu()}
        settings = {
            "side": self.side,
            "layout": self._layout,
            "models": [fingerprint(model) for model in self.models],
            "autocast": [identity.autocast for identity in self._identities],
        }
        files.write(path, {**points, "settings": files.seal(settings, points)})

    @classmethod
    def load(
        cls: type[Self],
        path: str | Path,
        models: Sequence[nn.Module],
        *,
        batch_size: int | None = None,
    ) -> Self:
        """Load the predictor that :meth:`save` wrote, for the same networks.

        Parameters
        ----------
        path : str or Path
            A file that :meth:`save` wrote.
        models : sequence of nn.Module
            The same networks, in the same order.
        batch_size : int, default=None
            Rows per pass over arrays.
        """
        tensors = files.read(path)
        with files.refused(path):
            if tensors.keys() != {"scores", "folds", "settings"}:
                raise ValueError("it was not saved by a CrossConformal")
            saved = files.unseal(tensors.pop("settings"), tensors)
            predictor = cls(models, tensors["folds"], side=saved["side"], batch_size=batch_size)
            identities = [Identity.of(model) for model in predictor.models]
            if saved["models"] != [identity.fingerprint for identity in identities]:
                raise ValueError("it belongs to other networks, or to other weights of them")
            for identity, autocast in zip(identities, saved["autocast"], strict=True):
                identity.autocast = autocast
        predictor.scores, predictor._identities = tensors["scores"], identities
        predictor._layout = saved["layout"]
        return predictor

    def extra_repr(self) -> str:
        """Return the numbers of rows and folds."""
        return f"side={self.side!r}, {len(self.models)} folds, {len(self._in_folds)} rows"


def _checked_folds(folds: Any, models: int) -> Tensor:
    array = np.asarray(folds.detach().cpu() if isinstance(folds, Tensor) else folds)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"'folds' must be one whole number per row, got shape {array.shape}")
    numbers = set(array.tolist())
    if numbers - {-1} != set(range(models)):
        raise ValueError(
            f"'folds' must hold every number from 0 to {models - 1}, one for each of the {models} "
            f"models, and no other but -1 for rows in no fold; it holds {sorted(numbers)[:10]}"
        )
    return torch.from_numpy(array.astype(np.int64))


def _output(model: nn.Module, x: Any, batch_size: int | None) -> Tensor:
    """Return the predictions of a model of one output, in float64."""
    parts = [out.output for out in forward.run_batches(model, x, batch_size=batch_size)]
    predictions = torch.cat(parts).double().cpu()
    if predictions.numel() != len(predictions):
        raise ValueError(
            f"CrossConformal needs models of one output, got shape {tuple(predictions.shape)}: "
            "use one for each output"
        )
    return predictions.reshape(-1)
