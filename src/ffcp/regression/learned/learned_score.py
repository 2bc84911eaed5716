"""Bands from learned quantiles of the residual: a family of nested sets, free of alpha."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ffcp.batch import BatchOutput, Requires, is_traced
from ffcp.conformal.columns import Columns, prefixed, with_prefix
from ffcp.conformal.selection import Chosen
from ffcp.network import checks, forward
from ffcp.regression import recorded_rows
from ffcp.regression.bases import columns
from ffcp.regression.intervals import as_float64, outward
from ffcp.regression.joint import Joint, has_own_thresholds, reduced
from ffcp.regression.learned import learners
from ffcp.regression.learned.feature_columns import FeatureColumns, On
from ffcp.regression.learned.learners import NETWORK, Learner
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
from ffcp.regression.scaled_score import RegressionScore
from ffcp.regression.sides import BOTH, kept_scores

_ROWS = 4096  # whose quantiles are worked out at once


class LearnedScore(RegressionScore):
    """The model's prediction, plus nested sets between learned quantiles of its residual."""

    takes_infinity = False
    lowest = 0.0

    def __init__(
        self,
        sight: FeatureColumns,
        learner: Learner,
        typical: Tensor,
        shape: str = CENTRAL,
        joint: Joint = False,
        side: str = "both",
        source: str = "training rows",
        rows: Tensor | None = None,
    ) -> None:
        self.sight, self.learner, self.typical = sight, learner, typical
        self.shape, self.joint, self.side, self.source = shape, joint, side, source
        self.rows = (
            rows  # sorted hashes of the training rows, known again if they come to calibrate
        )
        if side != "both":
            self.lowest = -torch.inf

    def requires(self) -> Requires:
        """Ask for what is learned from."""
        return self.sight.requires()

    def settings(self) -> dict[str, Any]:
        """Say what was learned, by its hash, and from what."""
        return {
            "family": "learned",
            "learner": self.learner.kind,
            "nested": self.shape,
            "source": self.source,
            "learned": hash_of(self.state(), self.sight.settings()),
            **self.sight.settings(),
        }

    @property
    def kind(self) -> str:
        """Which learner it was."""
        return self.learner.kind

    def state(self) -> dict[str, Tensor]:
        """Give all that was learned, and hashes of the training rows."""
        rows = {} if self.rows is None else {"rows": self.rows}
        return {**prefixed("learner.", self.learner.state()), "typical": self.typical, **rows}

    def recalled(self, settings: Mapping[str, Any], state: Mapping[str, Tensor]) -> Any:
        """Give what was learned and saved in place of this."""
        if settings.get("learned") is None:
            return super().recalled(settings, state)
        return self.from_state(settings, state, self.sight.functions, self.joint, self.side)

    @classmethod
    def from_state(
        cls,
        settings: Mapping[str, Any],
        state: Mapping[str, Tensor],
        functions: Sequence[Callable[[BatchOutput], Tensor]],
        joint: Joint,
        side: str,
    ) -> LearnedScore:
        """Make the family again from saved settings and tensors, once they are checked."""
        sight = FeatureColumns.restored(settings, functions)
        learner = learners.from_state(settings.get("learner"), with_prefix("learner.", state))
        typical, shape = state.get("typical"), settings.get("nested")
        if typical is None or typical.dtype != torch.float32 or not _are_sizes(typical):
            raise ValueError("what was learned has no typical sizes")
        if shape not in FAMILIES:
            raise ValueError(f"{shape!r} is no family of nested sets")
        rows = state.get("rows")
        if rows is not None and not _are_hashes(rows):
            raise ValueError("what was learned has no hashes of its rows")
        source = str(settings.get("source"))
        family = cls(sight, learner, typical, shape, joint, side, source, rows)
        outputs = learner.outputs
        if tuple(typical.shape) != (outputs * (1 + len(sight.norms)),):
            raise ValueError("what was learned has typical sizes of other columns")
        return family

    def shaped(self, shape: str) -> LearnedScore:
        """Give the same quantiles with other nested sets."""
        rest = (self.joint, self.side, self.source, self.rows)
        return LearnedScore(self.sight, self.learner, self.typical, shape, *rest)

    def quantiles(self, out: BatchOutput) -> Tensor:
        """Give the quantiles of the residual, (n, m, levels)."""
        raw = self.sight.columns(out)
        return self.learner(self.sight.logarithmic(raw, self.learner.outputs, self.typical))

    def score(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Say which is the first of the nested sets that holds each target."""
        scores = torch.cat(
            [
                position(
                    nested(self.quantiles(part), self.shape), y[rows].double().cpu() - _centre(part)
                )
                for part, rows in _parts(out)
            ]
        )
        return reduced(scores, self.joint)

    def note(self, out: BatchOutput, y: Any) -> dict[str, Any]:
        """Note scores and, of central sets, signs; quantiles are worked out once for both."""
        target = self.target(out, y)
        is_folded = has_own_thresholds(self.joint) or target.shape[1] == 1
        if self.shape != CENTRAL or self.side != BOTH or not is_folded:
            return {"score": kept_scores(self, out, target)}
        places = self._places(out, target)
        return {"score": places.abs(), "sign": places < 0}

    why_unsigned = "sets grown from the densest part are not central: give nested='central'"

    def curve(self, out: BatchOutput) -> dict[str, Tensor] | None:
        """Give the quantiles, of which signed scores count how many lie below a target."""
        if self.shape != CENTRAL:
            return None
        parts = [(_centre(part), self.quantiles(part)) for part, _ in _parts(out)]
        centre, quantiles = (torch.cat(each) for each in zip(*parts, strict=True))
        return {"centre": centre, "quantiles": quantiles}

    def signed(self, curve: Columns, y: Tensor) -> Tensor:
        """Say how far above the median targets lie, counted in quantiles."""
        return signed_position(_as_many(curve["quantiles"], y), y - curve["centre"])

    def at(self, curve: Columns, signed: Tensor) -> Tensor:
        """Give the quantiles at these places."""
        quantiles = _as_many(curve["quantiles"], signed)
        return torch.as_tensor(curve["centre"] + quantile_at(quantiles, signed))

    def interval(self, out: BatchOutput, threshold: Tensor) -> tuple[Tensor, Tensor]:
        """Give the ends (levels, n, m) of the sets of these numbers."""

        def ends(quantiles: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
            return ends_at(Sets(*nested(quantiles, self.shape)), number)

        return self._ends(out, (threshold,), ends)

    def sides(self, out: BatchOutput, y: Tensor) -> tuple[Tensor, Tensor]:
        """Say how far below and above the median targets lie, counted in quantiles."""
        places = self._places(out, y)
        return -places, places

    def _places(self, out: BatchOutput, y: Tensor) -> Tensor:
        places = [
            signed_position(self.quantiles(part), _residual(part, y[rows]))
            for part, rows in _parts(out)
        ]
        return torch.cat(places)

    def interval_ends(
        self, out: BatchOutput, below: Tensor, above: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Give the quantiles at these places as ends; a lower one that passes the upper, neither.

        Ends that meet become one point, as for other methods.
        """

        def ends(quantiles: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
            lower, upper = quantile_at(quantiles, -low), quantile_at(quantiles, high)
            middle = (lower + upper) / 2
            return torch.where(lower > upper, middle, lower), torch.where(
                lower > upper, middle, upper
            )

        return self._ends(out, (below, above), ends)

    def _ends(
        self,
        out: BatchOutput,
        thresholds: tuple[Tensor, ...],
        ends: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        lowers: list[Tensor] = []
        uppers: list[Tensor] = []
        for part, rows in _parts(out):
            centre, quantiles = _centre(part), self.quantiles(part)
            scale = quantiles.abs().amax(dim=-1)
            own = [t if t.shape[1] == 1 else t[:, rows] for t in thresholds]
            made = [
                ends(quantiles, *(level.cpu() for level in levels))
                for levels in zip(*own, strict=True)
            ]
            for side, parts, sign in ((0, lowers, -1), (1, uppers, 1)):
                interval_ends = torch.stack([one[side] for one in made])
                parts.append(outward(centre, interval_ends, sign, scale, out.output.dtype))
        return torch.cat(lowers, dim=1), torch.cat(uppers, dim=1)


def taught(
    sight: FeatureColumns,
    seen_rows: Columns,
    joint: Joint,
    side: str,
    source: str,
    seed: int,
    shape: str = CENTRAL,
    learner: str = NETWORK,
    hashes: Tensor | None = None,
) -> LearnedScore:
    """Learn the quantiles of the residual from rows that were noted; keep hashes of them."""
    pair = recorded_rows.again(seen_rows)
    assert pair is not None
    out, y = pair
    y = columns(y)
    outputs = y.shape[1]
    raw = sight.columns(out)
    typical = sight.typical(raw, outputs)
    residuals = y.double() - columns(as_float64(out.output)).cpu()
    made = learners.learn(learner, sight.logarithmic(raw, outputs, typical), residuals, seed)
    return LearnedScore(sight, made, typical, shape, joint, side, source, hashes)


class LearnedSelection(RegressionScore):
    """Learned bands that are not learned yet: rows set aside from calibration teach them."""

    is_open = True
    what_is_open = "what is learned"

    def __init__(
        self,
        on: Sequence[On],
        shape: str,
        joint: Joint,
        side: str,
        seed: int,
        learner: str = NETWORK,
        sight: Any = None,
    ) -> None:
        self._on, self.shape, self.joint, self.side = tuple(on), shape, joint, side
        self._seed, self.kind = seed, learner
        self._sight: FeatureColumns | None = sight

    def requires(self) -> Requires:
        """Ask for what is learned from, once the model is known."""
        return Requires() if self._sight is None else self._sight.requires()

    def settings(self) -> dict[str, Any]:
        """Say that nothing is learned yet."""
        return {
            "family": "learned",
            "learner": self.kind,
            "nested": self.shape,
            "learned": None,
        }

    def prepared(self, model: Any, x: Any) -> LearnedSelection:
        """Find the layers there are to learn from."""
        sight = FeatureColumns.of(model, x, self._on)
        kept = (self._on, self.shape, self.joint, self.side, self._seed, self.kind)
        return LearnedSelection(*kept, sight)

    def note(self, out: BatchOutput, y: Any) -> dict[str, Any]:
        """Note all that may be learned from."""
        assert self._sight is not None
        target = checks.target(y, self.prediction(out.output))
        return recorded_rows.noted(self._sight.watched(out), target, self._sight.takes_input)

    def choose(
        self, aside: Columns, alpha: Any, left: int = 0, weights: Tensor | None = None
    ) -> Chosen:
        """Learn from the rows set aside."""
        assert self._sight is not None
        ways = (self.joint, self.side, "rows set aside", self._seed, self.shape, self.kind)
        return Chosen(taught(self._sight, aside, *ways), {})

    def recalled(self, settings: Mapping[str, Any], state: Mapping[str, Tensor]) -> Any:
        """Give the family that was learned and saved."""
        if settings.get("learned") is None:
            return super().recalled(settings, state)
        functions = [one for one in self._on if callable(one)]
        return LearnedScore.from_state(settings, state, functions, self.joint, self.side)


def _are_hashes(tensor: Tensor) -> bool:
    is_list = tensor.dtype == torch.int64 and tensor.dim() == 1
    return is_list and bool((tensor.diff() >= 0).all())


def _are_sizes(tensor: Tensor) -> bool:
    return bool((tensor > 0).all() and tensor.isfinite().all())


def hash_of(state: Mapping[str, Tensor], sight: Mapping[str, Any]) -> str:
    """Give a short hash of all that was learned, and of the columns it was learned from."""
    digest = hashlib.sha256(json.dumps(sight, sort_keys=True).encode())
    for name in sorted(state):
        digest.update(state[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _as_many(quantiles: Tensor, like: Tensor) -> Tensor:
    """Repeat quantiles (n, m, levels) for every (n, m) of some numbers."""
    return quantiles.expand(*like.shape, quantiles.shape[-1])


def _centre(out: BatchOutput) -> Tensor:
    return columns(as_float64(out.output)).cpu()


def _residual(out: BatchOutput, y: Tensor) -> Tensor:
    return as_float64(y).cpu() - _centre(out)


def _parts(out: BatchOutput) -> Iterator[tuple[BatchOutput, slice]]:
    """Cut what a pass saw: every row has some hundred numbers on the way."""
    if is_traced():  # for any number of rows
        yield out, slice(None)
        return
    rows = len(out.rows)
    for start in range(0, rows, _ROWS):
        part = slice(start, min(start + _ROWS, rows))
        yield forward.part_of(out, part) if rows > _ROWS else out, part
