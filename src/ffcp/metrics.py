"""How good bands are: coverage with its uncertainty, length, and coverage where it is worst.

All functions take a band, any tuple that starts with ``(lower, upper)``, as tensors or arrays.
With several outputs a row counts by the share of its outputs that are covered, or, with
``joint=True``, as covered only if all of them are, or, with a number as 0.9, if at least that
share of them is.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.conformal.rank import exact_alpha

__all__ = [
    "Coverage",
    "GroupCoverage",
    "class_coverage",
    "class_coverage_gap",
    "coverage",
    "cut",
    "group_coverage",
    "interval_score",
    "mean_length",
    "mean_set_size",
    "median_set_size",
    "set_coverage",
    "singleton_hit_ratio",
    "size_stratified_coverage",
    "size_stratified_violation",
    "tertiles",
    "worst_slab_coverage",
]


class Coverage(float):
    """A share of covered rows: a number that also knows its confidence interval.

    ``low`` and ``high`` bound the true coverage by Wilson's binomial interval, ``rows`` is the
    number of rows it was measured on.

    >>> measured = Coverage(0.9, rows=1000)
    >>> measured
    0.900 [0.880, 0.917]
    >>> measured > 0.89
    True
    """

    low: float
    high: float
    rows: int

    def __new__(cls, share: float, rows: int, confidence: float = 0.95) -> Coverage:
        """Attach the interval that holds the true share with this confidence."""
        self = super().__new__(cls, share)
        self.low, self.high = wilson(share, rows, confidence)
        self.rows = rows
        return self

    def __repr__(self) -> str:
        return f"{float(self):.3f} [{self.low:.3f}, {self.high:.3f}]"

    def __reduce__(self) -> Any:
        return Coverage, (float(self), self.rows)


def wilson(share: float, rows: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return Wilson's confidence interval for a binomial share.

    >>> low, high = wilson(0.0, 10)
    >>> round(low, 3), round(high, 3)
    (0.0, 0.278)
    """
    if not rows:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = (share + z * z / (2 * rows)) / (1 + z * z / rows)
    spread = math.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows))
    half = z * spread / (1 + z * z / rows)
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True)
class GroupCoverage:
    """Coverage inside each group of rows."""

    groups: Mapping[Hashable, Coverage]

    @property
    def worst_group(self) -> Hashable:
        """The group that is covered least."""
        return min(self.groups, key=lambda name: self.groups[name])

    @property
    def worst(self) -> Coverage:
        """Coverage of the group that is covered least."""
        return self.groups[self.worst_group]

    @property
    def gap(self) -> float:
        """How far the best covered group is above the worst."""
        return float(max(self.groups.values())) - float(self.worst)


def coverage(band: Sequence[Any], y: Any, *, joint: bool | float = False) -> Coverage:
    """Measure the share of targets inside their band.

    >>> coverage(([0.0, 0.0], [1.0, 1.0]), [0.5, 2.0])
    0.500 [0.095, 0.905]
    >>> box = [[0.0, 0.0]], [[1.0, 1.0]]  # one row, two outputs, of which one is covered
    >>> [float(coverage(box, [[0.5, 2.0]], joint=joint)) for joint in (False, True, 0.5)]
    [0.5, 0.0, 1.0]
    """
    hits = _hits(band, y, joint)
    return Coverage(float(hits.mean()), len(hits))


def mean_length(band: Sequence[Any]) -> float:
    """Average upper - lower over rows and outputs, the band length of the paper.

    >>> mean_length(([0.0, 0.0], [1.0, 3.0]))
    2.0
    """
    lower, upper = _bounds(band)
    return float((upper - lower).mean())


def interval_score(band: Sequence[Any], y: Any, alpha: Any = 0.1) -> float:
    """Average Winkler's interval score: length plus 2 / alpha times every miss distance.

    Smaller is better; the true conditional quantiles minimise it.

    >>> interval_score(([0.0], [1.0]), [1.5], alpha=0.1)
    11.0
    """
    lower, upper = _bounds(band)
    target = _target(y, lower)
    miss = (lower - target).clamp_min(0) + (target - upper).clamp_min(0)
    return float((upper - lower + 2 / float(exact_alpha(alpha)) * miss).mean())


