"""The functions ``calibrate`` and ``predict`` for Ray datasets."""

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
_SAMPLE = 16  # rows that are checked before the work is distributed
_SELECTING = 10_000  # first rows that are used for a selection
_BATCHES = 8  # batches of the model in one part of a calibration


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

    The model is sent to each worker once. Workers return calibrations of some batches, which are
    merged in this process. A selection (of a layer, a bandwidth, a learned model) is made in this
    process, on a share of the first 10,000 rows that is not used for calibration, while the
    workers wait. Intervals are as valid as those of one machine, but not identical to the last bit.

    Parameters
    ----------
    predictor : Predictor
        Any predictor of intervals or sets.
    dataset : Dataset
        Rows that the model was not trained on.
    x : str, list, dict or tuple
        The columns of the input: one that holds a tensor (or number) for each row, a list of
        columns of numbers, which are stacked, or a dict or tuple of these for models with several
        inputs.
    y : str
        The column of the target.
    groups, weights : str, default=None
        The column of the group, and of the weight, as in ``predictor.calibrate``.
    new : array-like or loader, default=None
        As in ``predictor.calibrate``; it stays in this process.
    update : bool, default=False
        As in ``predictor.calibrate``.
    rank_error : float, default=None
        As in ``predictor.calibrate``. With ``rank_error=1e-4`` the scores of any number of rows
        take little memory in this process.
    workers : int, default=None
        Number of processes with a copy of the model: by default the number of processors, or of
        GPUs with ``num_gpus=1``.
    **resources : dict
        Resources of each worker, as in ``map_batches``: ``num_gpus=1``, ``memory=...``. By default
        nothing is reserved, so that reading never waits for a processor held by a model; pass
        ``num_cpus=1`` if other jobs share the cluster.

    Returns
    -------
    predictor
        The calibrated predictor; unchanged if an error is raised.
    """
    if not isinstance(predictor, Predictor):
        raise TypeError(
            f"'predictor' must be a predictor that scores rows independently, like ffcp.CP(model), "
            f"got {type(predictor).__name__!r}"
        )
    if autocast(predictor.model):
        raise RuntimeError(
            "Ray's workers run the model without autocast: calibrate outside torch.autocast, or "
            "without Ray"
        )
    names = Names(x, y, groups, weights)
    columns = _checked_columns(dataset, names.all())
    update = update and len(predictor.calibration) > 0
    base = predictor.settled() if update else predictor.uncalibrated(predictor.seed)
    if new is not None and base.is_settled:
        raise ValueError("'new' is not used: there is no density ratio to learn. Leave it out")
    error = None if rank_error is None else exact_alpha(rank_error, "rank_error")
    job = Job(
        base,
        names,
        board=None if base.is_settled else _board(),
        rank_error=None if error is None else error / 2,
        threads=int(resources.get("num_cpus", 1)) or 1,
    )
    dataset = dataset.select_columns([*dict.fromkeys([*names.all(), *_paths(columns)])])
    size = _BATCHES * _rows_at_once(base, names, _first_rows(dataset))
    scored = _mapped(dataset, Scoring, job, size, pool_of(workers, resources))
    with torch.inference_mode(False), _in_order(scored):
        before = [state_of(predictor)] if update else []
        whole = merged(predictor, itertools.chain(before, _states(job, scored, new)), error)
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
    """Return the rows of a Ray dataset with their intervals or sets, computed lazily.

    Parameters
    ----------
    predictor : Predictor
        A calibrated predictor.
    dataset : Dataset
        The rows to predict.
    x : str, list, dict or tuple
        As in :func:`calibrate`.
    groups, weights : str, default=None
        As in :func:`calibrate`.
    workers : int, default=None
        As in :func:`calibrate`.
    resources : dict
        As in :func:`calibrate`.
    id : str, default=None
        A column of row numbers. Rows are sorted by it, and each has the random numbers of its row
        number (as with ``first_row=0`` on one machine).
    alphas : float or sequence of float, default=None
        Allowed share of misses, or several; 0.1 if neither is given.
    confidence_level : float or sequence of float, default=None
        Instead of ``alphas``: the required coverage, 1 - alpha, or several.
    keep : sequence of str, default=None
        The columns to keep beside the new ones: by default all but those of the input.

    Returns
    -------
    Dataset
        With ``prediction``, ``lower`` and ``upper``; for prediction sets ``prediction``, ``labels``
        (best first, names if the predictor has them) and ``size``; for segmentations
        ``prediction`` and ``mask``, for risk control ``sets`` and ``level``. With several levels
        the columns are ``lower_0.1`` and so on. Outputs of several numbers are tensors.
    """
    if "alpha" in resources:
        raise TypeError("unexpected keyword argument 'alpha': use 'alphas', for one or several")
    refuse_unknown({name: None for name in resources if name in (*NOT_OURS, "pac")})
    levels, _ = requested_alphas(alphas, confidence_level)
    names = Names(x, None, groups, weights, id)
    kept = [keep] if isinstance(keep, str) else list(keep or [])
    columns = _checked_columns(dataset, [*names.all(), *kept])
    if keep is None:
        kept = [column for column in columns if column not in names.inputs()]
    if id is not None and id not in kept:
        kept.append(id)
    sample = _first_rows(dataset.select_columns(names.all()))
    if id is not None and not pa.types.is_integer(sample.schema.field(id).type):
        kind = sample.schema.field(id).type
        raise ValueError(f"'id' column {id!r} must hold integers, got {kind}")
    try:  # errors that concern all rows are raised here, before workers start
        new = predicted_columns(predictor, names.read(sample), levels, 0)
    except WRONG as error:
        raise names.located(error, sample) from error
    taken = [name for name in new if name in kept]
    if taken:
        raise ValueError(
            f"the dataset already has a column {taken[0]!r}: rename it, or leave it out of 'keep'"
        )
    threads = int(resources.get("num_cpus", 1)) or 1
    job = Job(predictor, names, alphas=levels, keep=tuple(kept), threads=threads)
    rows = dataset.select_columns([*dict.fromkeys([*names.all(), *kept, *_paths(columns)])])
    rows = rows if id is None else rows.sort(id)
    size = _rows_at_once(predictor, names, sample)
    return _mapped(rows, Predicting, job, size, pool_of(workers, resources))


def _rows_at_once(predictor: Any, names: Names, sample: pa.Table) -> int:
    """Return the number of rows in a batch on one machine."""
    model = predictor.model if isinstance(predictor, Predictor) else predictor.models[0]
    read = inputs.Reader(model)(names.read(sample).x)
    size = predictor.rows_at_once(read) if isinstance(predictor, Predictor) else None
    return size or getattr(predictor, "batch_size", None) or inputs.usual_batch(read)


def _states(job: Job, scored: Dataset, new: Any) -> Iterator[State]:
    """Yield the calibrations of all batches, after a selection on the first rows if needed."""
    results, names = _unpacked(scored), job.names
    if job.board is not None:
        tables: list[pa.Table] = []
        for table in results:
            tables.append(table)
            if sum(table.num_rows for table in tables) >= _SELECTING:
                break
        ray.get(job.board.stop.remote())
        rows = pa.concat_tables(tables)
        selected = calibrated(job.predictor, names, rows, job.rank_error, new)
        ray.get(job.board.post.remote(selected))
        yield selected
    for result in results:
        if isinstance(result, pa.Table):  # returned before workers started to wait
            yield calibrated(job.predictor.settled(), names, result, job.rank_error)
        else:
            yield result


def _unpacked(scored: Dataset) -> Iterator[Any]:
    """Yield the results of workers: calibrations, or rows for the selection; raise errors."""
    for batch in scored.iter_batches(batch_size=None, batch_format="pyarrow"):
        for packed in batch.column("part"):
            result = pickle.loads(packed.as_buffer())
            if isinstance(result, Exception):
                raise result
            yield result


@contextlib.contextmanager
def _in_order(dataset: Dataset) -> Iterator[None]:
    """Preserve the order of a dataset's rows, which determines the rows set aside."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        yield
    finally:
        options.preserve_order = before


