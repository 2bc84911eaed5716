"""Calibrate on a Ray dataset, and predict one: the engine is Ray Data, used as it is."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa
import ray
import torch
from ray.data import ActorPoolStrategy, Dataset
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ffcp.conformal.rank import NOT_OURS, exact_alpha, refuse_unknown, requested_alphas
from ffcp.distributed.parts import State, merged, state_of
from ffcp.network import inputs
from ffcp.network.model import autocast
from ffcp.predictor import Predictor
from ffcp.ray.columns import PATH, WRONG, Names
from ffcp.ray.predicted import predicted_columns
from ffcp.ray.workers import Board, Job, Predicting, Scoring, Worker, calibrated

P = TypeVar("P", bound=Predictor)
_SAMPLE = 16  # rows that are looked at before the work is divided
_SELECTING = 10_000  # first rows on which something is selected
_BATCHES = 8  # of the model, that make one part of a calibration


def calibrate(
    predictor: P,
    dataset: Dataset,
    *,
    x: Any,
    y: str,
    groups: str | None = None,
    weights: str | None = None,
    new: Any = None,
    update: bool = False,
    rank_error: Any = None,
    workers: int | None = None,
    **resources: Any,
) -> P:
    """Calibrate a predictor on the rows of a Ray dataset, as ``predictor.calibrate`` does.

    The model goes to each worker once, and calibrations of some batches come back, which are
    merged here. What is left open (a layer, a bandwidth, what is learned) is selected here, on a
    share of the first 10,000 rows that does not calibrate, while the workers wait. So intervals are
    as valid as those of one machine, but not the same to the last bit.

    Parameters
    ----------
    predictor
        Any predictor of intervals or sets.
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
    if not isinstance(predictor, Predictor):
        raise TypeError(
            f"ffcp.ray.calibrate takes a predictor such as ffcp.CP(model), whose rows are scored "
            f"one by one in any order: a {type(predictor).__name__} is none"
        )
    if autocast(predictor.model):
        raise RuntimeError(
            "Ray's workers run the model without autocast: calibrate outside torch.autocast, or "
            "without Ray"
        )
    names = Names(x, y, groups, weights)
    columns = _must_be_whole(dataset, names.all())
    update = update and len(predictor.calibration) > 0
    base = predictor.settled() if update else predictor.uncalibrated(predictor.seed)
    if new is not None and base.is_settled:
        raise ValueError("nothing is to be learned from new inputs: leave out new=")
    error = None if rank_error is None else exact_alpha(rank_error, "rank_error")
    job = Job(
        base,
        names,
        board=None if base.is_settled else _board(),
        rank_error=None if error is None else error / 2,
        threads=int(resources.get("num_cpus", 1)) or 1,
    )
    dataset = dataset.select_columns([*names.all(), *_paths(columns)])
    size = _BATCHES * _rows_at_once(base, names, _first_rows(dataset))
    found = _mapped(dataset, Scoring, job, size, pool_of(workers, resources))
    with torch.inference_mode(False), _in_order(found):
        before = [state_of(predictor)] if update else []
        whole = merged(predictor, itertools.chain(before, _states(job, found, new)), error)
    predictor.take_over(whole)
    return predictor


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
    """Return the rows of a Ray dataset with their intervals or sets, worked out lazily.

    Parameters
    ----------
    predictor
        A predictor that is calibrated.
    dataset
        The rows.
    x, groups, weights, workers, resources
        As in :func:`calibrate`.
    id
        A column with the numbers of the rows. Rows come back in their order, sorted for it, and
        draw the random numbers of their own (``first_row=0`` on one machine).
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
    asked = [keep] if isinstance(keep, str) else list(keep or [])
    columns = _must_be_whole(dataset, [*names.all(), *asked])
    kept = [c for c in columns if c not in names.inputs()] if keep is None else asked
    kept += [id] if id is not None and id not in kept else []
    sample = _first_rows(dataset.select_columns(names.all()))
    if id is not None and not pa.types.is_integer(sample.schema.field(id).type):
        raise ValueError(f"id={id!r} must hold whole numbers, got {sample.schema.field(id).type}")
    try:  # whatever is wrong with all rows is said now, and not by workers
        new = predicted_columns(predictor, names.read(sample), levels, 0)
    except WRONG as error:
        raise names.located(error, sample) from error
    taken = [name for name in new if name in kept]
    if taken:
        raise ValueError(
            f"the dataset has a column {taken[0]!r} already: rename it, or leave it out by keep="
        )
    threads = int(resources.get("num_cpus", 1)) or 1
    job = Job(predictor, names, alphas=levels, keep=tuple(kept), threads=threads)
    needed = [*dict.fromkeys([*names.all(), *kept, *_paths(columns)])]
    rows = dataset.select_columns(needed)
    rows = rows if id is None else rows.sort(id)
    size = _rows_at_once(predictor, names, sample)
    return _mapped(rows, Predicting, job, size, pool_of(workers, resources))


def _rows_at_once(predictor: Any, names: Names, sample: pa.Table) -> int:
    """Return how many rows are a batch on one machine."""
    model = predictor.model if isinstance(predictor, Predictor) else predictor.models[0]
    read = inputs.Reader(model)(names.read(sample).x)
    size = predictor.rows_at_once(read) if isinstance(predictor, Predictor) else None
    return size or getattr(predictor, "batch_size", None) or inputs.usual_batch(read)


def _states(job: Job, found: Dataset, new: Any) -> Iterator[State]:
    """Yield the calibrations of all batches; what is open is selected first, on some first rows."""
    parts, names = _unpacked(found), job.names
    if job.board is not None:
        first: list[pa.Table] = []
        for table in parts:
            first.append(table)
            if sum(one.num_rows for one in first) >= _SELECTING:
                break
        ray.get(job.board.stop.remote())
        rows = pa.concat_tables(first)
        selected = calibrated(job.predictor, names, rows, job.rank_error, new)
        ray.get(job.board.post.remote(selected))
        yield selected
    for part in parts:
        if isinstance(part, pa.Table):  # it came before workers began to wait
            yield calibrated(job.predictor.settled(), names, part, job.rank_error)
        else:
            yield part


def _unpacked(found: Dataset) -> Iterator[Any]:
    for batch in found.iter_batches(batch_size=None, batch_format="pyarrow"):
        for packed in batch.column("part"):
            part = pickle.loads(packed.as_buffer())
            if isinstance(part, Exception):
                raise part
            yield part


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


def _mapped(
    dataset: Dataset, work: type[Worker], job: Job, size: int, pool: Mapping[str, Any]
) -> Dataset:
    """Hand every batch to a worker."""
    return dataset.map_batches(
        work,
        batch_size=size,
        batch_format="pyarrow",
        # In a list, or Ray would hold a copy only until the first worker is made of it.
        fn_constructor_args=([ray.put(job)],),
        **pool,
    )


def pool_of(workers: int | None, resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return what workers there are to be, as map_batches takes it."""
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        raise ValueError(f"workers must be a whole number of processes, 1 or more: got {workers!r}")
    if workers is None:
        unit = "GPU" if resources.get("num_gpus") else "CPU"
        each = resources.get("num_gpus") or resources.get("num_cpus") or 1
        workers = max(1, int(ray.cluster_resources().get(unit, 1) // each))
    # A model that held a processor could keep it from the tasks that read for it, for good where
    # a node is lost: nothing is reserved.
    return {"compute": ActorPoolStrategy(size=workers), "num_cpus": 0, **resources}


def _must_be_whole(dataset: Dataset, names: Sequence[str]) -> list[str]:
    """Return the columns of a dataset; refuse one that lacks some, or may leave out rows."""
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
    missing = [name for name in names if name not in columns]
    if missing:
        raise ValueError(
            f"the dataset has no column {', '.join(map(repr, missing))}: it has "
            f"{', '.join(map(repr, columns))}"
        )
    return columns


def _paths(columns: Sequence[str]) -> list[str]:
    """Return the column of files, if there is one, to name them when a row is bad."""
    return [PATH] if PATH in columns else []


def _first_rows(dataset: Dataset) -> pa.Table:
    """Return some first rows: what is wrong with all of them, or the model, shows here."""
    batches = dataset.limit(_SAMPLE).iter_batches(batch_size=None, batch_format="pyarrow")
    tables = [table for table in batches if table.num_rows]
    if not tables:
        raise ValueError("the data is empty: there are no rows")
    return pa.concat_tables(tables)