def group_coverage(
    band: Sequence[Any],
    y: Any,
    groups: Any = None,
    *,
    feature: Any = None,
    slices: int = 3,
    joint: bool | float = False,
) -> GroupCoverage:
    """Measure coverage inside groups of rows.

    Parameters
    ----------
    band, y
        The bands and the targets.
    groups
        A label for each row. Without groups and feature, rows are cut by the size of y into
        thirds (:func:`tertiles`).
    feature
        Instead of labels: a number for each row, a column of the input, say. Rows are cut into
        ``slices`` of about equally many by its size (:func:`cut`).
    slices
        How many slices of the feature.
    joint
        Whether a row counts as covered only if all its outputs are.

    Examples
    --------
    >>> result = group_coverage(([0, 0, 0, 0], [1, 1, 1, 1]), [0, 1, 2, 3], groups=list("aabb"))
    >>> result.worst_group, result.worst, result.gap
    ('b', 0.000 [0.000, 0.658], 1.0)
    """
    hits = _hits(band, y, joint)
    if groups is not None and feature is not None:
        raise ValueError("give groups or a feature to cut by, not both")
    if feature is not None:
        labels = cut(feature, slices)
    else:
        labels = tertiles(y) if groups is None else np.asarray(_array(groups))
    if labels.shape != (len(hits),):
        raise ValueError(
            f"groups has shape {labels.shape}, expected one label per row: {len(hits)}"
        )
    return GroupCoverage(_by_label(hits, labels))


def cut(values: Any, slices: int = 3) -> np.ndarray:
    """Label rows by the slice of ``values`` they are in: about equally many rows in each.

    Equal values stay together, so there may be fewer slices than asked for.

    >>> cut([5.0, 1.0, 3.0, 4.0], slices=2).tolist()
    ['2: 4 to 5', '1: 1 to 3', '1: 1 to 3', '2: 4 to 5']
    """
    array = np.asarray(_array(values), dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"a feature is one number per row, got shape {array.shape}")
    if np.isnan(array).any():
        raise ValueError("the feature to cut by holds NaN")
    if slices < 1:
        raise ValueError(f"slices must be at least 1, got {slices}")
    ends = np.unique(np.quantile(array, np.arange(1, slices) / slices, method="lower"))
    codes = np.searchsorted(ends, array)
    names = {
        code: f"{number}: {array[codes == code].min():.4g} to {array[codes == code].max():.4g}"
        for number, code in enumerate(np.unique(codes), start=1)
    }
    return np.array([names[code] for code in codes])


def tertiles(y: Any) -> np.ndarray:
    """Label rows "low", "middle" or "high" by thirds of y (of its row mean if several outputs).

    If more than half of y is zero, thirds cannot be cut: the zeros are one group, and the rest
    is halved, as in the published code.

    >>> tertiles([1, 2, 3, 4, 5, 6]).tolist()
    ['low', 'low', 'middle', 'middle', 'high', 'high']
    >>> tertiles([0, 0, 0, 0, 1, 2]).tolist()
    ['zero', 'zero', 'zero', 'zero', 'low', 'high']
    """
    values = _tensor(y).reshape(len(y), -1).mean(dim=1).numpy()
    zeros = values == 0
    if zeros.mean() > 0.5:
        rest = values[~zeros]
        cut = np.quantile(rest, 0.5, method="lower") if len(rest) else 0.0
        return np.where(zeros, "zero", np.where(values <= cut, "low", "high"))
    low, high = np.quantile(values, [1 / 3, 2 / 3], method="lower")
    return np.where(values <= low, "low", np.where(values <= high, "middle", "high"))


