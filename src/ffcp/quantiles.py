"""The conformal rank, exact, and a store of scores that can grow, merge and be saved."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ffcp import files
from ffcp.conformal.rank import conformal_rank, points_needed
from ffcp.errors import FFCPWarning

Label = str | int | float | bool  # of a group of points


class RunningSums:
    """Running sums down the columns of integer weights (n, b), kept at every 128th row.

    Column j holds the weights of n sorted scores at the j-th point. Weights are whole numbers of
    at most 2**23, so every sum is exact, whatever the order or the blocks it was made in, and a
    weighted quantile falls on the right score even where the running sum meets the level
    exactly.

    >>> sums = RunningSums(torch.tensor([[1, 0], [2, 0], [3, 5]], dtype=torch.int32))
    >>> sums.total
    tensor([6, 5])
    >>> sums.reach(torch.tensor([3, 6]))  # 1 + 2 = 3 at row 1; 6 is never reached
    tensor([1, 3])
    >>> sums.before(torch.tensor([2, 2]))
    tensor([3, 0])
    """

    step = 128  # 128 * 2**23 fits into 32 bits

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights
        n, columns = weights.shape
        whole = n - n % self.step
        parts = weights[:whole].view(-1, self.step, columns).sum(dim=1, dtype=torch.int32)
        if whole < n:
            rest = weights[whole:].sum(dim=0, keepdim=True, dtype=torch.int32)
            parts = torch.cat([parts, rest])
        start = torch.zeros(1, columns, dtype=torch.int64, device=weights.device)
        self._sums = torch.cat([start, parts.cumsum(dim=0, dtype=torch.int64)])

    @property
    def total(self) -> Tensor:
        """The sum of each column."""
        return self._sums[-1]

    def reach(self, target: Tensor) -> Tensor:
        """First row at which the running sum, that row included, reaches ``target``, or n.

        Targets, one per column, are at least 1.
        """
        block = (self._sums[1:] < target).sum(dim=0)
        missing = target - self._sums.gather(0, block[None])[0]
        inside = (self._block(block).cumsum(dim=0) < missing).sum(dim=0)
        return (block * self.step + inside).clamp_max(len(self._weights))

    def before(self, row: Tensor) -> Tensor:
        """Sum of the weights above a row, one row number per column."""
        block = row // self.step
        above = torch.arange(self.step, device=row.device)[:, None] < row - block * self.step
        return self._sums.gather(0, block[None])[0] + (self._block(block) * above).sum(dim=0)

    def _block(self, block: Tensor) -> Tensor:
        """Weights (128, b) of one block of rows per column; zero beyond the last row."""
        rows = block * self.step + torch.arange(self.step, device=block.device)[:, None]
        found = self._weights.gather(0, rows.clamp_max(len(self._weights) - 1)).long()
        return found.where(rows < len(self._weights), 0)


class ScoreBuffer:
    """Scores that arrive batch by batch, in one tensor that doubles when it is full.

    A list of small tensors would be kept between the large intermediates of the batches, and
    hold the heap open far beyond its own size.

    >>> buffer = ScoreBuffer()
    >>> for part in torch.arange(5.0)[:, None].split(2):
    ...     buffer.extend(part)
    >>> buffer.scores[:, 0]
    tensor([0., 1., 2., 3., 4.], dtype=torch.float64)
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self._room = torch.empty(0, 0, dtype=dtype)
        self._filled = 0

    def extend(self, scores: Tensor) -> None:
        """Append scores of shape (n, m)."""
        end = self._filled + len(scores)
        if end > len(self._room):
            more = self._room.new_empty(max(end, 2 * len(self._room)), scores.shape[1])
            if self._filled:
                more[: self._filled] = self.scores
            self._room = more
        self._room[self._filled : end] = scores.detach()
        self._filled = end

    @property
    def scores(self) -> Tensor:
        """All scores so far, in the order they came."""
        return self._room[: self._filled]


