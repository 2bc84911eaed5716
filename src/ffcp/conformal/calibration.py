"""What all calibrations share: scores of held-out points, kept as buffers of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ffcp.batch import BatchOutput, Requires
from ffcp.conformal.columns import Columns
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import rows_needed

Self = TypeVar("Self", bound="Calibration")


class Calibration(nn.Module):
    """Keeps scores and turns them into thresholds; the base of all calibrations.

    A calibration of one's own says how the threshold follows from ``self.scores``
    (:meth:`threshold`) and, if it looks at more than scores, what to note of every point
    (:meth:`metadata`): a column for each buffer that it registers beside ``scores``.

    Points are buffers, so ``state_dict`` carries them, but ``.to()`` and ``.half()`` leave them
    alone: a threshold is one number, and rounding it would break the guarantee.

    Attributes
    ----------
    scores : Tensor
        The scores that were added, (n, m), in float64.

    Examples
    --------
    >>> class Largest(Calibration):
    ...     def threshold(self, alpha, metadata=None, random=None):
    ...         return self.scores.amax(dim=0)
    >>> scores = Largest()
    >>> scores.add(torch.tensor([[1.0], [3.0], [2.0]]))
    >>> scores.threshold(0.1)
    tensor([3.], dtype=torch.float64)
    """

    scores: Tensor
    #: Whether new points need a group.
    takes_groups = False
    #: Whether every row, in calibration and later, comes with a weight.
    takes_weights = False
    #: Whether it learns from new inputs without targets, see :meth:`facing`.
    takes_new = False
    #: Whether NaN may stand for a score that is not known.
    takes_missing = False
    #: Whether it looks at the class of a target, and so serves label sets only.
    looks_at_labels = False
    #: Whether it keeps which scores are the size of a negative number, for distributions.
    keeps_signs = False
    #: Whether thresholds may depend on random numbers, those of ``metadata["row"]``.
    draws = True
    #: Whether thresholds differ from point to point, so that some may be infinite.
    is_local = False
    #: Whether a summary is kept of the scores in place of all of them.
    is_summary = False
    #: By which share of the points thresholds may then be too large, in ranks.
    rank_error: float = 0.0
    #: Whether something is still to be chosen before points can be kept.
    is_open = False
    #: Whether it is chosen by scores, and so behind all that scores depend on.
    looks_at_scores = True
    #: What that is, in words.
    what_is_open = "what is left open"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scores", torch.empty(0, 0, dtype=torch.float64))
        self._cache: dict[Any, Any] = {}  # worked out of the points once, until they change

    def __len__(self) -> int:
        return self._points("scores").shape[0]

    @property
    def coordinates(self) -> int:
        """How many outputs have scores of their own."""
        return self._points("scores").shape[1]

    def _points(self, name: str) -> Tensor:
        """Give a buffer, as its attribute does, without torch's look for other attributes first."""
        return self.__dict__["_buffers"][name]  # type: ignore[no-any-return]

    # -- what a calibration defines ---------------------------------------------------------

    def threshold(
        self, alpha: Any, metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Look up the thresholds: (m,) for all points, or (n, m) with a row for each.

        Parameters
        ----------
        alpha
            Share of misses allowed.
        metadata
            What :meth:`metadata` says of the new points.
        random
            Random numbers, for calibrations that use them: those of ``metadata["row"]``.
        """
        raise NotImplementedError

    def thresholds(
        self, alphas: Sequence[Any], metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Look up the thresholds of several levels: (levels, 1 or n, m).

        One level after the other, unless a calibration shares work between them.
        """
        result = [self.threshold(alpha, metadata, random) for alpha in alphas]
        return torch.stack([one if one.dim() > 1 else one[None] for one in result])

    def pac_thresholds(
        self, alphas: Sequence[Any], pac: Any, metadata: Columns | None = None
    ) -> Tensor:
        """Look up thresholds that cover 1 - alpha *given* these points, so surely (PAC)."""
        raise ValueError(
            f"{type(self).__name__} has no PAC coverage, whose law is known for one quantile of "
            "many points only: leave out pac=, or calibrate with ffcp.calibrations.Marginal or "
            "ffcp.calibrations.Mondrian"
        )

    def signed(self) -> Tensor | None:
        """Give the signed scores (n, m), each column sorted; ``None`` where none are kept."""
        return None

    def requires(self) -> Requires:
        """Say what the pass over the model must bring for :meth:`metadata`."""
        return Requires()

    def metadata(self, out: BatchOutput, y: Tensor | None = None) -> dict[str, Any]:
        """Say what is kept of points besides their scores: a column for each buffer."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Say what thresholds depend on besides the points; saved, and compared when merging."""
        return {"calibration": type(self).__name__}

    def why_infinite(self, alpha: Any, metadata: Columns) -> str:
        """Go on behind "the band is infinite": why, and what to do."""
        fewest, needed = int(known(self.scores).min()), rows_needed(alpha)
        if fewest >= needed:
            infinite = int(self.scores.isinf().sum(dim=0).max())
            return (
                f": {infinite} of {len(self)} calibration scores are infinite, more than "
                f"alpha={float(alpha):g} allows for"
            )
        return (
            f": alpha={float(alpha):g} needs at least {needed} calibration points and there are "
            f"{fewest}"
        )

    # -- only where something is open -------------------------------------------------------

    #: How many rows are enough to choose.
    most_rows = 0
    #: What the choice is called among those of a predictor.
    choice_name = "bandwidth"

    def choose(
        self: Self, scores: Tensor, metadata: Columns, planned: int, alpha: Any
    ) -> tuple[Self, Any]:
        """Choose what is open, on points that will not calibrate; ``planned`` others will."""
        raise NotImplementedError

    def weight_of(self, metadata: Columns) -> Tensor | None:
        """Say how much likelier each noted point is among new ones; ``None``: all are alike."""
        return None

    def metadata_after_selection(
        self, out: BatchOutput, y: Tensor, metadata: Columns
    ) -> dict[str, Any]:
        """Return the metadata of rows that another calibration, which this one replaces, noted."""
        return self.metadata(out, y)

    def metadata_of_new(self, out: BatchOutput) -> dict[str, Any]:
        """Note of new inputs without targets what :meth:`choose` is to learn from."""
        return self.metadata(out)

    def with_target_inputs(self: Self, new: Callable[[], Columns]) -> Self:
        """Give a calibration that :meth:`choose` s by new inputs; ``new`` gives their notes."""
        return self

    def restored(self: Self, settings: Mapping[str, Any]) -> Self:
        """Give a calibration whose open settings are those that were saved."""
        return self

    def choices_from(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Build the choices again that were saved."""
        return {}

    # -- keeping points ---------------------------------------------------------------------

    def add(self, scores: Tensor, metadata: Columns | None = None) -> None:
        """Keep these points, scores (n, m) and a row of notes for each, beside those there are.

        They are kept as they are, not copied: nobody else is to write to them.
        """
        metadata = metadata or {}
        if len(self) and scores.shape[1] != self.coordinates:
            raise ValueError(
                f"the calibration has scores for {self.coordinates} outputs, got {scores.shape[1]}"
            )
        points = {"scores": scores.detach().to("cpu", torch.float64), **metadata}
        if len(self):
            points = {name: torch.cat([old, points[name]]) for name, old in self.points().items()}
        self.keep(self.arranged(points))

    def check(self, points: Mapping[str, Tensor]) -> None:
        """Refuse, with a ValueError, points from elsewhere that cannot have been kept here.

        A calibration of one's own goes on behind ``super().check(points)``.
        """
        mine = self.points()
        if points.keys() != mine.keys():
            raise ValueError(f"it holds {_listed(points)} where {_listed(mine)} are kept")
        for name, buffer in mine.items():
            if points[name].dtype != buffer.dtype:
                raise ValueError(f"{name} is of {points[name].dtype}, not {buffer.dtype}")
        self._check_scores(points["scores"])
        self._check_rows(points)

    def _check_scores(self, scores: Tensor) -> None:
        if scores.dim() != 2 or (len(scores) and not scores.shape[1]):
            raise ValueError(f"scores have the shape {tuple(scores.shape)}")

    def _check_rows(self, points: Mapping[str, Tensor]) -> None:
        for name, values in points.items():
            if not values.dim() or len(values) != len(points["scores"]):
                raise ValueError(
                    f"{name} has the shape {tuple(values.shape)} beside "
                    f"{len(points['scores'])} scores"
                )

    def arranged(self, points: dict[str, Tensor]) -> dict[str, Tensor]:
        """Put points, which nobody else holds, into the order in which they are kept."""
        return points

    def keep(self, points: Mapping[str, Tensor]) -> None:
        """Keep exactly these points, a tensor for each buffer."""
        self._buffers.update(points)
        self._cache = {}

    def points(self) -> dict[str, Tensor]:
        """Give all that is kept of the points, by the names of the buffers."""
        return dict(self.named_buffers(recurse=False))

    def merge(self, other: Calibration) -> None:
        """Take over the points of another calibration of the same settings."""
        points = other.points()
        self.add(points.pop("scores"), points)

    def empty(self: Self) -> Self:
        """Give a calibration of the same settings without points."""
        fresh = object.__new__(type(self))
        fresh.__dict__.update(self.__dict__)
        kept = ((n, b) for n, b in self.__dict__["_buffers"].items() if b is not None)
        # Of no rows at all the same tensor will do: there is nothing to write to.
        fresh._buffers = {
            n: b if b.shape[:1] == (0,) else b.new_empty((0, *b.shape[1:])) for n, b in kept
        }
        fresh._cache = {}
        return fresh

    # -- being a module ---------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": {}}

    def extra_repr(self) -> str:
        """Show how many points there are."""
        return f"{len(self)} points"

    def _apply(self: Self, fn: Any, recurse: bool = True) -> Self:
        return self  # stays where it is, as it is


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def known(scores: Tensor) -> Tensor:
    """Count the scores of each column that are known: NaN are not."""
    if len(scores) and not bool(scores[-1].isnan().any()):
        return torch.full(scores.shape[1:], len(scores))  # sorted: NaN would be last
    return len(scores) - scores.isnan().sum(dim=0)
