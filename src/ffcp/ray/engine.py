"""Calibrate on a Ray dataset, and predict one: the engine is Ray Data, used as it is."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa
import ray
import torch
from ray.data import ActorPoolStrategy, Dataset
from ray.data.expressions import col
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ffcp.calibration_loop import Batch, Calibrating, Noted
from ffcp.conformal.coverage_level import NOT_OURS, refuse_unknown, requested_alphas
from ffcp.network import inputs
from ffcp.network.model import autocast
from ffcp.predictor import Predictor
from ffcp.ray.columns import PATH, Names
from ffcp.ray.files import WRONG, counted_from, located
from ffcp.ray.predicted import Predicted, predicted_columns
from ffcp.ray.workers import CUT, Board, Job, Noting, Predicting, Worker, with_cut
from ffcp.regression.cross_conformal import CrossConformal

P = TypeVar("P", bound=Predictor)
Result = TypeVar("Result")
_SAMPLE = 16  # rows that are looked at before the work is divided
_TRIED = 1024  # rows at a time of a file that holds a bad row


def calibrate(
    predictor: P,
    dataset: Dataset,
    *,
    x: Any,
    y: str,
    groups: str | None = None,
    weights: str | None = None,
    id: str | None = None,
    new: Any = None,
    update: bool = False,
    rank_error: Any = None,
    workers: int | None = None,
    **resources: Any,
) -> P:
    """Calibrate a predictor on the rows of a Ray dataset, as ``predictor.calibrate`` does.

    The model goes to each worker once, batches have the size that they have on one machine, and
    scores come back. Only while something is to be chosen, what the choice looks at of the first
    rows comes back too; these are at most some 50,000.

    Parameters
    ----------
    predictor
        Any predictor of bands or sets.
    dataset
        Rows that did not train the model.
    x
        The columns of the input: one that holds a tensor (or number) for each row, a list of
        columns of numbers, to be put side by side, or a dict or tuple of such for models with
        several inputs.
    y
        The column of the target.
    groups, weights
        The column of the group, and of the weight, as in ``predictor.calibrate``.
    id
        A column with the numbers of the rows, 0, 1, 2 and so on, in any order. Batches are then
        cut at the same places as on one machine, and the result is the same to the last bit: the
        rows are sorted for it, which moves them once. Without it the result is the same within
        the rounding of the model, except for methods that draw random numbers of rows, which
        are drawn anew.
    new, update, rank_error
        As in ``predictor.calibrate``; ``new`` is held here, not by the workers. With
        ``rank_error=1e-4`` the scores of any number of rows take little memory here.
    workers
        How many processes hold the model: by default as many as there are processors, or GPUs
        for ``num_gpus=1``.
    **resources
        What each worker needs, as ``map_batches`` takes it: ``num_gpus=1``, ``memory=...``. By
        default nothing is reserved, so that reading never waits for a processor that a model
        holds; give ``num_cpus=1`` where other jobs share the cluster.

    Returns
    -------
    predictor
        Unchanged if anything goes wrong on the way.
    """
    _must_be_divisible(predictor)
    if autocast(predictor.model):
        raise RuntimeError(
            "Ray's workers run the model without autocast: calibrate outside torch.autocast, or "
            "without Ray"
        )
    names = Names(x, y, groups, weights, id)
    columns = _must_be_whole(dataset, names)
    dataset = dataset.select_columns([*names.all(), *_paths(columns)])
    with torch.inference_mode(False):
        run, read = predictor.begin_calibration(groups, weights, new, update)

        def first_of(rows: pa.Table, row: int) -> Batch:
            with_cut(rows, id)
            given = names.read(rows, row)
            return next(predictor.batches(given.x, given.y, given.groups, read, first_row=row))

        first = _tried(first_of, dataset, names, "calibration ")
        run.prepare(first.x)
        job = Job(
            _without_points(predictor),
            names,
            read.layout,
            predictor.rows_at_once(first.x) or inputs.usual_batch(first.x),
            threads=int(resources.get("num_cpus", 1)) or 1,
        )
        pool = pool_of(workers, resources)
        noted = _by_number if id is not None else _as_they_come
        return predictor.finish_calibration(run, read, noted(run, dataset, job, pool), rank_error)


def predict(
    predictor: Any,
    dataset: Dataset,
    *,
    x: Any,
    alphas: Any = None,
    confidence_level: Any = None,
    groups: str | None = None,
    weights: str | None = None,
    id: str | None = None,
    keep: Sequence[str] | None = None,
    workers: int | None = None,
    **resources: Any,
) -> Dataset:
    """Give the rows of a Ray dataset their bands or sets, in a dataset that is worked out lazily.

    Parameters
    ----------
    predictor
        A predictor that is calibrated.
    dataset
        The rows.
    x, groups, weights, id, workers, resources
        As in :func:`calibrate`. With ``id`` rows come back in the order of their numbers, and
        random numbers are those of the row (``first_row=0`` on one machine).
    alphas
        The share of misses allowed, or several; 0.1 if nothing is given.
    confidence_level
        In place of ``alphas``: the coverage asked for, 1 - alpha, or several.
    keep
        The columns to keep beside what is new: by default all that are not of the input.

    Returns
    -------
    Dataset
        With ``prediction``, ``lower`` and ``upper``; of label sets ``prediction``, ``labels``
        (best first, names where the predictor has them) and ``size``; of segmentations
        ``prediction`` and ``mask``, of risk control ``sets`` and ``level``. Of several levels the
        columns are called ``lower_0.1`` and so on. Outputs of several numbers are tensors.
    """
    if "alpha" in resources:
        raise TypeError("unexpected keyword argument 'alpha': give alphas, one or several")
    refuse_unknown({name: None for name in resources if name in (*NOT_OURS, "pac")})
    levels, _ = requested_alphas(alphas, confidence_level)
    names = Names(x, None, groups, weights, id)
    columns = _must_be_whole(dataset, names)
    if isinstance(keep, str):
        keep = [keep]
    kept = [c for c in columns if c not in names.inputs()] if keep is None else list(keep)
    missing = [name for name in kept if name not in columns]
    if missing:
        raise ValueError(f"keep: the dataset has no column {', '.join(map(repr, missing))}")
    kept += [id] if id is not None and id not in kept else []

    def first_of(rows: pa.Table, row: int) -> tuple[Predicted, int]:
        with_cut(rows, id)
        given = names.read(rows, row)
        try:  # whatever is wrong with all rows is said now, and not by workers
            columns = predicted_columns(predictor, given, levels, 0)
            return columns, _rows_at_once(predictor, given.x)
        except WRONG as error:
            raise counted_from(row, error) from error

    new, size = _tried(first_of, dataset, names)
    taken = [name for name in new if name in kept]
    if taken:
        raise ValueError(
            f"the dataset has a column {taken[0]!r} already: rename it, or leave it out by keep="
        )
    job = Job(
        predictor,
        names,
        {},
        size,
        alphas=levels,
        keep=tuple(kept),
        threads=int(resources.get("num_cpus", 1)) or 1,
    )
    needed = [*dict.fromkeys([*names.all(), *kept, *_paths(columns)])]
    return _divided(dataset.select_columns(needed), Predicting, job, pool_of(workers, resources))


def _rows_at_once(predictor: Any, x: Any) -> int:
    """Say how many rows are a batch on one machine."""
    model = predictor.model if isinstance(predictor, Predictor) else predictor.models[0]
    read = inputs.Reader(model)(x)
    size = predictor.rows_at_once(read) if isinstance(predictor, Predictor) else None
    return size or getattr(predictor, "batch_size", None) or inputs.usual_batch(read)


# -- calibrating ----------------------------------------------------------------------------


def _as_they_come(
    run: Calibrating, dataset: Dataset, job: Job, pool: Mapping[str, Any]
) -> Iterator[Noted]:
    """Note the rows in the order of the dataset, in one go.

    Workers note all that a choice may need until it is made, here, and read it from a board.
    """
    board = _board() if run.is_open else None
    row = 0
    for noted in _noted(dataset, job, run, pool, board):
        yield noted._replace(row=row)
        row += noted.rows
        if board is not None and not run.is_open:
            ray.get(board.post.remote(run.for_worker()))
            board = None


def _by_number(
    run: Calibrating, dataset: Dataset, job: Job, pool: Mapping[str, Any]
) -> Iterator[Noted]:
    """Note the rows in the order of their numbers; where something is open, first those that wait.

    They are as many whole batches as wait on one machine, and the others are scored when the
    choice is made. Every number must come once.
    """
    name, division = job.names.id, run.selection.division
    parts = [dataset]
    if division is not None:
        end = -(-division.end // job.size) * job.size
        parts = [dataset.filter(expr=col(name) < end), dataset.filter(expr=col(name) >= end)]
    row = 0
    for part in parts:
        early: dict[int, Noted] = {}
        for noted in _noted(part, job, run, pool):
            if noted.row < row or noted.row in early:
                raise ValueError(f"id={name!r} has the number {noted.row} twice")
            early[noted.row] = noted
            while row in early:
                yield early[row]
                row += early.pop(row).rows
        if early:
            raise ValueError(
                f"id={name!r} must hold the number of each row, 0, 1, 2 and so on: {row} is "
                f"missing, and {min(early)} is there"
            )


def _without_points(predictor: P) -> P:
    """Give the same predictor for workers that score points, without those it has."""
    sent = predictor.snapshot()
    sent.__dict__["_modules"]["calibration"] = empty = sent.calibration.empty()
    sent.__dict__["calibration"] = empty
    return sent


def _noted(
    dataset: Dataset, job: Job, run: Calibrating, pool: Mapping[str, Any], board: Any = None
) -> Iterator[Noted]:
    job = replace(job, run=run.for_worker(), board=board)
    result = _divided(dataset, Noting, job, pool)
    with _in_order(result):
        for batch in result.iter_batches(batch_size=None, batch_format="pyarrow"):
            for packed in batch.column("noted"):
                noted = pickle.loads(packed.as_buffer())
                if isinstance(noted, Exception):
                    raise noted
                yield noted


@contextlib.contextmanager
def _in_order(dataset: Dataset) -> Iterator[None]:
    """Let the rows of a dataset come in their order: it says which of them are set aside."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        yield
    finally:
        options.preserve_order = before


