"""A calibration for each group of points, so that the guarantee holds inside every group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ffcp import files
from ffcp.batch import BatchOutput, Requires, name_of
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import Columns, take
from ffcp.conformal.marginal import Marginal
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import rows_needed
from ffcp.recipes import public

Label = str | int | float | bool
_SHOWN = 8  # groups that are named one by one


@public
class Mondrian(Calibration):
    """Thresholds of their own for every group of points (Mondrian calibration).

    Parameters
    ----------
    inner
        The calibration that each group has; :class:`Marginal` by default.
    by
        A function from a batch of inputs to the group of each row, words or numbers. Without it
        groups are given as ``groups=`` when calibrating and predicting.

    Examples
    --------
    >>> scores = Mondrian()
    >>> scores.add(torch.tensor([[4.0], [1.0], [3.0], [2.0]]), {"group": ["a", "b", "a", "b"]})
    >>> scores.threshold(0.5, {"group": ["b", "a"]})[:, 0]
    tensor([2., 4.], dtype=torch.float64)
    """

    names: Tensor
    takes_groups = True

    def __init__(
        self, inner: Calibration | None = None, by: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__()
        inner = Marginal() if inner is None else inner
        self.by = by
        self._inner = (inner.empty(),)  # in a tuple: not a module of its own
        # All groups one below the other: the buffers of the inner calibration, and whose they are.
        for name, buffer in self._inner[0].points().items():
            self.register_buffer(name, buffer)
        self.register_buffer("names", files.pack({}))

    @property
    def inner(self) -> Calibration:
        """The calibration that each group has, without points."""
        return self._inner[0]

    @property
    def is_summary(self) -> bool:  # type: ignore[override]
        """Whether groups keep a summary of their scores."""
        return self.inner.is_summary

    @property
    def rank_error(self) -> float:  # type: ignore[override]
        """By which share of a group's points its thresholds may be too large, in ranks."""
        return max((part.rank_error for part in self.parts().values()), default=0.0)

    @property
    def takes_missing(self) -> bool:  # type: ignore[override]
        """Whether NaN may stand for a score that is not known."""
        return self.inner.takes_missing

    @property
    def keeps_signs(self) -> bool:  # type: ignore[override]
        """Whether the groups keep which scores are the size of a negative number."""
        return self.inner.keeps_signs

    @property
    def looks_at_labels(self) -> bool:  # type: ignore[override]
        """Whether it looks at the class of a target."""
        return self.inner.looks_at_labels

    @property
    def takes_weights(self) -> bool:  # type: ignore[override]
        """Whether every row comes with a weight."""
        return self.inner.takes_weights

    @property
    def takes_new(self) -> bool:  # type: ignore[override]
        """Whether it learns from new inputs."""
        return self.inner.takes_new

    @property
    def looks_at_scores(self) -> bool:  # type: ignore[override]
        """Whether what is open is chosen by scores."""
        return self.inner.looks_at_scores

    @property
    def choice_name(self) -> str:  # type: ignore[override]
        """What the choice is called."""
        return self.inner.choice_name

    @property
    def is_local(self) -> bool:  # type: ignore[override]
        """Whether thresholds differ inside a group."""
        return self.inner.is_local

    @property
    def is_open(self) -> bool:  # type: ignore[override]
        """Whether something is still to be chosen before points can be kept."""
        return self.inner.is_open

    @property
    def what_is_open(self) -> str:  # type: ignore[override]
        """What that is, in words."""
        return self.inner.what_is_open

    @property
    def groups(self) -> dict[Label, int]:
        """How many points each group has, in the order of the scores."""
        labels, counts, _ = _names_of(self.names)
        return dict(zip(labels, counts, strict=True))

    def __len__(self) -> int:
        if not self.is_summary:
            return super().__len__()
        return sum(self.groups.values())

    def requires(self) -> Requires:
        """Say what the pass must bring."""
        return self.inner.requires()

    def settings(self) -> dict[str, Any]:
        """Say what thresholds depend on besides the points."""
        by = None if self.by is None else name_of(self.by)
        return {**self.inner.settings(), "groups": True, "by": by}

    def empty(self) -> Mondrian:
        """Give a calibration of the same settings without points."""
        return Mondrian(self.inner, self.by)

    def metadata(self, out: BatchOutput, y: Tensor | None = None) -> dict[str, Any]:
        """Note the group of every point, and what the inner calibration does."""
        if self.by is not None and out.groups is not None:
            raise ValueError("the groups come from Mondrian(by=...): leave out groups=")
        groups = out.groups if self.by is None else self.by(out.x)
        if groups is None and not len(self):
            raise ValueError("every point needs a group: pass groups=..., one label per row")
        if groups is None:
            raise ValueError(
                "this predictor was calibrated by groups, so every new point needs one: pass "
                f"groups=... with labels among {_listed(self.groups)}"
            )
        return {"group": labels_of(groups, len(out.rows)), **self.inner.metadata(out, y)}

    @property
    def most_rows(self) -> int:  # type: ignore[override]
        """How many rows are enough to choose."""
        return self.inner.most_rows

    def choose(
        self, scores: Tensor, metadata: Columns, planned: int, alpha: Any
    ) -> tuple[Mondrian, Any]:
        """Choose for the inner calibration what is open, once for all groups."""
        counts = [len(rows) for rows in rows_of_groups(metadata["group"]).values()]
        # A point has the others of its group around it: on average, this share of them all.
        share = sum(count**2 for count in counts) / sum(counts) ** 2
        inside = max(rows_needed(alpha), round(share * planned))
        inner, choice = self.inner.choose(scores, _without_group(metadata), inside, alpha)
        return Mondrian(inner, self.by), choice

    def weight_of(self, metadata: Columns) -> Tensor | None:
        """Say how much likelier each noted point is among new ones."""
        return self.inner.weight_of(_without_group(metadata))

    def metadata_after_selection(
        self, out: BatchOutput, y: Tensor, metadata: Columns
    ) -> dict[str, Any]:
        """Note points whose group is noted."""
        inner = self.inner.metadata_after_selection(out, y, _without_group(metadata))
        return {"group": metadata["group"], **inner}

    def metadata_of_new(self, out: BatchOutput) -> dict[str, Any]:
        """Note of new inputs what the inner calibration learns from; they need no groups."""
        return self.inner.metadata_of_new(out)

    def with_target_inputs(self, new: Callable[[], Columns]) -> Mondrian:
        """Give a calibration that can learn from new inputs, once for all groups."""
        return Mondrian(self.inner.with_target_inputs(new), self.by)

    def restored(self, settings: Mapping[str, Any]) -> Mondrian:
        """Give a calibration whose open settings are those that were saved."""
        return Mondrian(self.inner.restored(settings), self.by)

    def choices_from(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Build the choices again that were saved."""
        return self.inner.choices_from(saved)

    # -- keeping points ---------------------------------------------------------------------

    def check(self, points: Mapping[str, Tensor]) -> None:
        """Refuse groups that are none or do not add up, and what the inner calibration refuses."""
        super().check(points)
        _, counts, rows = _names_of(points["names"])
        if bool(rows) != (self.is_summary and bool(counts)):
            raise ValueError("the names of groups do not say how many rows each has")
        for part, count in zip(_split(points), counts, strict=True):
            self.inner.check(part)
            grown = self._copy(None)
            grown.keep(part)
            if len(grown) != count:
                raise ValueError(f"a group of {count} points has {len(grown)}")

    def _check_rows(self, points: Mapping[str, Tensor]) -> None:
        if not self.is_summary:
            super()._check_rows({n: t for n, t in points.items() if n != "names"})

    def add(self, scores: Tensor, metadata: Columns | None = None) -> None:
        """Keep these points; ``metadata["group"]`` says whose they are."""
        metadata = dict(metadata or {})
        parts = dict(self.parts())
        groups = metadata.pop("group")
        for label, rows in rows_of_groups(groups).items():
            parts[label] = self._copy(parts.get(label))
            parts[label].add(scores[rows], take(metadata, rows))
        self.pack(parts)

    def merge(self, other: Calibration) -> None:
        """Take over the points of another calibration by groups."""
        assert isinstance(other, Mondrian)
        if not len(other):
            return
        parts = dict(self.parts())
        for label, theirs in other.parts().items():
            parts[label] = self._copy(parts.get(label))
            parts[label].merge(theirs)
        self.pack(parts)

    def _copy(self, part: Calibration | None) -> Calibration:
        """Give a group's calibration that may grow; the old one stays as it is."""
        grown = self.inner.empty()
        if part is not None:
            grown.keep(part.points())
        return grown

    def of(self, parts: Mapping[Label, Calibration]) -> Mondrian:
        """Give a calibration whose groups have these calibrations."""
        fresh = self.empty()
        if parts:
            fresh.pack(parts)
        return fresh

    def pack(self, parts: Mapping[Label, Calibration]) -> None:
        """Keep the scores of all groups, one below the other."""
        tables = [part.points() for part in parts.values()]
        points = {name: _stacked([table[name] for table in tables]) for name in tables[0]}
        counts = [len(part) for part in parts.values()]
        names: dict[str, Any] = {"labels": list(parts), "counts": counts}
        if self.is_summary:  # not a row for every point
            names["rows"] = {name: [len(table[name]) for table in tables] for name in points}
        points["names"] = files.pack(names)
        self.keep(points)
        self._cache["parts"] = dict(parts)

    def parts(self) -> dict[Label, Calibration]:
        """Give each group's calibration."""
        if "parts" not in self._cache:
            self._cache["parts"] = self._unpacked()
        parts: dict[Label, Calibration] = self._cache["parts"]
        return parts

    def _unpacked(self) -> dict[Label, Calibration]:
        parts = {}
        for label, points in zip(self.groups, _split(self.points()), strict=True):
            parts[label] = self.inner.empty()
            parts[label].keep({name: column.clone() for name, column in points.items()})
        return parts

    # -- thresholds -------------------------------------------------------------------------

    def threshold(
        self, alpha: Any, metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Look up the threshold of each point's group, shape (n, m)."""
        return self.thresholds([alpha], metadata, random)[0]

    def thresholds(
        self, alphas: Sequence[Any], metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Return the thresholds of each row's group at several levels, (levels, n, m)."""
        if type(self).threshold is not Mondrian.threshold:  # a user's subclass has its own
            return super().thresholds(alphas, metadata, random)
        return self._by_group(metadata, lambda part, own: part.thresholds(alphas, own, random))

    def pac_thresholds(
        self, alphas: Sequence[Any], pac: Any, metadata: Columns | None = None
    ) -> Tensor:
        """Look up thresholds that cover 1 - alpha in each group given its points, so surely."""
        return self._by_group(metadata, lambda part, own: part.pac_thresholds(alphas, pac, own))

    def _by_group(
        self, metadata: Columns | None, look_up: Callable[[Calibration, Columns], Tensor]
    ) -> Tensor:
        """Put together what each group says of its own points, (levels, n, m)."""
        assert metadata is not None
        parts, inner_notes = self.parts(), _without_group(metadata)
        asked = rows_of_groups(metadata["group"])
        unseen = [label for label in asked if label not in parts]
        if unseen:
            raise ValueError(
                f"no calibration point belongs to group {_listed(unseen)}: the groups there are "
                f"{_listed(parts)}. Calibrate with points of that group, or merge it into another"
            )
        tables = {}
        for label, rows in asked.items():
            try:
                tables[label] = look_up(parts[label], take(inner_notes, rows))
            except ValueError as error:
                raise ValueError(f"in group {label!r} {error}") from error
        width = max(table.shape[-1] for table in tables.values())
        levels = {len(table) for table in tables.values()}
        result = torch.empty(*levels, len(metadata["group"]), width, dtype=torch.float64)
        for label, rows in asked.items():
            table = tables[label]
            result[:, rows] = pad(table, (0, width - table.shape[-1]), value=torch.inf)
        return result

    def extra_repr(self) -> str:
        """Show how many points there are, and what each group shows of its own."""
        parts = list(self.parts().items())
        listed = ", ".join(f"{label!r}: {part.extra_repr()}" for label, part in parts[:_SHOWN])
        more = f" and {len(parts) - _SHOWN} more groups" if len(parts) > _SHOWN else ""
        return f"{len(self)} points" + (f" ({listed}{more})" if parts else "")

    def why_infinite(self, alpha: Any, metadata: Columns) -> str:
        """Name the groups that are too small; else say what the inner calibration says."""
        needed, counts, parts = rows_needed(alpha), self.groups, self.parts()
        asked = rows_of_groups(metadata["group"])
        small = {label: counts[label] for label in asked if counts[label] < needed}
        if small:
            listed = ", ".join(f"{label!r} ({count})" for label, count in list(small.items())[:5])
            more = f" and {len(small) - 5} more" if len(small) > 5 else ""
            return (
                f" in groups with too few calibration points: {listed}{more}; "
                f"alpha={float(alpha):g} needs at least {needed} in each"
            )
        label, rows = next(iter(asked.items()))
        reason = parts[label].why_infinite(alpha, take(_without_group(metadata), rows))
        return f" in group {label!r}{reason}"


def _names_of(names: Tensor) -> tuple[list[Label], list[int], dict[str, list[int]]]:
    """Read the labels of groups, how many points each has, and how many rows of each buffer.

    No rows are told where every point has one. What cannot be is a ValueError.
    """
    saved = {"labels": [], "counts": [], "rows": {}, **files.unpack(names)}
    labels, counts, rows = saved["labels"], saved["counts"], saved["rows"]
    if not isinstance(labels, list) or not isinstance(counts, list) or len(saved) != 3:
        raise ValueError("the names of groups cannot be read")
    if not isinstance(rows, dict) or not all(isinstance(each, list) for each in rows.values()):
        raise ValueError("the names of groups cannot be read")
    counts = [files.count(number, least=1) for number in counts]
    rows = {name: [files.count(number) for number in each] for name, each in rows.items()}
    if any(len(each) != len(counts) for each in rows.values()):
        raise ValueError("the rows of groups cannot be read")
    labels = labels_of(labels, len(counts))
    if len(set(labels)) != len(labels):
        raise ValueError("a group has its name twice")
    return labels, counts, rows


def _split(points: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Divide buffers that are one below the other among the groups they belong to."""
    tables = dict(points)
    _, counts, rows = _names_of(tables.pop("names"))
    if rows and rows.keys() != tables.keys():
        raise ValueError("the rows of groups are those of other buffers")
    for name, table in tables.items():
        if sum(rows.get(name, counts)) != len(table):
            raise ValueError(f"groups of {sum(counts)} points share {len(table)} rows of {name}")
    parts = {name: table.split(rows.get(name, counts)) for name, table in tables.items()}
    return [{name: parts[name][i] for name in parts} for i in range(len(counts))]


def _stacked(tables: Sequence[Tensor]) -> Tensor:
    """Put tables one below the other; of those without rows only the type counts."""
    filled = [table for table in tables if len(table)]
    return torch.cat(filled or list(tables[:1]))


def by_groups(calibration: Calibration) -> Calibration:
    """Give a calibration with thresholds of their own for groups, if it has none."""
    return calibration if calibration.takes_groups else Mondrian(calibration)


def labels_of(groups: Any, rows: int) -> list[Label]:
    """Read the groups of some rows.

    >>> labels_of(torch.tensor([True, False]), 2)
    [True, False]
    """
    array = groups.detach().cpu().numpy() if isinstance(groups, Tensor) else groups
    if isinstance(array, Sequence) and not isinstance(array, str):
        labels: list[Any] = list(array)  # as they are: an array would turn numbers into words
    else:
        array = np.asarray(array)
        if array.ndim != 1:
            raise ValueError(f"groups must be one label per row, got shape {array.shape}")
        labels = array.tolist()
    labels = [label.item() if isinstance(label, np.generic) else label for label in labels]
    for label in labels:
        if not isinstance(label, (str, int, float)) or label != label:
            raise ValueError(
                f"a group is a word or a number, got {label!r}: give rows without a group one of "
                "their own"
            )
    if len(labels) != rows:
        raise ValueError(f"groups has {len(labels)} labels, but x has {rows} rows")
    return labels


def rows_of_groups(labels: Iterable[Label]) -> dict[Label, Tensor]:
    """Give the rows of each group, groups in the order in which they first come.

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
    more = f", ... ({len(shown)} in all)" if len(shown) > 8 else ""
    return ", ".join(map(repr, shown[:8])) + more
