"""What all predictors share: a model, pieces, and a calibration that grows, merges, is saved."""

from __future__ import annotations

import functools
import math
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ffcp import files
from ffcp.calibrating import Batch, Calibrating, Choosing
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import Columns, prefixed, with_prefix
from ffcp.conformal.draws import Draws, Stream
from ffcp.conformal.mondrian import by_groups
from ffcp.conformal.rank import exact_alpha
from ffcp.conformal.selection import Scorer
from ffcp.network import inputs, passes
from ffcp.network.features import resolve
from ffcp.network.identity import Identity
from ffcp.network.picking import Output, output_name, picking
from ffcp.pieces import Needs, Seen
from ffcp.recipes import left_to_you, made_again, maker_of, recipe_of
from ffcp.warnings import FFCPWarning, lines_up

Self = TypeVar("Self", bound="Predictor")
P = ParamSpec("P")
_LOOK_UP = 3  # the stream of random numbers for thresholds
Result = TypeVar("Result")


def steady(
    method: Callable[Concatenate[Self, P], Result],
) -> Callable[Concatenate[Self, P], Result]:
    """Let a method work on one calibration from beginning to end, and on the weights it is of.

    Another thread may calibrate meanwhile, or train the model: the result is that of the
    calibration at the beginning, or an error.
    """

    @functools.wraps(method)
    def call(self: Self, *args: P.args, **kwargs: P.kwargs) -> Result:
        snapshot = self._snapshot()
        snapshot._check_weights()
        result = method(snapshot, *args, **kwargs)
        snapshot._check_weights()
        return result

    return call  # type: ignore[return-value]


