"""Selection: what is left open is chosen on rows that do not calibrate.

The layer of FFCP, the steps of FCP, the bandwidth of localized methods, temperature and penalties
of prediction sets, a density ratio, the method itself: each is a :class:`Selection`, which returns
a settled score and calibration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ffcp.batch import BatchOutput, Requires
from ffcp.description import Described


class Aside(NamedTuple):
    """The rows set aside, and what is known when something is selected on them.

    Attributes
    ----------
    out, y
        What one pass gave for these rows, and their targets.
    score, calibration
        Those of the predictor, as far as they are selected.
    alpha
        The level at which candidates are compared.
    left : int
        How many rows will calibrate, at least.
    alpha_of_each
        Returns the level of each of several thresholds, given that of all and their number.
    target_inputs
        Runs the model on the unlabelled inputs that were given.
    """

    out: BatchOutput
    y: Tensor
    score: Any
    calibration: Any
    alpha: Any
    left: int
    alpha_of_each: Callable[[Any, int], Any]
    target_inputs: Callable[[], Iterable[BatchOutput]]


class Selected(NamedTuple):
    """A settled score and calibration, what was compared by name, and a warning for the user."""

    score: Any
    calibration: Any
    report: dict[str, Any]
    warning: str | None = None


class Selection(Described):
    """Selects what a score or a calibration leaves open; the base of all selections."""

    #: What is selected, in words.
    what = "what is left open"
    #: How many rows are enough to select; more would only cost time and memory.
    most_rows = 10_000
    #: With fewer rows set aside nothing is selected, if :meth:`without_rows` knows what to do.
    fewest_rows = 0
    #: Of so many rows that come first twice the share is set aside: few rows select badly.
    early_rows = 0
    #: Whether it needs unlabelled inputs, ``calibrate(x, y, new=...)``.
    takes_new = False
    #: Whether it may also select another calibration than was given.
    selects_calibration = False

    def requires(self) -> Requires:
        """Return what the pass over the model must bring."""
        return Requires()

    def prepared(self, model: Any, x: Any) -> Any:
        """Look at the model and at a first batch for candidates; return a score if only one is."""
        return self

    def select(self, aside: Aside) -> Selected:
        """Return a settled score and calibration."""
        raise NotImplementedError

    def accepts(self, score: Any) -> bool:
        """Whether it could have selected a score, which a file holds."""
        return False

    def without_rows(self, rows: int, alpha: Any) -> Any:
        """Return a :class:`Selected` where rows are too few to be divided, if that can be."""
        return None


@dataclass(frozen=True)
class Division:
    """Sets about a ``fraction`` of the first rows of a stream aside.

    Every 1 / fraction consecutive rows give one row, picked at random, up to ``most`` of them; of
    the ``early`` rows that come first twice as many, at most half of them.
    Whether a row is set aside depends on its position alone: neither part looks at the data, and
    both stay exchangeable with new rows.

    >>> division = Division(fraction=0.25, seed=0, most=100)
    >>> int(division.mask(8).sum())
    2
    >>> torch.equal(division.mask(8)[:5], division.mask(5))
    True
    """

    fraction: float
    seed: int
    most: int
    early: int = 0

    def mask(self, rows: int) -> Tensor:
        """Mark which of the first rows are set aside."""
        early = min(rows, self.early)
        count = math.ceil(early * self._at_first + (rows - early) * self.fraction) + 1
        number = np.arange(min(self.most, count))
        draws = np.random.Generator(np.random.PCG64(np.random.SeedSequence(self.seed)))
        picked = self._place(number + draws.random(len(number))).astype(np.int64)
        mask = np.zeros(rows, dtype=bool)
        mask[picked[picked < rows]] = True
        return torch.from_numpy(mask)

    @property
    def end(self) -> int:
        """The row from which on no row is set aside."""
        return math.ceil(float(self._place(np.array(self.most)))) + 1

    @property
    def _at_first(self) -> float:
        return max(self.fraction, min(2 * self.fraction, 0.5))

    def _place(self, count: Any) -> Any:
        """Return before which row so many are set aside."""
        early = np.minimum(count, self.early * self._at_first)
        return early / self._at_first + (count - early) / self.fraction
