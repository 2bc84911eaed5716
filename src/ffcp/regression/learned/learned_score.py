"""The score of learned quantiles of the residual: nested sets that do not depend on alpha."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ffcp.batch import BatchOutput, Requires, is_traced
from ffcp.conformal.columns import Columns, prefixed, with_prefix
from ffcp.network import forward
from ffcp.regression.intervals import as_float64, outward
from ffcp.regression.joint import BOTH, Joint
from ffcp.regression.learned.feature_columns import FeatureColumns
from ffcp.regression.learned.learners import LEARNERS
from ffcp.regression.learned.nested import (
    CENTRAL,
    FAMILIES,
    Sets,
    ends_at,
    nested,
    position,
    quantile_at,
    signed_position,
)
from ffcp.regression.scaled_score import TwoSidedScore

_ROWS = 4096  # whose quantiles are computed at once


@dataclass(frozen=True)
class LearnedScore(TwoSidedScore):
    """The model's prediction, plus nested sets between learned quantiles of its residual.

    Learner, typical sizes and the hashes of training rows are its state.
    """

    features: FeatureColumns
    kind: str
    shape: str = CENTRAL
    joint: Joint = False
    side: str = BOTH
    source: str = "training rows"
    learner: Any = field(default=None, kw_only=True, repr=False, compare=False)
    typical: Any = field(default=None, kw_only=True, repr=False, compare=False)
    #: Sorted hashes of the training rows, known again if they come to calibrate.
    rows: Tensor | None = field(default=None, kw_only=True, repr=False, compare=False)
    takes_infinity = False

    def __post_init__(self) -> None:
        if self.shape not in FAMILIES:
            raise ValueError(f"'shape' must be one of {', '.join(FAMILIES)}, got {self.shape!r}")
        if self.kind not in LEARNERS:
            raise ValueError(f"'kind' must be one of {', '.join(LEARNERS)}, got {self.kind!r}")

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments, without learned tensors."""
        learned = ("learner", "typical", "rows")
        return {name: value for name, value in super().config().items() if name not in learned}

    @property
    def lowest(self) -> float:  # type: ignore[override]
        """No score is below this."""
        return 0.0 if self.side == BOTH else -torch.inf

    def requires(self) -> Requires:
        """Return the features that quantiles are learned from."""
        return self.features.requires()

    def state(self) -> dict[str, Tensor]:
        """Return the learned tensors, and hashes of the training rows."""
        rows = {} if self.rows is None else {"rows": self.rows}
        return {**prefixed("learner.", self.learner.state()), "typical": self.typical, **rows}

    def with_state(self, state: Mapping[str, Tensor]) -> LearnedScore:
        """Return the score with the learned tensors of a file, once they are checked."""
        learner = LEARNERS[self.kind].from_state(with_prefix("learner.", state))
        typical, rows = state["typical"], state.get("rows")
        sizes = (learner.outputs * (1 + len(self.features.norms)),)
        are_sizes = typical.dtype == torch.float32 and bool((typical > 0).all())
        if tuple(typical.shape) != sizes or not are_sizes or not bool(typical.isfinite().all()):
            raise ValueError(
                "'typical' of what was learned must be positive, one for each prediction and norm"
            )
        if rows is not None and not _are_hashes(rows):
            raise ValueError("'rows' of what was learned must be sorted hashes")
        return replace(self, learner=learner, typical=typical, rows=rows)

    def shaped(self, shape: str) -> LearnedScore:
        """Return the same quantiles with other nested sets."""
        return replace(self, shape=shape)

    def quantiles(self, out: BatchOutput) -> Tensor:
        """Return the quantiles of the residual, (n, m, levels)."""
        columns = self.features.logarithmic(self.features.columns(out), self.typical)
        quantiles: Tensor = self.learner(columns)
        return quantiles

    def _sets(self, quantiles: Tensor) -> Sets:
        return nested(quantiles, self.shape)

    def outside(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Return the number of the first nested set that contains each target."""
        positions = [
            position(self._sets(self.quantiles(part)), _residual(part, y[rows]))
            for part, rows in _parts(out)
        ]
        return torch.cat(positions)

    why_unsigned = "sets grown from the densest part are not central: use ffcp.Learned(model)"

    def curve(self, out: BatchOutput) -> dict[str, Tensor] | None:
        """Return centre and quantiles, among which signed scores are positions."""
        if self.shape != CENTRAL:
            return None
        quantiles = torch.cat([self.quantiles(part) for part, _ in _parts(out)])
        return {"centre": _centre(out), "quantiles": quantiles}

    def signed(self, curve: Columns, y: Tensor) -> Tensor:
        """Return how many quantiles targets lie above the median."""
        return signed_position(_as_many(curve["quantiles"], y), y - curve["centre"])

    def at(self, curve: Columns, signed: Tensor) -> Tensor:
        """Return the targets at these signed scores."""
        quantiles = _as_many(curve["quantiles"], signed)
        return torch.as_tensor(curve["centre"] + quantile_at(quantiles, signed))

    def region(self, out: BatchOutput, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends (levels, n, m) of the sets of these numbers."""
        if self.side != BOTH:
            return super().region(out, q)
        return self._ends(out, (q,), lambda quantiles: partial(ends_at, self._sets(quantiles)))

    def sides(self, out: BatchOutput, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many quantiles targets lie below and above the median."""
        positions = torch.cat(
            [
                signed_position(self.quantiles(part), _residual(part, y[rows]))
                for part, rows in _parts(out)
            ]
        )
        return -positions, positions

    def region_of_sides(
        self, out: BatchOutput, below: Tensor, above: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the quantiles at these positions as ends.

        Ends that cross become one point, as for other methods.
        """

        def ends(quantiles: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
            lower, upper = quantile_at(quantiles, -low), quantile_at(quantiles, high)
            crossed, middle = lower > upper, (lower + upper) / 2
            return torch.where(crossed, middle, lower), torch.where(crossed, middle, upper)

        return self._ends(out, (below, above), lambda quantiles: partial(ends, quantiles))

    def _ends(
        self,
        out: BatchOutput,
        thresholds: tuple[Tensor, ...],
        ends_among: Callable[[Tensor], Callable[..., tuple[Tensor, Tensor]]],
    ) -> tuple[Tensor, Tensor]:
        """Return the ends (levels, n, m) at thresholds, (levels, n or 1, ...) each.

        ``ends_among`` returns, for some quantiles, the function from thresholds to ends.
        """
        lowers, uppers, dtype = [], [], out.output.dtype
        for part, rows in _parts(out):
            centre, quantiles = _centre(part), self.quantiles(part)
            scale, ends = quantiles.abs().amax(dim=-1), ends_among(quantiles)
            of_part = [(t if t.shape[1] == 1 else t[:, rows]).cpu() for t in thresholds]
            levels = [ends(*level) for level in zip(*of_part, strict=True)]
            lower = torch.stack([lower for lower, _ in levels])
            upper = torch.stack([upper for _, upper in levels])
            lowers.append(outward(centre, lower, -1, scale, dtype))
            uppers.append(outward(centre, upper, 1, scale, dtype))
        return torch.cat(lowers, dim=1), torch.cat(uppers, dim=1)


def _are_hashes(tensor: Tensor) -> bool:
    is_list = tensor.dtype == torch.int64 and tensor.dim() == 1
    return is_list and bool((tensor.diff() >= 0).all())


def _as_many(quantiles: Tensor, like: Tensor) -> Tensor:
    """Repeat quantiles (n, m, levels) for every (n, m) of some numbers."""
    return quantiles.expand(*like.shape, quantiles.shape[-1])


def _centre(out: BatchOutput) -> Tensor:
    return as_float64(out.output).reshape(out.output.shape[0], -1).cpu()


def _residual(out: BatchOutput, y: Tensor) -> Tensor:
    return as_float64(y).cpu() - _centre(out)


def _parts(out: BatchOutput) -> Iterator[tuple[BatchOutput, slice]]:
    """Split the output of a pass: every row has some hundred intermediate numbers."""
    if is_traced():  # for any number of rows
        yield out, slice(None)
        return
    rows = len(out.rows)
    for start in range(0, rows, _ROWS):
        part = slice(start, min(start + _ROWS, rows))
        yield forward.part_of(out, part) if rows > _ROWS else out, part