def _board() -> Any:
    here = ray.get_runtime_context().get_node_id()  # without this node nothing goes on anyway
    place = NodeAffinitySchedulingStrategy(node_id=here, soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=place)(Board).remote()


# -- dividing -------------------------------------------------------------------------------


def _divided(dataset: Dataset, work: type[Worker], job: Job, pool: Mapping[str, Any]) -> Dataset:
    """Give every batch to a worker; with numbers of rows, batches cut where one machine does."""
    size: int | None = job.size
    if job.names.id is not None:
        cut = {"name": job.names.id, "size": job.size}
        dataset = dataset.map_batches(with_cut, batch_format="pyarrow", fn_kwargs=cut).sort(CUT)
        size = None  # whole blocks: equal numbers of batches are never in two of them
    return dataset.map_batches(
        work,
        batch_size=size,
        batch_format="pyarrow",
        # In a list, or Ray would hold a copy only until the first worker is made of it.
        fn_constructor_args=([ray.put(job)],),
        **pool,
    )


def pool_of(workers: int | None, resources: Mapping[str, Any]) -> dict[str, Any]:
    """Say what workers there are to be."""
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        raise ValueError(f"workers must be a whole number of processes, 1 or more: got {workers!r}")
    if workers is None:
        unit = "GPU" if resources.get("num_gpus") else "CPU"
        each = resources.get("num_gpus") or resources.get("num_cpus") or 1
        workers = max(1, int(ray.cluster_resources().get(unit, 1) // each))
    # A model that held a processor could keep it from the tasks that read for it, for good where
    # a node is lost: nothing is reserved.
    return {"compute": ActorPoolStrategy(size=workers), "num_cpus": 0, **resources}


def _must_be_divisible(predictor: Any) -> None:
    """Refuse, at once, what cannot be calibrated in parts."""
    if isinstance(predictor, CrossConformal):
        raise TypeError(
            "CrossConformal takes the rows that trained its networks, each to the network of its "
            "fold, "
            "in the order of folds=: calibrate(x, y) on one machine, then ffcp.ray.predict"
        )
    if not isinstance(predictor, Predictor):
        raise TypeError(
            f"ffcp.ray.calibrate takes a predictor such as ffcp.CP(model), whose rows are scored "
            f"one by one in any order: a {type(predictor).__name__} is none"
        )


def _must_be_whole(dataset: Dataset, names: Names) -> list[str]:
    """Refuse a dataset that lacks a column, or may leave out rows; give its columns."""
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"dataset must be a ray.data.Dataset, got {type(dataset).__name__}: read it with "
            "ray.data.read_parquet(...), or make it with ray.data.from_numpy(...)"
        )
    if dataset.context.max_errored_blocks != 0:
        raise ValueError(
            "max_errored_blocks lets Ray leave out rows that fail, and no row may be lost: set it "
            "to 0"
        )
    columns = list(dataset.columns() or [])
    names.must_be_in(columns)
    return columns


def _paths(columns: Sequence[str]) -> list[str]:
    """Keep the names of files, to speak of them when a row is bad."""
    return [PATH] if PATH in columns else []


def _tried(
    work: Callable[[pa.Table, int], Result], dataset: Dataset, names: Names, what: str = ""
) -> Result:
    """Work on some first rows here: what is wrong with all rows, or the model, shows at once."""
    columns = dataset.columns()
    if not columns:  # all rows were filtered out
        raise ValueError(f"the {what}data is empty: there are no rows")
    some = dataset.select_columns([*names.all(), *_paths(columns)]).limit(_SAMPLE)
    tables = [t for t in some.iter_batches(batch_size=None, batch_format="pyarrow") if t.num_rows]
    if not tables:
        raise ValueError(f"the {what}data is empty: there are no rows")
    rows = pa.concat_tables(tables)
    try:
        return work(rows, 0)
    except WRONG as error:
        raise located(error, rows, names, _TRIED, work) from error
