"""The base of all predictors: calibrate, merge, compress, and run the model batch by batch."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from ffcp.arguments import Running
from ffcp.batch import BatchOutput, Requires
from ffcp.calibrated import Calibrated, steady
from ffcp.calibration_loop import (
    NO_WEIGHTS,
    Batch,
    BatchRunner,
    Settings,
    calibrate,
    checked_calibration,
    selections_of,
)
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import Columns
from ffcp.conformal.compressed import compressed
from ffcp.conformal.density_ratio import ShiftChoice
from ffcp.conformal.mondrian import by_groups
from ffcp.conformal.random_numbers import Draws, Stream, checked_seed
from ffcp.conformal.rank import ONE_LEVEL, exact_alpha
from ffcp.conformal.score import Score
from ffcp.conformal.selection import Selection
from ffcp.description import differences
from ffcp.locks import WriterLock
from ffcp.network import arrays, forward, inputs
from ffcp.network.features import resolve
from ffcp.network.hidden_weights import refuse_unusable
from ffcp.network.model import Identity, autocast, fingerprint
from ffcp.network.model_output import Output, picking
from ffcp.persistence import Persistent
from ffcp.progress import progress
from ffcp.warnings import warn

__all__ = ["Predictor", "steady"]
Self = TypeVar("Self", bound="Predictor")
_LOOK_UP = 3  # the stream of random numbers for thresholds


def _no_module(model: Any) -> str:
    """Return the error message for a model that is not a torch.nn.Module."""
    message = f"the model must be a torch.nn.Module, got {type(model).__name__}"
    if isinstance(model, type):
        return f"{message}: {model.__name__!r} is a class, pass a trained instance of it"
    if not hasattr(model, "predict"):
        return message
    return (
        f"{message}: for an estimator of scikit-learn use ffcp.sklearn.ConformalRegressor or "
        "ConformalClassifier, for predictions of any model ffcp.CP(ffcp.Stored())"
    )


class Predictor(Persistent):
    """A model, a score and a calibration: the base of all predictors.

    The score measures how badly targets fit predictions; the calibration keeps the scores of
    held-out rows and returns thresholds. Where either has something to select, a share of the rows
    is set aside for that and does not calibrate. The model runs in eval mode and is not changed.
    """

    def __init__(
        self,
        model: nn.Module,
        score: Score | Selection,
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
            raise TypeError(_no_module(model))
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"'batch_size' must be at least 1, got {batch_size}")
        if not 0 < selection_fraction < 1:
            raise ValueError(
                f"'selection_fraction' must lie between 0 and 1, got {selection_fraction}"
            )
        checked_seed(seed)
        exact_alpha(selection_alpha)
        refuse_unusable(model)
        self.model, self.output = picking(model, output), output
        self.batch_size = batch_size
        self.selection_fraction, self.selection_alpha = selection_fraction, selection_alpha
        self.seed = seed
        self._given = (score, calibration.with_state({}))
        requires = score.requires().joined(calibration.requires())
        for name in (*requires.norms, *requires.values):
            resolve(self.model, name)
        self._fitted: Mapping[str, Any] = {}
        self._state = Calibrated(*self._given)
        self._stream = Stream(seed)
        self._lock = WriterLock()

    # -- what a task defines ----------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments, but for the model."""
        return {
            "calibration": self._given[1],
            **{name: getattr(self, name) for name in Running.__annotations__},
        }

    @property
    def shift_choice(self) -> ShiftChoice | None:
        """How the density ratio was learned, with :class:`ffcp.calibrations.Weighted`."""
        choice: ShiftChoice | None = self._state.report.get("shift")
        return choice

    def read_target(self, y: Any) -> Tensor:
        """Return targets as a tensor."""
        return arrays.target_tensor(y)

    def check_target(self, y: Tensor, first_row: int) -> None:
        """Raise ValueError for impossible targets."""

    def alpha_of_each(self, alpha: Any, thresholds: int) -> Fraction:
        """Return the share of misses that each of several thresholds allows."""
        return exact_alpha(alpha)

    draws = False  # whether predictions depend on random numbers

    def _runner(self, update: bool) -> BatchRunner:
        """Return what runs the model on the batches of a calibration."""
        return BatchRunner(self.model)

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
        """Calibrate on held-out rows.

        Parameters
        ----------
        x : array-like, frame, tuple, dict or loader
            Inputs of rows that have not trained the model, as tensors, arrays, frames or lists of
            numbers (converted by :func:`ffcp.network.inputs.to_tensors`); or a loader that yields
            pairs ``(x, y)``, passed alone. The columns of a frame are kept: later frames are put
            in this order.

            An IterableDataset must be divided by ``torch.utils.data.get_worker_info()``: rows that
            every worker yields count several times, which breaks the guarantee. This is an error
            where the first batches are equal, and not noticed where each worker shuffles.
        y : array-like, default=None
            Targets, unless ``x`` is a loader. Intervals have their shape: (n,), (n, 1) or (n, m).
        groups : array-like, default=None
            A label for each row (strings or numbers), or a function from a batch of inputs to
            labels: every group then has its own threshold, and the guarantee holds within every
            group (Mondrian calibration). New rows need a label too.
        weights : array-like, default=None
            A number for each row, for ``ffcp.calibrations.Weighted("given")``: the density ratio,
            how much likelier its input is among new rows than among these.
        new : array-like, default=None
            Unlabelled inputs of the new distribution, or a loader of them, for calibrations that
            learn a distribution shift: ``ffcp.calibrations.Weighted("learn")``,
            ``ffcp.calibrations.LabelShift()``.
        update : bool, default=False
            Add to the existing scores instead of replacing them. What was selected stays.
        rank_error : float, default=None
            Keep a summary of the scores, as :meth:`compress` does, made batch by batch: memory
            grows with the logarithm of the rows. For example 1e-4. By default all scores are kept.

        Returns
        -------
        self
            Unchanged if an error is raised.
        """
        # The scores outlive the caller's inference_mode.
        with self._lock.turn, torch.inference_mode(False):
            before = self._state
            update = update and len(before.calibration) > 0
            score, calibration = self._given
            if update:
                score, calibration = before.score, before.calibration
                self._must_have(fingerprint(self.model), "the scores", "leave out update=True")
                before.identity.must_be_run_alike(autocast(self.model))  # type: ignore[union-attr]
            calibration = checked_calibration(score, calibration, groups, weights, new, update)
            requires = calibration.requires()._replace(logits=score.requires().logits)
            identity = Identity.of(self.model)
            read = inputs.Reader(self.model, before.layout if update else None)
            settings = Settings(
                self.selection_fraction,
                self.selection_alpha,
                self.seed or 0,
                self.alpha_of_each,
                partial(self._outputs_of, new, requires, read),
            )
            runner = self._runner(update)
            with progress(inputs.expected_rows(x, y), "calibrating", "rows") as step:
                batches = self.batches(x, y, groups, read, weights=weights, step=step)
                result = calibrate(score, calibration, batches, runner, settings, rank_error)
            counts = runner.finish(result)
            if not identity.is_that_of(self.model):
                raise RuntimeError(
                    "the model's weights changed during the calibration: do not train it "
                    "meanwhile, and remove hooks that write to its tensors"
                )
            run = secrets.token_hex(16)
            self._state = Calibrated(
                result.score,
                result.calibration,
                identity,
                read.layout,
                report=before.report if update else {**self._fitted, **result.report},
                set_aside=before.set_aside if update else result.set_aside,
                runs=(*before.runs, run) if update else (run,),
                counts=counts,
            )
            for message in result.warnings:
                warn(message)
        return self

    def _outputs_of(
        self, new: Any, requires: Requires, read: inputs.Reader
    ) -> Iterator[BatchOutput]:
        """Run the model on unlabelled inputs."""
        row = 0
        for batch in inputs.Rows(new, read, self.rows_at_once, "new"):
            yield forward.run_batch(self.model, batch, requires, row)
            row += inputs.row_count(batch)

    def merge(self: Self, other: Predictor) -> Self:
        """Add the scores of another predictor of the same model, calibrated on other rows.

        So several workers can calibrate, each on its rows. Scores that are here already are
        refused: those of the same predictor, of a copy of it, or of one loaded from its file.
        Where something is selected, let one worker select, and give its :meth:`settled` to the
        others.

        Parameters
        ----------
        other : Predictor
            A predictor with the same settings and model, calibrated on other rows.
        """
        if not isinstance(other, Predictor):
            raise TypeError(f"merge takes one predictor, got {type(other).__name__}")
        if other is self:
            raise ValueError("a predictor cannot be merged with itself: rows would count twice")
        with self._lock.turn:
            snapshot = other.snapshot()
            if not len(snapshot.calibration):
                raise ValueError("the predictor to merge has no calibration: calibrate it first")
            state, added = self._state, snapshot.calibrated()
            if not len(state.calibration) and added.calibration.traits.groups:
                state = replace(state, calibration=by_groups(state.calibration))
            expected = self._comparable(state.score, state.calibration)
            listed = ", ".join(differences(expected, snapshot.comparable()))
            if listed:
                advice = ". Let one worker select, and hand its predictor.settled() to all others"
                raise ValueError(
                    f"settings differ, so the scores are not comparable: {listed}"
                    f"{'' if self.is_settled else advice}"
                )
            self._must_have(str(added.fingerprint), "the scores to merge")
            self._state = state.merged(added)
        return self

    def _must_have(
        self, weights: str, whose: str, advice: str = "calibrate the same model"
    ) -> None:
        """Raise ValueError for scores of a model with another fingerprint."""
        if weights != (self._state.fingerprint or fingerprint(self.model)):
            raise ValueError(f"{whose} are those of a model with other weights: {advice}")

    def compress(self: Self, rank_error: Any = 1e-4) -> Self:
        """Keep a summary of the scores in place of all of them.

        Of every group and output at most 1 / rank_error are kept, 80 kB at 1e-4. Thresholds are
        rounded up, so the guarantee holds; ``calibration.rank_error`` bounds by how much.
        Summaries merge with each other and with whole calibrations: errors, in ranks, add up.

        Parameters
        ----------
        rank_error : float, default=0.0001
            By how many ranks a threshold may be too large, as a share of the calibration rows of
            its group.

        Examples
        --------
        >>> import ffcp, torch
        >>> model, x, y = nn.Linear(3, 1), torch.randn(5000, 3), torch.randn(5000)
        >>> predictor = ffcp.CP(model).calibrate(x, y).compress(rank_error=0.01)
        >>> len(predictor.calibration), len(predictor.calibration.scores)
        (5000, 99)
        """
        with self._lock.turn:
            state = self.calibrated()
            self._state = replace(state, calibration=compressed(state.calibration, rank_error))
        return self

    # -- running the model on rows ----------------------------------------------------------

    def batches(
        self,
        x: Any,
        y: Any,
        groups: Any = None,
        read: inputs.Reader | None = None,
        call: str = "",
        weights: Any = None,
        step: Callable[[int], object] | None = None,
    ) -> Iterator[Batch]:
        """Yield the data in batches for the model; ``step`` counts the rows that are done."""
        row, groups_and_weights = 0, None
        if groups is not None or weights is not None:
            groups_and_weights = inputs.GroupsAndWeights(groups, weights)
        read = inputs.Reader(self.model, self._state.layout) if read is None else read
        for whole, whole_target in inputs.pairs(x, y, read, self.read_target, call):
            if not len(whole_target):
                continue
            start = 0
            for batch in inputs.batches(whole, self.rows_at_once(whole)):
                count = inputs.row_count(batch)
                target = whole_target[start : start + count]
                self.check_target(target, row)
                group, weight = None, None
                if groups_and_weights is not None:
                    group, weight = groups_and_weights.of(batch, row, count)
                columns = read.layout.get("x", {}).get("columns")
                yield Batch(batch, target, row, group, weight, columns)
                if step is not None:
                    step(count)
                start, row = start + count, row + count
        if groups_and_weights is not None:
            groups_and_weights.check(row)

    def rows_at_once(self, x: Any) -> int | None:
        """Return the batch size for an input; ``None`` for the default."""
        return self.batch_size or getattr(type(self.model), "rows_at_once", None)

    def rows(self, x: Any) -> inputs.Rows:
        """Read the rows to predict: an input, or a loader of inputs."""
        read = inputs.Reader(self.model, self._state.layout, self._weights)
        return inputs.Rows(x, read, self.rows_at_once)

    def batch_outputs(
        self, x: inputs.Rows, groups: Any = None, first_row: int | None = None, weights: Any = None
    ) -> Iterator[tuple[BatchOutput, dict[str, Any], Draws | None, int]]:
        """Run the model on rows to predict, batch by batch.

        Yields, for every batch, the output, the metadata of its rows, the random numbers of
        thresholds, if they depend on any, and the first row's number in the random stream.
        """
        calibration, row = self._state.calibration, 0
        if groups is not None and not calibration.traits.groups:
            raise ValueError(
                "this predictor was calibrated without groups: calibrate(x, y, groups=...) gives "
                "every group a threshold of its own"
            )
        if weights is not None and not calibration.traits.weights:
            raise ValueError(NO_WEIGHTS)
        draws = None
        if calibration.traits.random:
            draws = Draws(self._stream.entropy(pinned=first_row is not None), _LOOK_UP)
        groups_and_weights = None
        if groups is not None or weights is not None:
            groups_and_weights = inputs.GroupsAndWeights(groups, weights)
            groups_and_weights.check(x.count)
        requires, columns = self._state.requires, self._state.layout.get("x", {}).get("columns")
        for batch in x:
            group, weight = None, None
            if groups_and_weights is not None:
                group, weight = groups_and_weights.of(batch, row, inputs.row_count(batch))
            out = forward.run_batch(
                self.model, batch, requires, row, group, weight, columns, self._weights
            )
            metadata, first = calibration.metadata(out), 0
            if draws is not None or self.draws or first_row is not None:
                first = self.first_number(out, first_row)
            if draws is not None:
                metadata["row"] = torch.arange(first, first + len(out.output))
            yield out, metadata, draws, first
            row += len(out.rows)
        if groups_and_weights is not None:
            groups_and_weights.check(row)

    def targeted(self, x: Any, y: Any) -> Iterator[tuple[BatchOutput, Tensor]]:
        """Run the model on rows whose targets are known, or on a loader of pairs."""
        row, requires = 0, self._state.requires
        for batch in self.batches(x, y, call="score"):
            yield forward.run_batch(self.model, batch.x, requires, row, now=self._weights), batch.y
            row += len(batch.y)
        if not row:
            raise ValueError("x has no rows")

    def first_number(self, out: BatchOutput, first_row: int | None) -> int:
        """Return the number of the first of some rows in the stream of random numbers."""
        if first_row is None:
            return self._stream.next_rows(len(out.output))
        if first_row < 0:
            raise ValueError(f"first_row counts from 0, got {first_row}")
        return first_row + out.rows[0]

    def must_be_settled(self) -> None:
        """Raise RuntimeError if something is still to be selected."""
        score = self._state.score
        selection = score if isinstance(score, Selection) else score.selection()
        if selection is not None:
            raise RuntimeError(
                f"{selection.what} is not selected yet: call calibrate(x, y) first, or give it "
                "when the predictor is made"
            )

    def explain_infinite(self, alpha: Any, metadata: Columns) -> str:
        """Explain why a threshold is infinite, and what to do."""
        reason = self.calibration.explain(alpha, metadata)
        if self._state.set_aside:
            what = " and ".join(selection.what for selection in selections_of(*self._given))
            reason += f" ({self._state.set_aside} more rows selected {what} and do not calibrate)"
        return reason

    # -- exporting --------------------------------------------------------------------------

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
        """Write the model and its calibration to one ONNX file.

        The file needs neither torch nor ffcp: the gradient is part of its graph. It is run in
        onnxruntime and compared with this predictor before it is kept; docs/deploy.md shows how
        it is used, and what cannot be exported.

        Parameters
        ----------
        path : str or Path
            Where to write.
        example : array-like, frame, tuple or dict
            Some inputs, as the model takes them, on which the file is compared with this
            predictor. Some dozens or more: they show how far rounding on another machine may
            differ, and intervals are widened by that.
        alphas : float or sequence of float, default=(0.1,)
            Miscoverage levels. One gives the outputs ``lower`` and ``upper`` (for prediction sets
            ``mask``), several ``lower_0.1`` and so on.
        confidence_level : float or sequence of float, default=None
            In place of ``alphas``: the coverage asked for, 1 - alpha, or several.
        random : float, default=None
            For randomised prediction sets. ``None``: the random numbers, one in [0, 1) for each
            row, are an input. A number replaces all of them; 0 gives the largest sets, and is the
            only fixed number that keeps the guarantee.
        """
        from ffcp.export import export  # slow to import

        export(self, path, example, alphas, random, confidence_level, unknown)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Raise RuntimeError, also for ``torch.compile(predictor)``: see docs/speed.md."""
        raise RuntimeError(
            f"{type(self).__name__} cannot be compiled, which would gain little: give it "
            "torch.compile(model) if the model is large, or export(path, example) for a server. "
            "In a compiled function, call torch.compiler.disable(predictor.forward)"
        )