def size_stratified_coverage(
    band: Sequence[Any], y: Any, bins: int = 5, *, joint: bool | float = False
) -> GroupCoverage:
    """Measure coverage among rows of similar band length, from the shortest to the longest.

    A method whose narrow bands are too narrow shows here. Rows of equal length stay in one
    stratum, so plain CP, with one length for all, has a single one.

    >>> result = size_stratified_coverage(([0, 0, 0, 0], [1, 1, 9, 9]), [2, 2, 5, 5], bins=2)
    >>> [float(share) for share in result.groups.values()]
    [0.0, 1.0]
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    lower, upper = _bounds(band)
    lengths = (upper - lower).reshape(len(lower), -1).mean(dim=1)
    # A band's length carries rounding: lengths this close are one length.
    finite = lengths[lengths.isfinite()]
    unit = float(finite.abs().max()) * 1e-5 if len(finite) else 0.0
    rounded = (lengths / unit).round() * unit if unit > 0 else lengths
    ordered = rounded.sort().values
    cuts = ordered[[len(ordered) * i // bins for i in range(1, bins)]].unique()
    strata = torch.bucketize(rounded, cuts, right=True)
    hits = _hits(band, y, joint)
    return GroupCoverage(
        {
            f"{float(lengths[strata == s].min()):.4g} to {float(lengths[strata == s].max()):.4g}": (
                Coverage(float(hits[strata == s].mean()), int((strata == s).sum()))
            )
            for s in strata.unique().tolist()
        }
    )


def worst_slab_coverage(
    band: Sequence[Any],
    y: Any,
    x: Any,
    *,
    share: float = 0.1,
    directions: int = 1000,
    seed: int = 0,
    joint: bool | float = False,
) -> Coverage:
    """Measure coverage on the worst slab ``a <= v.x <= b`` that holds a share of the rows.

    The slab is looked for on one random half of the rows and measured on the other (Cauchois,
    Gupta and Duchi, 2021), so the search itself does not make coverage look bad.

    Parameters
    ----------
    band, y, x
        The bands, the targets, and the inputs as an (n, d) array.
    share
        Smallest share of the rows that a slab may hold.
    directions
        How many random directions v to try.
    seed
        Seed of the directions and of the division into halves.
    joint
        Whether a row counts as covered only if all its outputs are.

    Examples
    --------
    >>> x = torch.linspace(0, 1, 1000)[:, None]
    >>> upper = (x[:, 0] < 0.8).double()  # nothing is covered on the right
    >>> float(worst_slab_coverage((torch.zeros(1000), upper), torch.full((1000,), 0.5), x))
    0.0
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must lie in (0, 1], got {share}")
    hits = _hits(band, y, joint)
    points = _tensor(x).reshape(len(hits), -1)
    if len(hits) < 4:
        raise ValueError(f"worst-slab coverage needs at least 4 rows, got {len(hits)}")
    random = np.random.default_rng(seed)
    order = torch.from_numpy(random.permutation(len(hits)))
    search, report = order[: len(order) // 2], order[len(order) // 2 :]
    vectors = torch.from_numpy(random.standard_normal((directions, points.shape[1])))
    best = (math.inf, vectors[0], -math.inf, math.inf)
    for vector in vectors:
        found = _worst_window(points[search] @ vector, hits[search], share)
        if found[0] < best[0]:
            best = (found[0], vector, found[1], found[2])
    _, vector, low, high = best
    along = points[report] @ vector
    inside = hits[report][(along >= low) & (along <= high)]
    return Coverage(float(inside.mean()) if len(inside) else math.nan, len(inside))


def _worst_window(along: Tensor, hits: Tensor, share: float) -> tuple[float, float, float]:
    """Find the run of consecutive points, at least ``share`` of them, that is covered least.

    Dinkelbach's iteration: guess the smallest mean c, find the run that minimises
    sum(hits) - c * length by prefix sums, take its mean as the next guess.
    """
    order = along.argsort()
    sums = torch.cat([hits.new_zeros(1), hits[order].cumsum(0)])
    n, least = len(hits), max(1, math.ceil(len(hits) * share))
    index = torch.arange(n + 1, dtype=hits.dtype)
    start, stop, mean = 0, n, float(sums[-1]) / n
    while True:
        cost = sums - mean * index
        highest, where = cost[: n + 1 - least].cummax(0)
        gains = cost[least:] - highest
        end = int(gains.argmin())
        if float(gains[end]) >= -1e-9:
            return mean, float(along[order[start]]), float(along[order[stop - 1]])
        start, stop = int(where[end]), end + least
        mean = float(sums[stop] - sums[start]) / (stop - start)


def _by_label(hits: Tensor, labels: np.ndarray) -> dict[Hashable, Coverage]:
    kinds, inverse = np.unique(labels, return_inverse=True)
    counts = np.bincount(inverse, minlength=len(kinds))
    sums = np.bincount(inverse, weights=hits.numpy(), minlength=len(kinds))
    return {
        kind.item(): Coverage(float(total / count), int(count))
        for kind, total, count in zip(kinds, sums, counts, strict=True)
    }


def _hits(band: Sequence[Any], y: Any, joint: bool | float) -> Tensor:
    """Covered share of each row, in [0, 1]."""
    lower, upper = _bounds(band)
    target = _target(y, lower)
    inside = ((lower <= target) & (target <= upper)).double().reshape(len(target), -1)
    if joint is False:
        return inside.mean(dim=1)
    if not 0 < joint <= 1:
        raise ValueError(f"joint must be False, True or a share between 0 and 1, got {joint}")
    wanted = math.ceil(Fraction(str(float(joint))) * inside.shape[1])
    return (inside.sum(dim=1) >= wanted).double()


def _bounds(band: Sequence[Any]) -> tuple[Tensor, Tensor]:
    lower, upper = _tensor(band[0]), _tensor(band[1])
    if lower.shape != upper.shape or not lower.numel():
        raise ValueError(
            f"lower has shape {tuple(lower.shape)}, upper {tuple(upper.shape)}: "
            "they must be equal and not empty"
        )
    if bool(lower.isnan().any() or upper.isnan().any()):
        raise ValueError("the band holds NaN")
    return lower, upper


def _target(y: Any, lower: Tensor) -> Tensor:
    target = _tensor(y)
    if target.dim() == 1 and lower.shape == (len(target), 1):
        target = target[:, None]
    if target.shape != lower.shape:
        raise ValueError(f"target has shape {tuple(target.shape)}, band {tuple(lower.shape)}")
    if bool(target.isnan().any()):
        raise ValueError("the target holds NaN")
    return target


def _array(values: Any) -> Any:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


def _tensor(values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu().double()
    return torch.from_numpy(np.array(values, dtype=np.float64))


# -- label sets: a LabelSet, or a boolean mask with a row per point and a column per label ------

# The strata of RAPS (Angelopoulos et al., 2021), by the largest size each holds.
SIZE_STRATA = (1, 3, 6, 10, 100)


def set_coverage(sets: Any, y: Any) -> Coverage:
    """Measure the share of rows whose true label is in the set.

    >>> set_coverage([[True, False], [True, True]], [1, 1])
    0.500 [0.095, 0.905]
    """
    hits = _set_hits(_mask(sets), y)
    return Coverage(float(hits.double().mean()), len(hits))


def mean_set_size(sets: Any) -> float:
    """Average the number of labels in a set.

    >>> mean_set_size([[True, False], [True, True]])
    1.5
    """
    return float(_mask(sets).sum(dim=1).double().mean())


def median_set_size(sets: Any) -> float:
    """Return the middle number of labels in a set, halfway between if there are two middles.

    >>> median_set_size([[True, False], [True, True]])
    1.5
    """
    return float(np.median(_mask(sets).sum(dim=1).numpy()))


def size_stratified_violation(
    sets: Any, y: Any, alpha: Any = 0.1, strata: Sequence[int] = SIZE_STRATA
) -> float:
    """Return how far coverage is from 1 - alpha in the worst stratum of set sizes.

    This is the SSCV of RAPS. Small sets that cover too little and large ones that cover too
    much both show here.

    Parameters
    ----------
    sets, y
        The sets and the true labels.
    alpha
        Share of misses that was asked for.
    strata
        The largest size in each stratum but the last, which holds all larger ones. By default
        0 to 1, 2 to 3, 4 to 6, 7 to 10, 11 to 100, and more. Empty strata do not count.

    Examples
    --------
    >>> size_stratified_violation([[True, False], [True, True]], [1, 1], alpha=0.1)
    0.9
    """
    mask = _mask(sets)
    return stratified_violation(mask.sum(dim=1), _set_hits(mask, y), alpha, strata)


def stratified_violation(
    sizes: Tensor, hits: Tensor, alpha: Any, strata: Sequence[int] = SIZE_STRATA
) -> float:
    """Compute :func:`size_stratified_violation` from each row's size and whether it was hit."""
    stratum = torch.bucketize(sizes, torch.tensor(list(strata)))
    counts = torch.bincount(stratum, minlength=len(strata) + 1)
    covered = torch.bincount(stratum[hits], minlength=len(strata) + 1)
    shares = (covered.double() / counts)[counts > 0]
    return float((shares - float(1 - exact_alpha(alpha))).abs().max())


def class_coverage(sets: Any, y: Any) -> GroupCoverage:
    """Measure coverage among the rows of each true label.

    >>> class_coverage([[True, False], [True, True]], [1, 1]).worst
    0.500 [0.095, 0.905]
    """
    mask = _mask(sets)
    hits = _set_hits(mask, y)
    return GroupCoverage(_by_label(hits.double(), _class_labels(y, mask).numpy()))


def class_coverage_gap(sets: Any, y: Any, alpha: Any = 0.1) -> float:
    """Average over classes how far their coverage is from 1 - alpha (Ding et al., 2023).

    Classes without a row do not count.

    >>> round(class_coverage_gap([[True, False], [True, True]], [0, 1], alpha=0.1), 12)
    0.1
    """
    level = float(1 - exact_alpha(alpha))
    shares = class_coverage(sets, y).groups.values()
    return sum(abs(float(share) - level) for share in shares) / len(shares)


def singleton_hit_ratio(sets: Any, y: Any) -> Coverage:
    """Measure the share of rows whose set is the true label and nothing else.

    >>> singleton_hit_ratio([[False, True], [True, True]], [1, 1])
    0.500 [0.095, 0.905]
    """
    mask = _mask(sets)
    alone = _set_hits(mask, y) & (mask.sum(dim=1) == 1)
    return Coverage(float(alone.double().mean()), len(alone))


def _mask(sets: Any) -> Tensor:
    mask = getattr(sets, "mask", sets)
    mask = mask.detach().cpu() if isinstance(mask, Tensor) else torch.from_numpy(np.array(mask))
    if mask.dtype != torch.bool or mask.dim() != 2 or not len(mask):
        raise ValueError(
            "sets must be a LabelSet or a boolean mask of shape (rows, classes), not empty: got "
            f"{mask.dtype} of shape {tuple(mask.shape)}"
        )
    return mask


def _set_hits(mask: Tensor, y: Any) -> Tensor:
    """Whether each row's set holds the true label."""
    return mask.gather(1, _class_labels(y, mask)[:, None])[:, 0]


def _class_labels(y: Any, mask: Tensor) -> Tensor:
    labels = y.detach().cpu() if isinstance(y, Tensor) else torch.from_numpy(np.array(y))
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers, got {labels.dtype}")
    if labels.shape != (len(mask),):
        raise ValueError(f"labels have shape {tuple(labels.shape)}, sets {tuple(mask.shape)}")
    labels = labels.long()
    if bool((labels < 0).any() or (labels >= mask.shape[1]).any()):
        raise ValueError(
            f"labels must lie between 0 and {mask.shape[1] - 1}, got {int(labels.min())} to "
            f"{int(labels.max())}"
        )
    return labels
