"""What all predictors share: calibrate, and run the model on rows with their thresholds."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from ffcp.batch import BatchOutput
from ffcp.calibrated import Calibrated, steady
from ffcp.calibration_loop import (
    NO_WEIGHTS,
    Batch,
    Calibrating,
    Choosing,
    Noted,
    Summing,
    as_labels,
    as_weights,
    groups_of,
    must_have_weights,
    weights_of,
)
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import Columns, Table, with_prefix
from ffcp.conformal.coverage_level import ONE_LEVEL
from ffcp.conformal.mondrian import by_groups
from ffcp.conformal.random_numbers import Draws, Stream, checked_seed
from ffcp.conformal.rank import exact_alpha
from ffcp.conformal.selection import Score
from ffcp.locks import WriterLock
from ffcp.network import arrays, checks, forward, inputs
from ffcp.network.model import Identity, Stamp, autocast, fingerprint
from ffcp.network.model_output import Output, picking
from ffcp.persistence import Persistent
from ffcp.warnings import warn

__all__ = ["Predictor", "Running", "known_only", "steady"]

Self = TypeVar("Self", bound="Predictor")
_LOOK_UP = 3  # the stream of random numbers for thresholds


class Running(TypedDict, total=False):
    """What every predictor takes of how it runs; explained in :class:`ffcp.IntervalPredictor`."""

    selection_fraction: float
    selection_alpha: float
    seed: int | None
    batch_size: int | None
    output: Output


def known_only(maker: type, given: Iterable[str], known: type) -> None:
    """Refuse keywords that a predictor does not take; say which it does.

    >>> class Ruler:
    ...     def __init__(self, length, **running): ...
    >>> known_only(Ruler, ["sed"], Running)
    Traceback (most recent call last):
    TypeError: Ruler takes no argument 'sed': there are length, selection_fraction, selection_alpha,
    seed, batch_size, output
    """
    unknown = [name for name in given if name not in known.__annotations__]
    if unknown:
        parameters = list(inspect.signature(maker.__init__).parameters.values())[1:]  # type: ignore[misc]
        own = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
        raise TypeError(
            f"{maker.__name__} takes no argument {', '.join(map(repr, unknown))}: there are "
            f"{', '.join(dict.fromkeys([*own, *known.__annotations__]))}"
        )


class Predictor(Persistent):
    """A model, a scorer and a calibration: calibrate, merge, save and load, once for all tasks.

    The scorer gives points their scores; the calibration keeps them and gives thresholds. Where
    either leaves something open, a share of the rows is set aside to choose it and does not
    calibrate. The model runs in eval mode and is left as it was found.
    """

    def __init__(
        self,
        model: nn.Module,
        scorer: Score,
        calibration: Calibration,
        *,
        selection_fraction: float = 0.2,
        selection_alpha: float = 0.1,
        seed: int | None = None,
        batch_size: int | None = None,
        output: Output = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if not 0 < selection_fraction < 1:
            raise ValueError(
                f"selection_fraction must lie between 0 and 1, got {selection_fraction}"
            )
        checked_seed(seed)
        exact_alpha(selection_alpha)
        checks.refuse_unusable(model)
        self.model, self.output = picking(model, output), output
        self.batch_size = batch_size
        self.selection_fraction, self.selection_alpha, self.seed = (
            selection_fraction,
            selection_alpha,
            seed,
        )
        # As given, with whatever they leave open; in a tuple, so that no module is held twice.
        self._given: tuple[Score, Calibration] = (scorer, calibration)
        self._check_features(scorer.requires().joined(calibration.requires()))
        self._fitted: Mapping[str, Any] = {}  # choices made before calibrating, on other points
        self._state = Calibrated(scorer, calibration.empty())
        self._stream = Stream(seed)
        self._lock = WriterLock()

    # -- what a task defines ----------------------------------------------------------------

    def read_target(self, y: Any) -> Tensor:
        """Turn targets into a tensor."""
        return arrays.target_tensor(y)

    def _checked_target(self, y: Tensor, first_row: int) -> Tensor:
        """Refuse targets that cannot be meant."""
        return y

    def count_fitted(self, batch: Batch) -> int:
        """Count rows from which something was learned before."""
        return 0

    def _refuse_fitted(self, met: int, rows: int) -> None:
        """Refuse a calibration if so many of its rows were learned from."""

    #: Whether what is predicted takes random numbers of rows, whatever the calibration does.
    _scorer_draws = False

    def alpha_of_each(self, alpha: Any, thresholds: int) -> Fraction:
        """Give the share of misses that each of several thresholds allows."""
        return exact_alpha(alpha)

    # -- calibrating ------------------------------------------------------------------------

    def calibrate(
        self: Self,
        x: Any,
        y: Any = None,
        *,
        groups: Any = None,
        weights: Any = None,
        new: Any = None,
        update: bool = False,
        rank_error: Any = None,
    ) -> Self:
        """Score held-out points; whatever is predicted later rests on these scores.

        Parameters
        ----------
        x, y
            Inputs and targets, as tensors, arrays, frames or lists of numbers (how they are
            converted is said in :func:`ffcp.network.inputs.to_tensors`); or ``x`` alone, a loader
            that yields pairs ``(x, y)``. The points must not have trained the model. Of a frame
            the columns are remembered: frames that come later are put in this order. Intervals
            have the shape of ``y``: (n,), (n, 1) or (n, m).

            An IterableDataset must be divided by ``torch.utils.data.get_worker_info()``: rows that
            every worker yields count several times, which spoils the guarantee. That is refused
            where the first batches are equal, and not seen where each worker shuffles by itself.
        groups
            A label for each point (strings or numbers), or a function from a batch of inputs to
            labels: every group then gets a threshold of its own, and the guarantee holds
            inside every group (Mondrian calibration). New points need a label too.
        weights
            A number for each point, for ``ffcp.calibrations.Weighted("given")``: how much likelier
            its input is among new points than among these.
        new
            Inputs without targets like those to come, or a loader of them, for calibrations that
            learn how the data has moved: ``ffcp.calibrations.Weighted("learn")``,
            ``ffcp.calibrations.LabelShift()``.
        update
            Add to the scores there are instead of replacing them. What was chosen stays.
        rank_error
            Keep a summary of the scores, as :meth:`compress` does, and make it on the way: memory
            grows with the logarithm of the rows. 1e-4, say. By default all scores are kept.

        Returns
        -------
        self
            Unchanged if anything goes wrong on the way.
        """
        # The scores outlive the caller's inference_mode.
        with self._lock.turn, torch.inference_mode(False):
            run, read = self.begin_calibration(groups, weights, new, update)
            run.inputs_stay = y is not None
            batches = self.batches(x, y, groups, read, weights=weights)
            return self.finish_calibration(run, read, batches, rank_error)

    def begin_calibration(
        self, groups: Any, weights: Any, new: Any, update: bool
    ) -> tuple[Calibrating, inputs.Reader]:
        """Begin a calibration: refuse what it cannot take before any row is looked at."""
        run = self._run_of(groups, update and len(self.calibration) > 0)
        run.check_arguments(weights, new)
        if run.is_update and self.identity is not None:
            self._must_have(fingerprint(self.model), "the scores there are")
            self.identity.must_be_run_alike(autocast(self.model))
        read = inputs.Reader(self.model, self.layout if run.is_update else None)
        run.with_target_inputs(lambda: self._noted_new(new, run.calibration, read))
        return run, read

    def finish_calibration(
        self: Self,
        run: Calibrating,
        read: inputs.Reader,
        batches: Iterable[Batch | Noted],
        rank_error: Any = None,
    ) -> Self:
        """Go through all batches, and take over what comes of it; nothing if anything is wrong."""
        identity = Identity.of(self.model)
        kept = None if rank_error is None else Summing(run, rank_error, self._entries)
        run.columns = run.selection.run(run.selecting_first(self._all_new(batches)), kept)
        run.layout = read.layout
        if kept is None:
            run.calibration.add(*self._entries(run.columns))
        identity.note_hooks(self.model)
        if not identity.is_that_of(self.model):
            raise RuntimeError(
                "the model's weights changed while it was calibrated: calibrate when nothing "
                "trains it, and let no hook write to tensors that it encloses"
            )
        self._state = self._calibrated_by(run, identity)
        for message in run.warnings:
            warn(message)
        return self

    def _calibrated_by(self, run: Calibrating, identity: Identity) -> Calibrated:
        """Return the state that a calibration ends with."""
        before, name = self._state, secrets.token_hex(16)
        if run.is_update:
            same = before.choices, before.set_aside, (*before.runs, name)
        else:
            same = {**self._fitted, **run.choices}, run.selection.set_aside, (name,)
        counts = self._counts_of(run)
        return Calibrated(run.scorer, run.calibration, identity, run.layout, *same, counts)

    def _counts_of(self, run: Calibrating) -> dict[str, Any]:
        """Return what a task counts besides scores; it may warn by ``run.warnings``."""
        return {}

    def _all_new(self, batches: Iterable[Batch | Noted]) -> Iterator[Batch | Noted]:
        """Count on the way how many rows were given to ``fit``, and at the end refuse many."""
        met = rows = 0
        for batch in batches:
            met += batch.met if isinstance(batch, Noted) else self.count_fitted(batch)
            rows += batch.rows if isinstance(batch, Noted) else batch.y.shape[0]
            yield batch
        self._refuse_fitted(met, rows)

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

    def _calibrating(self, scorer: Score, calibration: Calibration, update: bool) -> Calibrating:
        return Calibrating(self.model, scorer, calibration, self._choosing, update)

    @property
    def _choosing(self) -> Choosing:
        alpha, seed = self.selection_alpha, self.seed or 0
        return Choosing(self.selection_fraction, alpha, seed, self.alpha_of_each)

    def _entries(self, columns: Columns) -> tuple[Tensor, Columns]:
        """Give the scores and notes that the calibration is to keep."""
        return columns["score"], with_prefix("note.", columns)

    def _noted_new(self, new: Any, calibration: Calibration, read: inputs.Reader) -> Columns:
        """Run the model on new inputs, and note what the calibration is to learn from."""
        table, row = Table(), 0
        for whole in inputs.Rows(new, read):
            for batch in self.cut(whole):
                out = forward.see(self.model, batch, calibration.requires(), row)
                table.add(calibration.metadata_of_new(out))
                row = out.rows.stop
        if not len(table):
            raise ValueError("new has no rows")
        return table.columns

    def batches(
        self,
        x: Any,
        y: Any,
        groups: Any,
        read: inputs.Reader | None = None,
        call: str = "",
        weights: Any = None,
        first_row: int = 0,
    ) -> Iterator[Batch]:
        """Cut the data into batches that the model takes at once."""
        labels, weighed = as_labels(groups), as_weights(weights)
        row = 0
        read = inputs.Reader(self.model, self.layout) if read is None else read
        for whole, target in inputs.pairs(x, y, read, self.read_target, call):
            start, rows = 0, target.shape[0]  # not len, which torch asks of Python
            for batch in self.cut(whole) if rows else ():
                count = inputs.row_count(batch)
                part = target if count == rows else target[start : start + count]
                part = self._checked_target(part, first_row + row)
                some, own = groups_of(labels, batch, row, count), weights_of(weighed, row, count)
                yield Batch(batch, part, first_row + row, some, own)
                start, row = start + count, row + count
        self._must_have_labels(labels, row)
        must_have_weights(weighed, row)

    def cut(self, x: Any) -> Iterable[Any]:
        """Yield an input in batches that the model takes at once."""
        return inputs.batches(x, self.rows_at_once(x))

    def rows_at_once(self, x: Any) -> int | None:
        """Say how many rows of an input make a batch, where their size alone does not."""
        return self.batch_size or getattr(self.model, "rows_at_once", None)

    # -- predicting -------------------------------------------------------------------------

    def _rows(self, x: Any) -> inputs.Rows:
        """Read what is to be predicted: an input, or a loader of inputs."""
        return inputs.Rows(x, inputs.Reader(self.model, self.layout))

    def batch_outputs(
        self, x: inputs.Rows, groups: Any = None, weights: Any = None
    ) -> Iterator[BatchOutput]:
        """Run the model on rows to predict, batch by batch."""
        if groups is not None and not self.calibration.takes_groups:
            raise ValueError(
                "this predictor was calibrated without groups: calibrate(x, y, groups=...) gives "
                "every group a threshold of its own"
            )
        if weights is not None and not self.calibration.takes_weights:
            raise ValueError(NO_WEIGHTS)
        labels, weighed = as_labels(groups), as_weights(weights)
        self._must_have_labels(labels, x.count)
        must_have_weights(weighed, x.count)
        row, run = 0, self._pass(self._stamp)
        for whole in x:
            for batch in self.cut(whole):
                own = None
                if labels is not None:
                    own = groups_of(labels, batch, row, inputs.row_count(batch))
                out = run(batch, row, own)
                if weighed is not None:
                    out = out._replace(weights=weights_of(weighed, row, len(out.rows)))
                row = out.rows.stop
                yield out
        if not row:
            raise ValueError("x has no rows")
        self._must_have_labels(labels, row)
        must_have_weights(weighed, row)

    @staticmethod
    def _must_have_labels(labels: Any, rows: int | None) -> None:
        has_labels = labels is not None and not callable(labels)
        if has_labels and rows is not None and len(labels) != rows:
            raise ValueError(f"groups has {len(labels)} labels, but x has {rows} rows")

    def _targeted(self, x: Any, y: Any) -> Iterator[tuple[BatchOutput, Tensor]]:
        """Run the model on rows whose targets are known, or on a loader of pairs."""
        row, run = 0, self._pass(self._stamp)
        for batch in self.batches(x, y, None, call="score"):
            out = run(batch.x, batch.row)
            row = out.rows.stop
            yield out, batch.y
        if not row:
            raise ValueError("x has no rows")

    def _looked_up(
        self,
        x: inputs.Rows,
        look_up: Callable[[Columns, Draws | None], Tensor],
        groups: Any,
        first_row: int | None,
        weights: Any = None,
    ) -> Iterator[tuple[BatchOutput, Columns, Tensor]]:
        """Give batches with what the calibration notes of them, and their thresholds."""
        for out, metadata, draws in self.with_metadata(x, groups, first_row, weights):
            yield out, metadata, look_up(metadata, draws)

    def with_metadata(
        self, x: inputs.Rows, groups: Any, first_row: int | None = None, weights: Any = None
    ) -> Iterator[tuple[BatchOutput, dict[str, Any], Draws | None]]:
        """Give batches with what the calibration notes of them, and random numbers for them."""
        calibration, draws = self.calibration, None
        if calibration.draws or self._scorer_draws:
            draws = Draws(self._stream.entropy(pinned=first_row is not None), _LOOK_UP)
        for out in self.batch_outputs(x, groups, weights):
            metadata = calibration.metadata(out)
            if draws is None:
                self._first_number(out, first_row)
            else:
                metadata["row"] = self._row_numbers(out, first_row)
            yield out, metadata, draws

    def _row_numbers(self, out: BatchOutput, first_row: int | None) -> Tensor:
        """Give some rows their numbers in the stream of random numbers, or as they are pinned."""
        first = self._first_number(out, first_row)
        return torch.arange(first, first + len(out.rows))

    def _first_number(self, out: BatchOutput, first_row: int | None) -> int:
        """Give the number of the first of some rows; where they have none yet, the next ones."""
        if first_row is None:
            return self._stream.next_rows(len(out.rows))
        if first_row < 0:
            raise ValueError(f"first_row counts from 0, got {first_row}")
        return first_row + out.rows.start

    def _pass(self, now: Stamp | None = None) -> forward.ForwardPass:
        """Make the model ready for what scorer and calibration need; see Pass for ``now``."""
        requires = self._scorer.requires().joined(self.calibration.requires())
        return forward.ForwardPass(self.model, requires, now)

    # -- going elsewhere --------------------------------------------------------------------

    @steady
    def export(
        self,
        /,
        path: str | Path,
        example: Any,
        alphas: Sequence[Any] = ONE_LEVEL,
        *,
        confidence_level: Any = None,
        random: float | None = None,
        **unknown: NoReturn,
    ) -> None:
        """Write the model and its calibration to one ONNX file, whole or not at all.

        The file needs neither torch nor ffcp: the gradient is part of its graph. It is run in
        onnxruntime and compared with this predictor before it is kept; docs/deploy.md shows how
        it is used, and what cannot be exported.

        Parameters
        ----------
        path
            Where to write.
        example
            Some inputs, as the model takes them, on which the file is compared with this
            predictor. Some dozens or more: by them it is measured how much another machine may
            round in another way, and bands are widened by that.
        alphas
            Shares of misses allowed. One gives the outputs ``lower`` and ``upper`` (of label sets
            ``mask``), several ``lower_0.1`` and so on.
        confidence_level
            In place of ``alphas``: the coverage asked for, 1 - alpha, or several.
        random
            For randomised label sets. ``None``: the random numbers, one in [0, 1) for each row,
            are an input. A number stands for all of them; 0 makes sets as large as any random
            number would, and of all fixed numbers is the one that keeps the guarantee.
        """
        from ffcp.export import export  # a door, which few go through, and slow to open

        export(self, path, example, alphas, random, confidence_level, unknown)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to be compiled, by ``torch.compile(predictor)`` too: see docs/speed.md."""
        raise RuntimeError(
            f"{type(self).__name__} is not compiled, as that gains next to nothing: give it "
            "torch.compile(model) if the model is large, or export(path, example) the band for a "
            "server. A function that is compiled calls it through "
            "torch.compiler.disable(predictor.forward)"
        )

    def _why_infinite(self, alpha: Any, metadata: Columns) -> str:
        """Go on behind "the band is infinite": why, and what to do."""
        reason = self.calibration.why_infinite(alpha, metadata)
        if self._state.set_aside:
            what = " and ".join(piece.what_is_open for piece in self._given if piece.is_open)
            reason += f" ({self._state.set_aside} more rows chose {what}, and so do not calibrate)"
        return reason