class ScoreStore(nn.Module):
    """All calibration scores, sorted inside their group, in float64 on the CPU.

    Without groups all points are one. NaN stands for a score that is not known. Scores are a
    buffer, so ``state_dict`` carries them, but ``.to()`` and ``.half()`` leave them alone: a
    threshold is one number, and rounding it would break the guarantee.

    >>> store = ScoreStore()
    >>> store.replace(torch.tensor([[4.0], [1.0], [3.0], [2.0]]), ["a", "b", "a", "b"])
    >>> store.threshold(0.5, ["b", "a"])[:, 0]
    tensor([2., 4.], dtype=torch.float64)
    """

    scores: Tensor
    names: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scores", torch.empty(0, 0, dtype=torch.float64))
        self.register_buffer("names", files.pack({}))

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def coordinates(self) -> int:
        """How many outputs have scores of their own."""
        return self.scores.shape[1]

    @property
    def groups(self) -> dict[Label, int]:
        """How many points each group has, in the order of the scores; empty without groups."""
        saved = files.unpack(self.names)
        return dict(zip(saved.get("labels", []), saved.get("counts", []), strict=True))

    def replace(self, scores: Tensor, labels: Sequence[Label] | None = None) -> None:
        """Keep these scores, of shape (n, m), and no others; ``labels`` are their groups."""
        kept = scores.detach().to("cpu", torch.float64, copy=True)
        counts: dict[Label, int] = {}
        if labels is not None:
            codes = Codes()
            kept = kept[codes(labels).argsort(stable=True)]
            counts = codes.counts
        # Column-wise sort in numpy, in place: torch.sort would also hold an index per score.
        for part in kept.split(list(counts.values()) or [len(kept)]):
            part.numpy().sort(axis=0)
        self.scores = kept
        self.names = files.pack({"labels": list(counts), "counts": list(counts.values())})

    def add(self, scores: Tensor, labels: Sequence[Label] | None = None) -> None:
        """Keep these scores as well."""
        if not len(self):
            self.replace(scores, labels)
            return
        if scores.shape[1] != self.coordinates:
            raise ValueError(
                f"the store has scores for {self.coordinates} outputs, got {scores.shape[1]}"
            )
        if bool(self.groups) != (labels is not None):
            raise ValueError(
                "some points have groups and some have none: calibrate all of them with groups=, "
                "or none"
            )
        scores = torch.cat([self.scores, scores.detach().to("cpu", torch.float64)])
        self.replace(scores, None if labels is None else [*self.labels(), *labels])

    def labels(self) -> list[Label]:
        """Give the group of every stored score."""
        return [label for label, count in self.groups.items() for _ in range(count)]

    def threshold(self, alpha: Any, labels: Sequence[Label] | None = None) -> Tensor:
        """Look up the conformal quantile; warn where it is infinite.

        One per coordinate, shape (m,); with groups, one per row of ``labels``, shape (n, m).
        """
        groups = self.groups
        if bool(groups) != (labels is not None):
            raise ValueError(
                "this predictor was calibrated by groups, so every new point needs one: pass "
                f"groups=... with labels among {_listed(groups)}"
                if groups
                else "this predictor was calibrated without groups: calibrate(x, y, groups=...) "
                "gives every group a threshold of its own"
            )
        if labels is None:
            return self._checked_quantile(alpha)
        parts = self.scores.split(list(groups.values()))
        table = torch.stack([_sorted_quantile(part, alpha) for part in parts])
        self._warn_of_small_groups(alpha, set(labels))
        return table[self._codes(labels)]

    def _checked_quantile(self, alpha: Any) -> Tensor:
        found = _sorted_quantile(self.scores, alpha)
        fewest = int(_known(self.scores).min())
        if conformal_rank(fewest, alpha) > fewest:
            _warn(
                f"the band is infinite: alpha={float(alpha):g} needs at least "
                f"{points_needed(alpha)} calibration points and there are {fewest}"
            )
        return found

    def _codes(self, labels: Sequence[Label]) -> Tensor:
        codes = {label: code for code, label in enumerate(self.groups)}
        unseen = [label for label in dict.fromkeys(labels) if label not in codes]
        if unseen:
            raise ValueError(
                f"no calibration point belongs to group {_listed(unseen)}: the groups there are "
                f"{_listed(codes)}. Calibrate with points of that group, or merge it into another"
            )
        return torch.tensor([codes[label] for label in labels])

    def _warn_of_small_groups(self, alpha: Any, asked: set[Label]) -> None:
        needed = points_needed(alpha)
        small = {g: count for g, count in self.groups.items() if g in asked and count < needed}
        if small:
            listed = ", ".join(f"{label!r} ({count})" for label, count in list(small.items())[:5])
            more = f" and {len(small) - 5} more" if len(small) > 5 else ""
            _warn(
                f"the band is infinite in groups with too few calibration points: {listed}{more}; "
                f"alpha={float(alpha):g} needs at least {needed} in each"
            )

    def _apply(self, fn: Any, recurse: bool = True) -> ScoreStore:
        return self  # stays where it is, as it is

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # The saved scores may be of any number; the parent class insists on equal shapes.
        make_room(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Codes:
    """Numbers labels in the order they first come.

    >>> codes = Codes()
    >>> codes(["b", "a", "b"]), codes.counts
    (tensor([0, 1, 0]), {'b': 2, 'a': 1})
    """

    def __init__(self) -> None:
        self.counts: dict[Label, int] = {}
        self._codes: dict[Label, int] = {}

    def __call__(self, labels: Sequence[Label]) -> Tensor:
        """Give the number of each label."""
        numbers = []
        for label in labels:
            numbers.append(self._codes.setdefault(label, len(self._codes)))
            self.counts[label] = self.counts.get(label, 0) + 1
        return torch.tensor(numbers)


def make_room(store: nn.Module, state_dict: Mapping[str, Tensor], prefix: str) -> None:
    """Give a store's buffers the shapes of the saved ones, which may hold any number of points."""
    for name, buffer in store.named_buffers(recurse=False):
        saved = state_dict.get(f"{prefix}{name}")
        if saved is not None:
            setattr(store, name, torch.empty(saved.shape, dtype=buffer.dtype))


def _sorted_quantile(scores: Tensor, alpha: Any) -> Tensor:
    """Look up the quantile of each sorted column; NaN, at the end, are no scores."""
    known = _known(scores)
    counts = known.unique().tolist()
    ranks = {count: conformal_rank(count, alpha) for count in counts}
    if len(counts) == 1:
        (k,) = ranks.values()
        return scores[k - 1] if k <= counts[0] else scores.new_full(scores.shape[1:], math.inf)
    place = torch.tensor([ranks[count] for count in known.tolist()])
    found = scores.gather(0, (place - 1).clamp(max=len(scores) - 1)[None])[0]
    return found.masked_fill(place > known, math.inf)


def _known(scores: Tensor) -> Tensor:
    """How many of each column's scores are known; NaN are sorted to the end."""
    if len(scores) and not bool(scores[-1].isnan().any()):
        return torch.full(scores.shape[1:], len(scores))
    return len(scores) - scores.isnan().sum(dim=0)


def _listed(labels: Iterable[Label]) -> str:
    shown = list(labels)
    more = f", ... ({len(shown)} in all)" if len(shown) > 8 else ""
    return ", ".join(map(repr, shown[:8])) + more


def _warn(message: str) -> None:
    warnings.warn(message, FFCPWarning, stacklevel=4)
