"""Selection: choosing a layer, bandwidth or method on rows that do not calibrate.

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
    """The rows set aside, and the context of a selection on them.

    Attributes
    ----------
    out : BatchOutput
    y : Tensor
        The outputs for these rows, and their targets.
    score : Score
    calibration : Calibration
        Those of the predictor, with what is selected already.
    alpha : float
        The level at which candidates are compared.
    left : int
        How many rows will calibrate, at least.
    alpha_of_each : callable
        Returns the level of each of several thresholds, given that of all and their number.
    target_inputs : callable
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
    """A settled score and calibration, a report by name, and a warning for the user."""

    score: Any
    calibration: Any
    report: dict[str, Any]
    warning: str | None = None


class Selection(Described):
    """Selects missing arguments of a score or a calibration; the base of all selections."""

    #: What is selected, for messages.
    what = "the setting to be selected"
    #: How many rows are enough to select; more would only cost time and memory.
    most_rows = 10_000
    #: Whether :meth:`without_rows` settles it where rows are too few to be divided ...
    is_optional = False
    #: ... or fewer than these would be set aside.
    fewest_rows = 0
    #: Whether it needs unlabelled inputs, ``calibrate(x, y, new=...)``.
    takes_new = False

    def requires(self) -> Requires:
        """Return what the pass over the model must compute."""
        return Requires()

    def prepared(self, model: Any, x: Any) -> Any:
        """Return this selection with its candidates for a model, or a score if there is but one."""
        return self

    def division(self, fraction: float, seed: int) -> Division | LearningDivision:
        """Return the division of rows; ``fraction`` is the user's share of rows set aside."""
        return Division(fraction, seed, self.most_rows)

    def select(self, aside: Aside) -> Selected:
        """Return a settled score and calibration."""
        raise NotImplementedError

    def accepts(self, score: Any) -> bool:
        """Whether it could have selected a score that a file holds."""
        return False

    def without_rows(self, rows: int, alpha: Any) -> Selected:
        """Return a settled score where rows are too few, if it :attr:`is_optional`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Division:
    """Sets about a ``fraction`` of the first rows of a stream aside.

    One of every 1 / fraction consecutive rows is picked at random, up to ``most`` of them.
    Whether a row is set aside depends on its position only and not on the data, so that both
    parts stay exchangeable with new rows.

    >>> division = Division(fraction=0.25, seed=0, most=100)
    >>> int(division.mask(8).sum())
    2
    >>> torch.equal(division.mask(8)[:5], division.mask(5))
    True
    """

    fraction: float
    seed: int
    most: int

    def mask(self, rows: int, groups: int = 1) -> Tensor:
        """Mark which of the first rows are set aside."""
        number = np.arange(min(self.most, math.ceil(rows * self.fraction) + 1))
        picked = ((number + _draws(self.seed).random(len(number))) / self.fraction).astype(np.int64)
        mask = np.zeros(rows, dtype=bool)
        mask[picked[picked < rows]] = True
        return torch.from_numpy(mask)

    @property
    def end(self) -> int:
        """The row from which on no row is set aside."""
        return math.ceil(self.most / self.fraction) + 1


@dataclass(frozen=True)
class LearningDivision:
    """Sets all rows aside but those that calibrate, picked at random, and at most ``most``.

    ``given`` rows calibrate, if set; by default ``wanted`` of each group, on average, but no more
    than 40 % of few rows, and no more than 60 % of fewer than 333. It depends on the numbers of
    rows and groups only, so that within a group both parts stay exchangeable with new rows.

    >>> division = LearningDivision(wanted=1000, seed=0, most=20_000)
    >>> [int(division.mask(rows).sum()) for rows in (100, 1000, 8000, 30_000)]
    [40, 600, 7000, 20000]
    >>> int(division.mask(9000, groups=3).sum())
    6000
    """

    wanted: int
    seed: int
    most: int
    given: int | None = None

    def mask(self, rows: int, groups: int = 1) -> Tensor:
        """Mark which of the first rows are set aside."""
        few = math.ceil(max(0.4 * rows, min(0.6 * rows, 200)))
        left = min(self.wanted * groups, few) if self.given is None else self.given
        count = max(0, min(self.most, rows - left))
        mask = np.zeros(rows, dtype=bool)
        mask[_draws(self.seed).permutation(rows)[:count]] = True
        return torch.from_numpy(mask)

    @property
    def end(self) -> int:
        """The row from which on no row is set aside."""
        return self.most + (self.wanted if self.given is None else self.given)


def _draws(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