def _board() -> Any:
    """Start the actor that publishes the selection, on this node."""
    here = ray.get_runtime_context().get_node_id()  # if this node fails, the job fails anyway
    strategy = NodeAffinitySchedulingStrategy(node_id=here, soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=strategy)(Board).remote()


def _mapped(
    dataset: Dataset, work: type[Worker], job: Job, size: int, pool: Mapping[str, Any]
) -> Dataset:
    """Return the dataset mapped batch by batch by a pool of workers."""
    return dataset.map_batches(
        work,
        batch_size=size,
        batch_format="pyarrow",
        # In a list, or Ray would release the object after the first worker has started.
        fn_constructor_args=([ray.put(job)],),
        **pool,
    )


def pool_of(workers: int | None, resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pool of workers, as arguments of map_batches."""
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        raise ValueError(f"'workers' must be an integer >= 1, got {workers!r}")
    if workers is None:
        unit = "GPU" if resources.get("num_gpus") else "CPU"
        units = resources.get("num_gpus") or resources.get("num_cpus") or 1  # of one worker
        workers = max(1, int(ray.cluster_resources().get(unit, 1) // units))
    # A model that reserved a processor could block the tasks that read its input, forever if a
    # node is lost: so nothing is reserved.
    return {"compute": ActorPoolStrategy(size=workers), "num_cpus": 0, **resources}


def _checked_columns(dataset: Dataset, names: Sequence[str]) -> list[str]:
    """Return the columns of a dataset; raise if some are missing, or rows may be dropped."""
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"'dataset' must be a ray.data.Dataset, got {type(dataset).__name__}: read it with "
            "ray.data.read_parquet(...), or make it with ray.data.from_numpy(...)"
        )
    if dataset.context.max_errored_blocks != 0:
        raise ValueError(
            "'max_errored_blocks' must be 0, so that Ray drops no rows, got "
            f"{dataset.context.max_errored_blocks}"
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
    """Return the column of file names, if there is one, for error messages."""
    return [PATH] if PATH in columns else []


def _first_rows(dataset: Dataset) -> pa.Table:
    """Return a few first rows, to check data and model before the work is distributed."""
    batches = dataset.limit(_SAMPLE).iter_batches(batch_size=None, batch_format="pyarrow")
    tables = [table for table in batches if table.num_rows]
    if not tables:
        raise ValueError("'dataset' is empty: expected at least one row")
    return pa.concat_tables(tables)
