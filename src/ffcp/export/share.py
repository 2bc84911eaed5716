"""The share of misses: an alpha that is known, or one that is an input of the graph.

An alpha that is an input is a whole number of millionths, so that ranks are exact in whole numbers:
k = ceil((n + 1)(1 - alpha)) = n + 1 - floor((n + 1) alpha).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from ffcp.conformal.rank import conformal_rank
from ffcp.pieces import Seen

MILLION = 10**6


class Share(NamedTuple):
    """The share of misses that each of ``parts`` thresholds allows: alpha / parts.

    ``alpha`` is a fraction that is known, or whole millionths that are not known yet.
    """

    alpha: Fraction | Tensor
    parts: int = 1

    def ranks(self, counts: Tensor) -> Tensor:
        """Give the conformal rank among each of these numbers of scores, one more if none is.

        >>> Share(Fraction(1, 10)).ranks(torch.tensor([9, 8]))
        tensor([9, 9])
        >>> Share(torch.tensor(100_000)).ranks(torch.tensor([9, 8, 19]))
        tensor([ 9,  9, 18])
        """
        if isinstance(self.alpha, Fraction):
            share = self.alpha / self.parts
            each = [conformal_rank(count, share) for count in counts.reshape(-1).tolist()]
            return torch.tensor(each).reshape(counts.shape)
        more = counts + 1
        ranks = more - (more * self.alpha) // (MILLION * self.parts)
        # What is no share of misses asks for all scores, and more.
        return ranks.where((self.alpha > 0) & (self.alpha < MILLION), more)


# The thresholds (m,) or (n, m) of rows, from what the pass saw and the places of their groups.
Thresholds = Callable[[Seen, Tensor | None], Tensor]
# What is known of the share of misses is worked out at once, the rest in the graph.
Lookup = Callable[[Share], Thresholds]
