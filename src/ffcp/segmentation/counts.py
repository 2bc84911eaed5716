"""The calibration of pixel sets: histograms of the scores of labelled pixels, per image.

Of an image only the number of labelled pixels in each bin of a fixed grid of scores is stored, so
memory does not depend on the size of the images, and the arithmetic is exact. Images are the
exchangeable units; the pixels of one image may depend on each other in any way.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from ffcp.conformal.calibration import Calibration, Traits
from ffcp.conformal.columns import Columns
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import conformal_rank, exact_alpha, rows_needed
from ffcp.regression.intervals import as_float64

# The grid of scores. A constant: depending on the data it would break exchangeability. A step is
# half a per cent, about ten steps from p = 0.01 to 0.001; at the default floor scores are below
# 2**24.
_OCTAVES, _STEPS = 24, 128
_FRACTION = 2**32  # in units of 1 / _FRACTION a loss of up to 2**31 pixels fits into 64 bits


_GRID = range(-_OCTAVES * _STEPS, _OCTAVES * _STEPS + 1)
_POWERS = [math.ldexp(2.0 ** (k % _STEPS / _STEPS), k // _STEPS) for k in _GRID]
# The largest score of each bin but the last, which has all larger scores.
EDGES = torch.tensor([0.0, *_POWERS], dtype=torch.float64)
BINS = len(EDGES) + 1


def to_bins(scores: Tensor) -> Tensor:
    """Return the numbers of the bins of scores, rounded up to the grid, int32.

    Bin 0 has the score 0, bin j the scores up to ``EDGES[j]``, the last bin those beyond 2**24.
    A score is in bin j or below exactly if it is at most ``EDGES[j]``.

    >>> to_bins(torch.tensor([0.0, 1e-9, 1.0, 1.001, 1e9]))
    tensor([   0,    1, 3073, 3074, 6146], dtype=torch.int32)
    """
    scores = as_float64(scores)
    return torch.bucketize(scores, EDGES.to(scores.device), out_int32=True)


@dataclass(frozen=True)
class PixelCounts(Calibration):
    """The number of labelled pixels of each calibration image in each bin of scores.

    An image of any size takes 25 KB.

    >>> bins = torch.zeros(3, BINS, dtype=torch.int32)
    >>> bins[:, 0], bins[:, 1], bins[0, 7] = 8, 1, 1
    >>> images = PixelCounts().fit(bins)
    >>> images.risk_bin(0.3)  # beyond bin 1 lies a tenth of one image: (1/10 + 1) / 4 <= 0.3
    1
    >>> images.share_bin(0.3, share=1)
    7
    """

    traits = Traits()

    def fit(self, scores: Tensor, metadata: Columns | None = None) -> PixelCounts:
        """Return the calibration with these counts, (n, BINS), without images that have none."""
        counts, pixels = scores.detach().to("cpu", torch.int32), scores.sum(dim=1)
        if counts.shape[1:] != (BINS,) or bool((counts < 0).any()):
            raise ValueError(f"expected 'scores' to be {BINS} counts of pixels for each image")
        if bool((pixels >= 2**31).any()):
            raise ValueError("expected fewer than 2**31 pixels per image in 'scores'")
        return replace(self, rows={"scores": counts[pixels > 0]})

    def quantile(
        self, alpha: Any, metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Return the threshold of scores of labels in the set, shape (1,).

        ``metadata["share"]`` is the share of an image to be covered, the same for every image.
        """
        share = (metadata or {}).get("share", [None])[0]
        number = self.risk_bin(alpha) if share is None else self.share_bin(alpha, share)
        edge = math.inf if number == BINS - 1 else float(EDGES[number])
        return torch.tensor([edge], dtype=torch.float64)

    def explain(self, alpha: Any, metadata: Columns) -> str:
        """Return why the threshold is infinite, for a warning."""
        needed = rows_needed(alpha)
        if len(self) < needed:
            return f": alpha={float(alpha):g} needs {needed} calibration images, got {len(self)}"
        return f": too many scores are above {float(EDGES[-1]):g}. Use a larger 'floor'"

    def risk_bin(self, alpha: Any) -> int:
        """Return the smallest bin t with (sum of losses + 1) / (n + 1) <= alpha, or the last.

        The loss of an image is the share of its labelled pixels beyond a bin.
        """
        # Losses are ratios k / m, and m differs between images. Exact arithmetic, as rounding
        # could be wrong if the sum equals the budget.
        budget = exact_alpha(alpha) * (len(self) + 1) - 1
        pixels = self._within(BINS - 1)
        return bisect.bisect_left(
            range(BINS - 1),
            True,
            key=lambda t: _sum_at_most(pixels - self._within(t), pixels, budget),
        )

    def share_bin(self, alpha: Any, share: Any) -> int:
        """Return the conformal quantile of the images' bins, or the last bin if n is too small.

        The bin of an image is the smallest with at least ``share`` of its labelled pixels in it
        or below.
        """
        share, rank = exact_share(share), conformal_rank(len(self), alpha)
        if rank > len(self):
            return BINS - 1
        return int(self.image_bins(share).kthvalue(rank).values)

    def image_bins(self, share: Any) -> Tensor:
        """Return the smallest bin of each image that reaches ``share`` of its labelled pixels."""
        exact = exact_share(share)
        # Python's integers: a share like 0.3333333333333333 has a denominator of 10**16.
        needed = torch.tensor([math.ceil(exact * m) for m in self._within(BINS - 1).tolist()])
        within = self.scores.cumsum(dim=1, dtype=torch.int32)
        return (within < needed[:, None]).sum(dim=1)

    def _within(self, t: int) -> Tensor:
        """Return the number of labelled pixels of each image in bin t or below."""
        # Summed as int32, or torch would copy all counts; no image has 2**31 pixels.
        return self.scores[:, : t + 1].sum(dim=1, dtype=torch.int32).long()


def _sum_at_most(parts: Tensor, wholes: Tensor, budget: Fraction) -> bool:
    """Return exactly whether the sum of parts / wholes is at most ``budget``.

    >>> third = torch.tensor([1, 1, 1]), torch.tensor([3, 3, 3])
    >>> _sum_at_most(*third, Fraction(1)), _sum_at_most(*third, Fraction(999_999_999, 10**9))
    (True, False)
    """
    scaled = parts * _FRACTION
    below = scaled // wholes
    above = below + (scaled % wholes != 0)
    if int(above.sum()) <= budget * _FRACTION:
        return True
    if int(below.sum()) > budget * _FRACTION:
        return False
    # Too close for fixed point: exact fractions, one for each number of pixels that occurs.
    distinct, index = wholes.unique(return_inverse=True)
    sums = torch.zeros_like(distinct).index_add(0, index, parts)
    exact = sum(map(Fraction, sums.tolist(), distinct.tolist()), start=Fraction(0))
    return exact <= budget


def exact_share(share: Any) -> Fraction:
    """Return ``share`` as an exact fraction of its decimal form; raise unless it is in (0, 1].

    >>> exact_share(0.9), exact_share(1)
    (Fraction(9, 10), Fraction(1, 1))
    """
    try:
        return Fraction(1) if share == 1 and share is not True else exact_alpha(share)
    except (TypeError, ValueError) as error:
        raise type(error)(f"'share' must be a number in (0, 1], got {share!r}") from None