class Predictor(nn.Module):
    """A model, a scorer and a calibration: calibrate, merge, save and load, once for all tasks.

    The scorer gives points their scores; the calibration keeps them and gives thresholds. Where
    either leaves something open, a share of the rows is set aside to choose it and does not
    calibrate. The model runs in eval mode and is left as it was found.
    """

    calibration: Calibration
    #: What is predicted; only predictors of the same kind can be merged.
    task = ""

    def __init__(
        self,
        model: nn.Module,
        scorer: Scorer,
        calibration: Calibration,
        *,
        choose_fraction: float = 0.2,
        choose_alpha: float = 0.1,
        seed: int | None = None,
        batch_size: int | None = None,
        output: Output = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if not 0 < choose_fraction < 1:
            raise ValueError(f"choose_fraction must lie between 0 and 1, got {choose_fraction}")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise ValueError(f"seed must be an integer and not negative, got {seed!r}")
        exact_alpha(choose_alpha)
        self.model, self.output = picking(model, output), output
        self.batch_size = batch_size
        self.choose_fraction, self.choose_alpha, self.seed = choose_fraction, choose_alpha, seed
        # As given, with whatever they leave open; in a tuple, so that no module is held twice.
        self._given: tuple[Scorer, Calibration] = (scorer, calibration)
        self._check_features(scorer.needs().joined(calibration.needs()))
        # As they are in use.
        self._scorer = scorer
        self._choices: dict[str, Any] = {}
        self._fitted: dict[str, Any] = {}  # choices made before calibrating, on other points
        self._set_aside = 0
        self._layout: dict[str, Any] = {}  # what inputs were like, see inputs.Reader
        self._identity: Identity | None = None  # of the model that was calibrated
        self._runs: tuple[str, ...] = ()  # the names of the calibrations whose points these are
        self.calibration = calibration.empty()
        self._stream = Stream(seed)
        self._lock = threading.Lock()  # held while one calibration takes the place of another

    # -- what a task defines ----------------------------------------------------------------

    def _read_target(self, y: Any) -> Tensor:
        """Turn targets into a tensor."""
        return inputs.target_tensor(y)

    def _checked_target(self, y: Tensor, first_row: int) -> Tensor:
        """Refuse targets that cannot be meant."""
        return y

    def alpha_of_each(self, alpha: Any, thresholds: int) -> Fraction:
        """Give the share of misses that each of several thresholds allows."""
        return exact_alpha(alpha)

    def _own_settings(self) -> dict[str, Any]:
        """Say what scores depend on besides model, scorer and calibration."""
        return {}

    def _remembered(self) -> dict[str, Any]:
        """Give what is saved with the settings though no score depends on it."""
        return {"layout": self._layout}

    def _recall(self, saved: Mapping[str, Any]) -> None:
        """Take over what :meth:`_remembered` gave; refuse, by ValueError, what it cannot give."""
        self._layout = _checked_layout(saved.get("layout", {}))

    def _check_points(self) -> None:
        """Refuse, by ValueError, a loaded calibration with scores that cannot be."""
        scores = self.calibration.scores
        if bool((scores < self._scorer.lowest).any() or (scores == -math.inf).any()):
            raise ValueError(f"it has scores below {self._scorer.lowest:g}, where none can be")
        if not self._scorer.takes_infinity and bool(scores.isinf().any()):
            raise ValueError("it has infinite scores, where none can be")
        if not self._takes_nan and bool(scores.isnan().any()):
            raise ValueError("it has scores that are not numbers")

    @property
    def _takes_nan(self) -> bool:
        """Whether NaN may stand for a score that is not known."""
        return False

    # -- settings ---------------------------------------------------------------------------

    def _check_features(self, needs: Needs) -> None:
        for name in (*needs.norms, *needs.values):
            resolve(self.model, name)

    def settings(self) -> dict[str, Any]:
        """Everything, the model apart, that a threshold depends on."""
        return self._settings_of(self._scorer, self.calibration)

    def _settings_of(self, scorer: Scorer, calibration: Calibration) -> dict[str, Any]:
        return {
            "task": self.task,
            **scorer.settings(),
            **calibration.settings(),
            **self._own_settings(),
            **({} if self.output is None else {"output": output_name(self.output)}),
        }

    def _must_match(self, mine: Mapping[str, Any], theirs: Mapping[str, Any], whose: str) -> None:
        keys = dict.fromkeys([*mine, *theirs])
        differing = [key for key in keys if mine.get(key) != theirs.get(key)]
        if differing:
            listed = ", ".join(f"{k}={theirs.get(k)!r} (here {mine.get(k)!r})" for k in differing)
            raise ValueError(
                f"{whose} has other settings, so its scores mean another thing: {listed}"
            )

    def _check_weights(self) -> None:
        """Refuse a model that has other weights than those it was calibrated with."""
        if self._identity is not None and not self._identity.is_that_of(self.model):
            raise RuntimeError(
                "the model's weights are no longer those of the calibration, so bands would not "
                "cover: calibrate again, or load those weights"
            )

    def _snapshot(self: Self) -> Self:
        """Give a predictor that nothing changes any more, with the pieces in use now."""
        with self._lock:
            snapshot = object.__new__(type(self))
            snapshot.__dict__.update(self.__dict__)
            snapshot.__dict__["_modules"] = dict(self._modules)
        return snapshot

    def _must_be_calibrated(self) -> None:
        if not len(self.calibration):
            raise RuntimeError(
                f"this {type(self).__name__} has no calibration: call calibrate(x, y) first, with "
                "points that did not train the model"
            )

    # -- calibrating ------------------------------------------------------------------------

    def calibrate(
        self: Self, x: Any, y: Any = None, *, groups: Any = None, update: bool = False
    ) -> Self:
        """Score held-out points; whatever is predicted later rests on these scores.

        Parameters
        ----------
        x, y
            Inputs and targets, as tensors, arrays, frames or lists of numbers (how they are
            converted is said in :func:`ffcp.network.inputs.to_tensors`); or ``x`` alone, a loader
            that yields pairs ``(x, y)``. The points must not have trained the model. Of a frame
            the columns are remembered: frames that come later are put in this order.

            A DataLoader whose IterableDataset is not divided by worker yields every row once for
            each worker, and points that count several times spoil the guarantee. It is refused
            where the workers' first batches are equal; where each worker shuffles in its own way
            nobody can see it: divide by ``torch.utils.data.get_worker_info()``.
        groups
            A label for each point (strings or numbers), or a function from a batch of inputs to
            labels: every group then gets a threshold of its own, and the guarantee holds
            inside every group (Mondrian calibration). New points need a label too.
        update
            Add to the scores there are instead of replacing them. What was chosen stays.

        Returns
        -------
        self
            Unchanged if anything goes wrong on the way.
        """
        with torch.inference_mode(False):  # the scores outlive the caller's inference_mode
            run = self._run_of(groups, update and len(self.calibration) > 0)
            identity = Identity.of(self.model)
            if run.is_update and self._identity is not None:
                self._must_have(identity.fingerprint, "the scores there are")
            read = inputs.Reader(self.model, self._layout if run.is_update else None)
            run.columns = run.selection.run(self._batches(x, y, groups, read))
            run.layout = read.layout
            run.calibration.add(*self._entries(run.columns))
            if not identity.is_that_of(self.model):
                raise RuntimeError(
                    "the model's weights changed while it was calibrated: calibrate when nothing "
                    "trains it"
                )
        with self._lock:
            self._identity = identity
            self._runs = (*(self._runs if run.is_update else ()), uuid.uuid4().hex)
            self._take_over(run)
        for message in run.warnings:
            self._warn(message)
        return self

    def _run_of(self, groups: Any, update: bool) -> Calibrating:
        scorer, calibration = (self._scorer, self.calibration) if update else self._given
        if groups is not None:
            if update and not calibration.takes_groups:
                raise ValueError(
                    "some points have groups and some have none: calibrate all of them with "
                    "groups=, or none"
                )
            calibration = by_groups(calibration)
        return self._calibrating(scorer, calibration, update)

    def _calibrating(self, scorer: Scorer, calibration: Calibration, update: bool) -> Calibrating:
        return Calibrating(self.model, scorer, calibration, self._choosing, update)

    @property
    def _choosing(self) -> Choosing:
        alpha, seed = self.choose_alpha, self.seed or 0
        return Choosing(self.choose_fraction, alpha, seed, self.alpha_of_each)

    def _must_have(self, fingerprint: str, whose: str) -> None:
        """Refuse scores of another network."""
        mine = None if self._identity is None else self._identity.fingerprint
        if fingerprint != (mine or files.fingerprint(self.model)):
            raise ValueError(
                f"{whose} are those of other weights, and would not cover here: calibrate the "
                "same model"
            )

    def _entries(self, columns: Columns) -> tuple[Tensor, Columns]:
        """Give the scores and notes that the calibration is to keep."""
        return columns["score"], with_prefix("note.", columns)

    def _take_over(self, run: Calibrating) -> None:
        """Take over a calibration that has ended well."""
        self._scorer, self.calibration = run.scorer, run.calibration
        self._layout = run.layout
        if not run.is_update:
            self._choices = {**self._fitted, **run.choices}
            self._set_aside = run.selection.set_aside

    def _batches(
        self, x: Any, y: Any, groups: Any, read: inputs.Reader | None = None, call: str = ""
    ) -> Iterator[Batch]:
        """Cut the data into batches that the model takes at once."""
        labels = _as_labels(groups)
        row = 0
        read = inputs.Reader(self.model, self._layout) if read is None else read
        for whole, target in inputs.pairs(x, y, read, self._read_target, call):
            start = 0
            for batch in self._cut(whole) if len(target) else ():
                count = inputs.row_count(batch)
                part = self._checked_target(target[start : start + count], row)
                yield Batch(batch, part, row, _groups_of(labels, batch, row, count))
                start, row = start + count, row + count
        self._must_have_labels(labels, row)

    def _cut(self, x: Any) -> Iterator[Any]:
        return inputs.batches(x, self.batch_size)

    # -- predicting -------------------------------------------------------------------------

    def _rows(self, x: Any) -> inputs.Rows:
        """Read what is to be predicted: an input, or a loader of inputs."""
        return inputs.Rows(x, inputs.Reader(self.model, self._layout))

    def _seen(self, x: inputs.Rows, groups: Any = None) -> Iterator[Seen]:
        """Run the model on rows to predict, batch by batch."""
        if groups is not None and not self.calibration.takes_groups:
            raise ValueError(
                "this predictor was calibrated without groups: calibrate(x, y, groups=...) gives "
                "every group a threshold of its own"
            )
        labels = _as_labels(groups)
        self._must_have_labels(labels, x.count)
        row = 0
        for whole in x:
            for batch in self._cut(whole):
                count = inputs.row_count(batch)
                yield self._see(batch, row, _groups_of(labels, batch, row, count))
                row += count
        if not row:
            raise ValueError("x has no rows")
        self._must_have_labels(labels, row)

    @staticmethod
    def _must_have_labels(labels: Any, rows: int | None) -> None:
        has_labels = labels is not None and not callable(labels)
        if has_labels and rows is not None and len(labels) != rows:
            raise ValueError(f"groups has {len(labels)} labels, but x has {rows} rows")

    def _targeted(self, x: Any, y: Any) -> Iterator[tuple[Seen, Tensor]]:
        """Run the model on rows whose targets are known, or on a loader of pairs."""
        row = 0
        for batch in self._batches(x, y, None, call="score"):
            seen = self._see(batch.x, batch.row)
            row = seen.rows.stop
            yield seen, batch.y
        if not row:
            raise ValueError("x has no rows")

    def _looked_up(
        self, x: inputs.Rows, alpha: Any, groups: Any, first_row: int | None
    ) -> Iterator[tuple[Seen, Columns, Tensor]]:
        """Give batches with what the calibration notes of them, and their thresholds."""
        draws = Draws(self._stream.entropy(pinned=first_row is not None), _LOOK_UP)
        for seen in self._seen(x, groups):
            notes = self.calibration.note(seen)
            notes["row"] = self._row_numbers(seen, first_row)
            yield seen, notes, self.calibration.threshold(alpha, notes, draws)

    def _row_numbers(self, seen: Seen, first_row: int | None) -> Tensor:
        """Give some rows their numbers in the stream of random numbers, or as they are pinned."""
        rows = len(seen.rows)
        if first_row is None:
            first = self._stream.next_rows(rows)
        elif first_row < 0:
            raise ValueError(f"first_row counts from 0, got {first_row}")
        else:
            first = first_row + seen.rows.start
        return torch.arange(first, first + rows)

    def _see(self, batch: Any, row: int = 0, groups: Any = None) -> Seen:
        """Run the model on one batch."""
        needs = self._scorer.needs().joined(self.calibration.needs())
        return passes.see(self.model, batch, needs, row, groups)

    @staticmethod
    def _warn(message: str) -> None:
        """Warn the user, at the first line that is not the library's own."""
        warnings.warn(message, FFCPWarning, stacklevel=lines_up())

    def _why_infinite(self, alpha: Any, notes: Columns) -> str:
        """Go on behind "the band is infinite": why, and what to do."""
        reason = self.calibration.why_infinite(alpha, notes)
        if self._set_aside:
            what = " and ".join(piece.what_is_open for piece in self._given if piece.is_open)
            reason += f" ({self._set_aside} more rows chose {what}, and so do not calibrate)"
        return reason

    # -- sharing the calibration ------------------------------------------------------------

    def merge(self: Self, other: Predictor) -> Self:
        """Add the scores of another predictor of the same model, calibrated on other points.

        So calibration can be divided over workers and put together here. What is known to be
        here already is refused: the same predictor, a copy of it, or one loaded from its file.
        Where something is chosen automatically, let one worker choose, and give what it found
        to the others.
        """
        if not isinstance(other, Predictor) or other.task != self.task:
            raise TypeError(f"cannot merge a {type(other).__name__}")
        if other is self:
            raise ValueError("a predictor cannot be merged with itself: points would count twice")
        if not len(other.calibration):
            raise ValueError(
                "the predictor to merge has no calibration: call calibrate(x, y) on it first"
            )
        if not len(self.calibration) and other.calibration.takes_groups:
            mine = self._settings_of(self._scorer, by_groups(self.calibration))
        else:
            mine = self.settings()
        self._must_have_chosen(mine, other.settings())
        self._must_match(mine, other.settings(), "the predictor to merge")
        self._check_merge(other)
        self._must_have_columns(other)
        if not set(self._runs).isdisjoint(other._runs):
            raise ValueError(
                "points of the predictor to merge are here already: it is a copy of this one, was "
                "loaded from the same file, or was merged before, and points would count twice"
            )
        assert other._identity is not None
        self._must_have(other._identity.fingerprint, "the scores to merge")
        merged = other.calibration.empty()
        if len(self.calibration):
            merged.keep(self.calibration.points())
        merged.merge(other.calibration)
        with self._lock:
            self.calibration = merged
            self._identity = self._identity or Identity(other._identity.fingerprint)
            self._layout = {**other._layout, **self._layout}
            self._runs += other._runs
            self._merged(other)
        return self

    def _must_have_columns(self, other: Predictor) -> None:
        for key in self._layout.keys() & other._layout.keys():
            mine, theirs = (p._layout[key].get("columns") for p in (self, other))
            if mine and theirs and mine != theirs:
                raise ValueError(
                    f"the predictor to merge was calibrated on a frame with columns {theirs}, this "
                    f"one on {mine}: the model saw other numbers. Give both the same columns in "
                    "the same order"
                )

    def _must_have_chosen(self, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
        """Refuse scores of a worker that chose otherwise, and say what to do."""
        given = self._settings_of(*self._given)
        chosen = {key: mine.get(key) for key, value in given.items() if value is None}
        differing = {k: v for k, v in chosen.items() if v is not None and v != theirs.get(k)}
        if differing:
            listed = ", ".join(f"{k}={theirs.get(k)!r} (here {v!r})" for k, v in differing.items())
            chosen_here = ", ".join(f"{key}={value!r}" for key, value in differing.items())
            raise ValueError(
                f"each worker chose for itself, and the predictor to merge has other settings: "
                f"{listed}. Let one worker choose, and make all others with what it chose: "
                f"{chosen_here}"
            )

    def _check_merge(self, other: Any) -> None:
        """Refuse another predictor whose points cannot stand beside these."""

    def _merged(self, other: Any) -> None:
        """Take over what else belongs to the points of another predictor."""

    def get_extra_state(self) -> Tensor:
        """Pack the settings for ``state_dict``, as a tensor so that any format can hold it.

        They come with a checksum over them and over the points.
        """
        choices = {n: asdict(c) if is_dataclass(c) else c for n, c in self._choices.items()}  # type: ignore[arg-type]
        points = self.calibration.points()
        kept = {
            "choices": choices,
            "set_aside": self._set_aside,
            "fingerprint": None if self._identity is None else self._identity.fingerprint,
            "shapes": {name: list(tensor.shape) for name, tensor in points.items()},
            "runs": list(self._runs),
            **self._remembered(),
        }
        saved = {"settings": self.settings(), "kept": kept, "recipe": recipe_of(self)}
        return files.seal(saved, points)

    def set_extra_state(self, state: Tensor) -> None:
        """Do nothing: loading has taken over all of it at once, points and settings together."""

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *others: Any
    ) -> None:
        own = _own(with_prefix(prefix, state_dict))
        if own:  # otherwise it holds a model alone, and the calibration stays
            with _refused("the calibration in this state_dict"):
                fresh = self._restored(own, strict)
            self._take_all(fresh)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *others)

    def _restored(self: Self, own: Mapping[str, Tensor], strict: bool = True) -> Self:
        """Give this predictor with a calibration that was saved, once every part is checked.

        Nothing here is changed. What was left open here comes from there.
        """
        points = with_prefix("calibration.", own)
        known = ["_extra_state", *prefixed("calibration.", points)]
        strange = [name for name in own if name not in known]
        if strict and strange:
            raise ValueError(f"it does not fit a {type(self).__name__}: {', '.join(strange)}")
        if "_extra_state" not in own:
            raise ValueError("its settings are missing")
        saved = files.unseal(own["_extra_state"], points)
        fresh = self._snapshot()
        fresh._recall_settings(saved["settings"], saved["kept"])
        if saved["kept"]["shapes"] != {name: list(t.shape) for name, t in points.items()}:
            raise ValueError("its points have other shapes than were saved")
        fresh.calibration.check(points)
        fresh.calibration.keep({n: t.detach().to("cpu", copy=True) for n, t in points.items()})
        if bool(len(fresh.calibration)) != (fresh._identity is not None):
            raise ValueError("it has points without the weights they belong to, or the reverse")
        fresh._recall(saved["kept"])
        fresh._check_points()
        return fresh

    def _recall_settings(self, settings: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        """Check that a calibration was made with this predictor's settings; take what is open."""
        scorer, calibration = self._given
        scorer, calibration = scorer.restored(settings), calibration.restored(settings)
        if settings.get("groups"):
            calibration = by_groups(calibration)
        mine = self._settings_of(scorer, calibration)
        self._must_match(mine, settings, "the loaded calibration")
        self._check_features(scorer.needs().joined(calibration.needs()))
        self._scorer, self.calibration = scorer, calibration.empty()
        self._choices = {
            **scorer.choices_from(kept["choices"]),
            **calibration.choices_from(kept["choices"]),
        }
        self._set_aside = files.count(kept["set_aside"])
        self._runs = files.rebuilt(tuple[str, ...], kept["runs"])
        # Compared when bands are asked for: the weights may be loaded after this.
        fingerprint = files.rebuilt(str | None, kept["fingerprint"])
        self._identity = None if fingerprint is None else Identity(fingerprint)

    def _take_all(self, fresh: Predictor) -> None:
        """Take over all that another predictor of this model has, at once."""
        with self._lock:
            modules = self._modules
            modules["calibration"] = fresh.calibration
            self.__dict__.update({**fresh.__dict__, "_modules": modules})

    def save(self, path: str | Path) -> None:
        """Write the calibration, without the model's weights, to a safetensors file.

        The file is written whole or not at all.
        """
        fingerprint = files.fingerprint(self.model)
        if self._identity is not None and self._identity.fingerprint != fingerprint:
            raise RuntimeError(
                "the model's weights are no longer those of the calibration: calibrate again "
                "before saving"
            )
        files.write(path, _own(self.state_dict()))

    def load(self: Self, path: str | Path) -> Self:
        """Read a calibration written by :meth:`save`; nothing is unpickled.

        The model must have the very weights it was calibrated with. Every part of the file is
        checked before any of it is used: where something is wrong,
        :class:`ffcp.CalibrationFileError` says what, and this predictor stays as it is.
        :func:`ffcp.load` makes the predictor, too.
        """
        tensors = files.read(path)
        with _refused(path):
            fresh = self._restored(tensors)
            if fresh._identity is not None and not fresh._identity.is_that_of(self.model):
                raise ValueError(
                    "it was calibrated with other weights than this model has, and would not "
                    "cover: load those weights, or calibrate again"
                )
        self._take_all(fresh)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    def extra_repr(self) -> str:
        """Show the settings, and how many points calibrate."""
        listed = ", ".join(f"{key}={value!r}" for key, value in self.settings().items())
        return f"{listed}, calibrated on {len(self.calibration)} points"


def load(path: str | Path, model: nn.Module, **given: Any) -> Any:
    """Make the predictor that was saved to a file again, with its settings and calibration.

    Parameters
    ----------
    path
        A file that ``predictor.save`` wrote. Nothing in it is unpickled or run.
    model
        The model, with the weights it was calibrated with.
    given
        Arguments of the predictor's class to take in place of those in the file. A function or
        a piece of your own is not in the file, and has to be given here: ``slack=``, ``score=``,
        ``localizer=``, ``calibration=``, ``head=``, whatever it was an argument of.

    Returns
    -------
    Predictor
        Of the class that was saved: an :class:`ffcp.FFCP`, an :class:`ffcp.RAPS`, ...

    Examples
    --------
    >>> import ffcp, tempfile
    >>> model = nn.Linear(3, 1)  # yours is trained
    >>> old = ffcp.FFCP(model, "input", joint=True).calibrate(torch.randn(50, 3), torch.randn(50))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     old.save(f"{folder}/calibration.safetensors")
    ...     new = ffcp.load(f"{folder}/calibration.safetensors", model)
    >>> type(new).__name__, new.feature, new.joint, len(new.calibration)
    ('FFCP', 'input', True, 50)
    """
    tensors = files.read(path)
    with _refused(path):
        points = with_prefix("calibration.", tensors)
        recipe = files.unseal(tensors["_extra_state"], points)["recipe"]
        if recipe is None:
            raise ValueError(
                "it was saved by a class of your own: make the predictor yourself, and call "
                f"its load({str(path)!r})"
            )
        maker = maker_of(recipe)
        if not (isinstance(maker, type) and issubclass(maker, Predictor)):
            raise ValueError(f"{recipe['make']} is no predictor")
        lost = {k: v for k, v in left_to_you(recipe).items() if k not in given}
        if lost:
            listed = ", ".join(f"{name}=... ({what})" for name, what in lost.items())
            raise ValueError(
                f"this {recipe['make']} has parts of your own, which no file holds: give "
                f"ffcp.load(path, model, {listed}), or make the predictor yourself and call its "
                "load(path)"
            )
        predictor = made_again(recipe, model=model, **given)
    return predictor.load(path)


def _own(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give what of a state is not the model's."""
    return {name: tensor for name, tensor in state.items() if not name.startswith("model.")}


@contextmanager
def _refused(what: Any) -> Iterator[None]:
    """Let whatever is wrong with something that was saved be one error that names it."""
    try:
        yield
    except files.CalibrationFileError:
        raise
    except Exception as error:  # foreign data can go wrong in any way
        raise files.CalibrationFileError(
            f"{what} cannot be used: {error}. Nothing was changed; give what was saved by such a "
            "predictor of this model, or calibrate again"
        ) from error


def _checked_layout(layout: Any) -> dict[str, Any]:
    """Refuse, by ValueError, what cannot be said of inputs."""
    if not isinstance(layout, dict) or not all(isinstance(part, dict) for part in layout.values()):
        raise ValueError("what it says of its inputs is damaged")
    for part in layout.values():
        columns = part.get("columns") or []
        if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
            raise ValueError("the columns it names are damaged")
    return layout


def _as_labels(groups: Any) -> Any:
    """Read the labels of all rows; ``None`` and functions stay as they are."""
    if groups is None or callable(groups):
        return groups
    if isinstance(groups, Tensor):
        groups = groups.detach().cpu()
    if not hasattr(groups, "__array__"):
        return list(groups)
    array = np.asarray(groups)
    if array.ndim != 1:
        raise ValueError(f"groups must be one label per row, got shape {array.shape}")
    return array.tolist()


def _groups_of(labels: Any, batch: Any, row: int, count: int) -> Any:
    """Give the groups of some rows: a part of the labels, or what the function says."""
    if labels is None or callable(labels):
        return None if labels is None else labels(batch)
    if len(labels) < row + count:
        raise ValueError(f"groups has {len(labels)} labels, fewer than x has rows")
    return labels[row : row + count]
