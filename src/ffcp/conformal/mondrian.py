"""A calibration for each group of rows, so that the guarantee holds within every group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ffcp import files
from ffcp.batch import BatchOutput, Requires
from ffcp.conformal.calibration import Calibration, Marginal, Traits
from ffcp.conformal.columns import Columns, prefixed, take, with_prefix
from ffcp.conformal.p_values import TailCounts, tail_counts
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import rows_needed
from ffcp.conformal.selection import Aside, Selected, Selection

Label = str | int | float | bool
_SHOWN = 8  # groups that are named one by one


@dataclass(frozen=True)
class Mondrian(Calibration):
    """A threshold for every group of rows (Mondrian calibration).

    Each group is covered with probability at least 1 - alpha, whatever the others are like. New
    rows need a group too; a group without calibration rows is an error.

    Parameters
    ----------
    inner : Calibration, default=Marginal()
        The calibration of each group; :class:`Marginal` by default.
    by : callable, default=None
        A function from a batch of inputs to one label per row. Without it, groups are given:
        ``calibrate(x, y, groups=...)``, ``predict_interval(x, groups=...)``.
    rows : dict of Tensor, default={}
        Scores and metadata of the calibration rows; filled by :meth:`fit`.
    parts : dict, default={}
        The calibration of each group; filled by :meth:`fit`.

    Attributes
    ----------
    groups : dict
        How many rows each group has.

    Examples
    --------
    >>> scores = Mondrian().fit(torch.tensor([[1.0], [5.0], [2.0]]), {"group": ["a", "b", "a"]})
    >>> scores.groups
    {'a': 2, 'b': 1}
    >>> scores.quantile(0.5, {"group": ["b", "a"]})
    tensor([[5.],
            [2.]], dtype=torch.float64)
    """

    inner: Calibration = field(default_factory=Marginal)
    by: Callable[[Any], Any] | None = None
    #: The calibration of each group.
    parts: Mapping[Label, Calibration] = field(
        default_factory=dict, repr=False, compare=False, kw_only=True
    )

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments."""
        return {"inner": self.inner, "by": self.by}

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Those of the inner calibration, and that there are groups."""
        return self.inner.traits._replace(groups=True, rows=True)

    @property
    def groups(self) -> dict[Label, int]:
        """How many rows each group has."""
        return {label: len(part) for label, part in self.parts.items()}

    @cached_property
    def scores(self) -> Tensor:
        """The scores of all groups, concatenated."""
        scores = [part.scores for part in self.parts.values()]
        return torch.cat(scores) if scores else super().scores

    @property
    def rank_error(self) -> float:
        """The bound on how many ranks thresholds are too large, as a share of a group's rows."""
        return max((getattr(part, "rank_error", 0.0) for part in self.parts.values()), default=0.0)

    def __len__(self) -> int:
        return sum(self.groups.values())

    def selection(self) -> Selection | None:
        """Return the selection of the inner calibration, made once for all groups."""
        inner = self.inner.selection()
        return None if inner is None else _InGroups(inner)

    def requires(self) -> Requires:
        """Return what the inner calibration requires, and the input for ``by``."""
        return self.inner.requires().joined(Requires(input=self.by is not None))

    def metadata(self, out: BatchOutput, y: Tensor | None = None) -> dict[str, Any]:
        """Return the group of every row, and the metadata of the inner calibration."""
        return {"group": self.labels(out), **self.inner.metadata(out, y)}

    def labels(self, out: BatchOutput) -> list[Label]:
        """Return the group of every row."""
        if self.by is not None and out.groups is not None:
            raise ValueError("the groups come from Mondrian(by=...): leave out groups=")
        groups = out.groups if self.by is None else self.by(out.x)
        if groups is None:
            known = f" with labels among {_listed(self.groups)}" if self.parts else ""
            raise ValueError(f"every row needs a group: pass groups=..., one label per row{known}")
        return labels_of(groups, len(out.output))

    # -- rows -------------------------------------------------------------------------------

    def fit(self, scores: Tensor, metadata: Columns | None = None) -> Mondrian:
        """Return this calibration with these rows; ``metadata["group"]`` is the group of each."""
        assert metadata is not None
        columns, parts = _without_group(metadata), {}
        for label, rows in rows_of_groups(metadata["group"]).items():
            part = self.inner.fit(scores[rows], take(columns, rows))
            if len(part):
                parts[label] = part
        return replace(self, parts=parts)

    def merge(self, other: Mondrian) -> Mondrian:
        """Return a calibration with the rows of both, group by group."""
        parts = dict(self.parts)
        for label, added in other.parts.items():
            parts[label] = parts.get(label, self.inner).merge(added)
        return replace(self, parts=parts)

    def state(self) -> dict[str, Tensor]:
        """Return the labels of groups and the tensors of each; else what was learned for all."""
        if not self.parts:
            return prefixed("inner.", self.inner.state())
        tensors = {"labels": files.pack({"labels": list(self.parts)})}
        for number, part in enumerate(self.parts.values()):
            tensors |= prefixed(f"{number}.", part.state())
        return tensors

    def with_state(self, state: Mapping[str, Tensor]) -> Mondrian:
        """Return this calibration with the tensors of a file."""
        if "labels" not in state:
            inner = self.inner.with_state(with_prefix("inner.", state))
            return replace(self, inner=inner, parts={})
        saved = files.unpack(state["labels"]).get("labels")
        labels = labels_of(saved, len(saved)) if isinstance(saved, list) else []
        if not labels or len(set(labels)) < len(labels):
            raise ValueError(f"expected one label per group, got {saved!r}")
        parts = {
            label: self.inner.with_state(with_prefix(f"{number}.", state))
            for number, label in enumerate(labels)
        }
        tensors = sum(len(part.state()) for part in parts.values())
        if not all(map(len, parts.values())) or tensors + 1 != len(state):
            raise ValueError("the number of rows of a group differs from that of its labels")
        # Each part has what was learned for all groups, such as the directions of a layer.
        return replace(self, inner=next(iter(parts.values())).with_state({}), parts=parts)

    # -- thresholds -------------------------------------------------------------------------

    def quantile(
        self, alpha: Any, metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Return the threshold of each row's group, shape (n, m)."""
        return self.quantiles([alpha], metadata, random)[0]

    def quantiles(
        self, alphas: Sequence[Any], metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Return the thresholds of each row's group at several levels, (levels, n, m)."""
        if type(self).quantile is not Mondrian.quantile:  # a user's subclass has its own
            return super().quantiles(alphas, metadata, random)
        return self._by_group(metadata, lambda part, rows: part.quantiles(alphas, rows, random))

    def pac_quantiles(self, alphas: Sequence[Any], pac: Any, metadata: Columns) -> Tensor:
        """Return thresholds with PAC coverage in each group, (levels, n, m)."""
        return self._by_group(metadata, lambda part, rows: pac_quantiles(part, alphas, pac, rows))

    def tail_counts(self, scores: Tensor, metadata: Columns) -> TailCounts:
        """Count in each row's group the calibration scores beyond those of new rows."""
        numbers = torch.arange(len(scores))
        stacked = self._by_group(
            {**metadata, "number": numbers},
            lambda part, rows: torch.stack(
                tail_counts(part, scores[rows["number"]], rows)
            ).double(),
        )
        return TailCounts(*stacked)

    def _by_group(
        self, metadata: Columns | None, look_up: Callable[[Calibration, Columns], Tensor]
    ) -> Tensor:
        """Return the threshold of each row's group, (levels, n, m)."""
        assert metadata is not None
        columns, requested = _without_group(metadata), rows_of_groups(metadata["group"])
        must_know(requested, self.parts)
        tables = {}
        for label, rows in requested.items():
            try:
                tables[label] = look_up(self.parts[label], take(columns, rows))
            except ValueError as error:
                raise ValueError(f"in group {label!r} {error}") from error
        width = max(table.shape[-1] for table in tables.values())
        levels = len(next(iter(tables.values())))
        result = torch.empty(levels, len(metadata["group"]), width, dtype=torch.float64)
        for label, rows in requested.items():
            # A group may not have the last classes: their thresholds are infinite.
            result[:, rows] = pad(
                tables[label], (0, width - tables[label].shape[-1]), value=torch.inf
            )
        return result

    def explain(self, alpha: Any, metadata: Columns) -> str:
        """List the groups with too few rows; else explain why that of the first is infinite."""
        needed, counts = rows_needed(alpha), self.groups
        requested = rows_of_groups(metadata["group"])
        small = [f"{label!r} ({counts[label]})" for label in requested if counts[label] < needed]
        if small:
            more = f" and {len(small) - 5} more" if len(small) > 5 else ""
            return (
                f" in groups with too few calibration rows: {', '.join(small[:5])}{more}; "
                f"alpha={float(alpha):g} needs at least {needed} in each"
            )
        label, rows = next(iter(requested.items()))
        reason = self.parts[label].explain(alpha, take(_without_group(metadata), rows))
        return f" in group {label!r}{reason}"


class _InGroups(Selection):
    """Runs the selection of the inner calibration, once for all groups."""

    def __init__(self, inner: Selection) -> None:
        self.inner, self.what, self.takes_new = inner, inner.what, inner.takes_new
        self.most_rows = inner.most_rows

    def select(self, aside: Aside) -> Selected:
        """Select by rows of all groups, for as many rows as a group has."""
        groups = aside.calibration
        counts = [len(rows) for rows in rows_of_groups(groups.labels(aside.out)).values()]
        # The neighbours of a row are those of its group: on average, this share of all rows.
        share = sum(count**2 for count in counts) / sum(counts) ** 2
        left = max(rows_needed(aside.alpha), round(share * aside.left))
        selected = self.inner.select(aside._replace(calibration=groups.inner, left=left))
        return selected._replace(calibration=replace(groups, inner=selected.calibration))


def pac_quantiles(calibration: Any, alphas: Sequence[Any], pac: Any, metadata: Columns) -> Tensor:
    """Return thresholds with PAC coverage; raise ValueError if the calibration has none."""
    if not hasattr(calibration, "pac_quantiles"):
        raise ValueError(
            f"{type(calibration).__name__} has no PAC coverage: leave out pac=, or calibrate with "
            "ffcp.calibrations.Marginal or ffcp.calibrations.Mondrian"
        )
    thresholds: Tensor = calibration.pac_quantiles(alphas, pac, metadata)
    return thresholds


def must_know(labels: Iterable[Label], groups: Mapping[Label, Any]) -> None:
    """Raise ValueError for labels without calibration rows."""
    unseen = [label for label in dict.fromkeys(labels) if label not in groups]
    if unseen:
        raise ValueError(
            f"no calibration row belongs to group {_listed(unseen)}: the groups are "
            f"{_listed(groups)}. Calibrate with rows of that group, or join it to another"
        )


def by_groups(calibration: Calibration) -> Calibration:
    """Return a calibration with a threshold for each group."""
    return calibration if calibration.traits.groups else Mondrian(calibration)


def labels_of(groups: Any, rows: int) -> list[Label]:
    """Return the groups of some rows as labels.

    >>> labels_of(torch.tensor([True, False]), 2)
    [True, False]
    """
    array = groups.detach().cpu().numpy() if isinstance(groups, Tensor) else groups
    if isinstance(array, Sequence) and not isinstance(array, str):
        labels: list[Any] = list(array)  # as they are: an array would turn numbers into strings
    else:
        array = np.asarray(array)
        if array.ndim != 1:
            raise ValueError(f"'groups' must be one label per row, got shape {array.shape}")
        labels = array.tolist()
    labels = [label.item() if isinstance(label, np.generic) else label for label in labels]
    for label in labels:
        if not isinstance(label, (str, int, float)) or label != label:
            raise ValueError(
                f"a group is a string or a number, got {label!r}: give rows without a group one of "
                "their own"
            )
    if len(labels) != rows:
        raise ValueError(f"'groups' has {len(labels)} labels, but x has {rows} rows")
    return labels


def rows_of_groups(labels: Iterable[Label]) -> dict[Label, Tensor]:
    """Return the numbers of the rows of each group, in the order of their first rows.

    >>> rows_of_groups(["b", "a", "b"])
    {'b': tensor([0, 2]), 'a': tensor([1])}
    """
    rows: dict[Label, list[int]] = {}
    for number, label in enumerate(labels):
        rows.setdefault(label, []).append(number)
    return {label: torch.tensor(numbers) for label, numbers in rows.items()}


def _without_group(metadata: Columns) -> dict[str, Any]:
    return {name: column for name, column in metadata.items() if name != "group"}


def _listed(labels: Iterable[Label]) -> str:
    shown = list(labels)
    more = f", ... ({len(shown)} in all)" if len(shown) > _SHOWN else ""
    return ", ".join(map(repr, shown[:_SHOWN])) + more
