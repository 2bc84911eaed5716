"""Training and measurement of all regression methods on one data set, for several seeds.

A :class:`Study` is one data set. It trains the networks of all seeds at once, and measures
methods on the test rows of each. Networks, measurements and run times are cached,
under a hash of what they depend on (:mod:`ffcp_paper.data.result_cache`): a second call computes
only what is missing.
"""

from __future__ import annotations

import copy
import hashlib
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ffcp import CP, CQR, FCP, FCQR, FFCP, FFCQR, FFLCP, LCP, Auto, FFCPWarning, Learned, metrics
from ffcp.calibrations import Local
from ffcp.kernels import Localizer
from ffcp_paper.data import datasets, result_cache
from ffcp_paper.data.datasets import Split
from ffcp_paper.experiments import (
    group_coverage,
    logits,
    prediction_sets,
    square_conditions,
    timing,
)
from ffcp_paper.experiments.square_conditions import Square
from ffcp_paper.experiments.tasks import (
    AUTO,
    FCP_FEATURE,
    ClassificationTask,
    LabelResult,
    Measured,
    Method,
    RegressionTask,
    Report,
    Results,
    Settings,
    Training,
)
from ffcp_paper.ffcp_internals import RegressionPredictor
from ffcp_paper.networks import pretrained
from ffcp_paper.networks.regression import SPLIT_POINTS
from ffcp_paper.training.stacked import pair, search_epochs_stacked, train_stacked

_VERSION = 1  # of what is computed below; a change makes stored networks and results stale
_REPEATS = 5  # of the fast methods, whose first call is slower


def available(data: str) -> bool:
    """Whether all files of a data set are present.

    >>> available("synthetic")
    True
    """
    return not datasets.known(data).missing


class Study:
    """One data set: its rows, networks and measurements, computed when they are needed.

    Parameters
    ----------
    data
        Its name in the paper.
    settings
        How much is computed.
    report
        Called with the completed share of a training and a description.
    planned
        Trainings that will be needed. Those at other quantile levels are done together with the
        first, which takes less time than one after the other.

    Examples
    --------
    >>> tiny = Settings(seeds=1, epochs=1, rows=200)
    >>> study = Study("synthetic", tiny)
    >>> study.parts(0).x_cal.shape
    torch.Size([80, 100])
    """

    def __init__(
        self,
        data: str,
        settings: Settings,
        report: Report = lambda share, text: None,
        planned: Sequence[Training] = (),
    ) -> None:
        self.data, self.settings, self._report = data, settings, report
        self._planned = planned
        self._digests: dict[int, str] = {}
        self._tables: dict[int, datasets.Table] = {}
        self._parts: dict[int, Split] = {}
        self._models: dict[Training, list[nn.Module]] = {}

    def release(self) -> None:
        """Free the memory of rows and networks; they are loaded anew when needed."""
        self._tables.clear()
        self._parts.clear()
        self._models.clear()

    # -- rows -----------------------------------------------------------------------------

    def table(self, seed: int) -> datasets.Table:
        """Return the rows of a seed, at most as many as the settings allow."""
        data = datasets.known(self.data)
        drawn = seed if data.parse is None or data.in_time else 0  # others have one table
        if drawn not in self._tables:
            start = drawn if data.in_time else None
            table = datasets.load(self.data, drawn)
            self._tables[drawn] = _subset(table, self.settings.rows, start)
        return self._tables[drawn]

    def parts(self, seed: int) -> Split:
        """Return the paper's split of the rows for a seed."""
        if seed not in self._parts:
            in_time = datasets.known(self.data).in_time
            self._parts[seed] = datasets.split(self.table(seed), seed, in_time)
        return self._parts[seed]

    def _key(self, seed: int, training: Training) -> dict[str, Any]:
        """Return everything a network depends on, the rows by their hash."""
        if seed not in self._digests:
            self._digests[seed] = _digest(self.table(seed))
        limits = {"epochs": self.settings.epochs, "patience": self.settings.patience}
        return {
            "version": _VERSION,
            "data": self.data,
            "rows": self._digests[seed],
            "seed": seed,
            "training": training.kind,
            "levels": list(training.levels) if training.levels else None,
            **({} if training.kind == "none" else limits),
        }

    # -- networks -------------------------------------------------------------------------

    def models(self, training: Training) -> list[nn.Module]:
        """Return the networks of all seeds; those not in the cache are trained together."""
        if training not in self._models:
            self._models[training] = (
                [self._fresh(seed, training).eval() for seed in range(self.settings.seeds)]
                if training.kind == "none"
                else self._cached_or_trained(training)
            )
        return self._models[training]

    def networks(self, training: Training, seeds: Sequence[int]) -> list[nn.Module]:
        """Return the networks of given seeds; those not in the cache are trained together."""

        def cached(seed: int) -> nn.Module | None:
            fresh = partial(self._fresh, seed, training)
            return result_cache.known_network(self._key(seed, training), fresh)

        if missing := [seed for seed in seeds if cached(seed) is None]:
            self._train([(training, seed) for seed in missing])
        return [model for seed in seeds if (model := cached(seed)) is not None]

    def _fresh(self, seed: int, training: Training) -> nn.Module:
        return pair(self.table(seed).x.shape[1], seed, training.outputs)[0]

    def _cached_or_trained(self, training: Training) -> list[nn.Module]:
        if None in (cached := self._cached(training)):
            same_kind = [other for other in self._planned if other.kind == training.kind]
            self._train(
                [
                    (other, seed)
                    for other in dict.fromkeys((training, *same_kind))
                    for seed, model in enumerate(self._cached(other))
                    if model is None
                ]
            )
            cached = self._cached(training)
        return [model for model in cached if model is not None]

    def _cached(self, training: Training) -> list[nn.Module | None]:
        """Return the cached network of every seed, ``None`` where there is none."""
        return [
            result_cache.known_network(
                self._key(seed, training), partial(self._fresh, seed, training)
            )
            for seed in range(self.settings.seeds)
        ]

    def _train(self, wanted: Sequence[tuple[Training, int]]) -> None:
        """Train networks of one shape together, by the paper's protocol, and cache each.

        5 % of the rows pick the number of epochs, which is cached too, and training starts over
        on all rows for that many.
        """
        total = 2 * self.settings.epochs * len(wanted)  # the search, and the training itself
        done = 0

        def progress() -> None:
            nonlocal done
            done += 1
            self._report(done / total, f"{self.data}: training")

        def arguments(some: Sequence[tuple[Training, int]]) -> dict[str, Any]:
            levels = [training.levels for training, _ in some]
            return {
                "xs": [self.parts(seed).x_train for _, seed in some],
                "ys": [self.parts(seed).y_train for _, seed in some],
                "seeds": [seed for _, seed in some],
                "levels": None if None in levels else levels,
                "progress": progress,
            }

        keys = [self._key(seed, training) for training, seed in wanted]
        known = [result_cache.known("epochs", key) for key in keys]
        unknown = [number for number, best in enumerate(known) if best is None]
        if unknown:
            search_epochs_stacked(
                [self._pair(*wanted[number])[0] for number in unknown],
                epochs=self.settings.epochs,
                patience=self.settings.patience,
                done=lambda at, best: result_cache.keep("epochs", keys[unknown[at]], best),
                **arguments([wanted[number] for number in unknown]),
            )
        train_stacked(
            [self._pair(training, seed)[1] for training, seed in wanted],
            epochs=[int(result_cache.known("epochs", key)) for key in keys],
            done=lambda at, model: result_cache.keep_network(keys[at], model),
            **arguments(wanted),
        )

    def _pair(self, training: Training, seed: int) -> tuple[nn.Module, nn.Module]:
        """Build the networks of the search and of the training."""
        first, second = pair(self.table(seed).x.shape[1], seed, training.outputs)
        return first, second if training.levels is None else copy.deepcopy(first)

    # -- measurements ---------------------------------------------------------------------

    def measure(self, training: Training, method: Method, alpha: float) -> list[Measured]:
        """Calibrate and test a method for every seed, or use the cache."""
        result = []
        for seed in range(self.settings.seeds):
            self._report(0.0, f"{self.data}: {method.name}")
            key = {**self._key(seed, training), **asdict(method), "alpha": alpha}
            if method.name in ("LCP", "FFLCP"):
                key["localizer"] = asdict(_LOCAL)

            def compute(seed: int = seed) -> dict[str, Any]:
                model = self.models(training)[seed]
                return asdict(_measure(method, model, self.parts(seed), alpha, seed))

            result.append(Measured(**result_cache.record("bands", key, compute)))
        return result

    def times(self, training: Training, methods: Sequence[Method]) -> list[dict[str, list[float]]]:
        """Time methods for every seed, from scoring the calibration rows to the test bands.

        All in one process and in turn, so that a slow moment affects all methods, until the ratio
        of the second method, which is slow, to the last is stable.
        """
        result = []
        error = timing.error_of_look(self.settings.seeds)
        for seed in range(self.settings.seeds):
            self._report(0.0, f"{self.data}: timing")
            key = {
                **self._key(seed, training),
                "methods": [asdict(method) for method in methods],
                "rounds": self.settings.rounds,
                "error": error,
                "threads": torch.get_num_threads(),
            }

            def compute(seed: int = seed) -> dict[str, list[float]]:
                one = partial(_times, methods, self.models(training)[seed], self.parts(seed), seed)
                slow, fast = methods[1].name, methods[-1].name
                return timing.repeated(one, slow, fast, error, self.settings.rounds)

            result.append(result_cache.record("rounds", key, compute))
        return result

    def squares(
        self, training: Training, splits: Sequence[int], alpha: float
    ) -> list[list[Square]]:
        """Measure the square conditions for every seed, at some split points."""
        result = []
        for seed in range(self.settings.seeds):
            self._report(0.0, f"{self.data}: square conditions")
            key = {**self._key(seed, training), "splits": list(splits), "alpha": alpha}

            def compute(seed: int = seed) -> list[dict[str, Any]]:
                model, parts = self.models(training)[seed], self.parts(seed)
                rows = (parts.x_cal, parts.y_cal), (parts.x_test, parts.y_test)
                return [
                    asdict(one) for one in square_conditions.measure(model, *rows, alpha, splits)
                ]

            result.append([Square(**one) for one in result_cache.record("squares", key, compute)])
        return result

    def collect(self, task: RegressionTask, into: Results) -> None:
        """Run a task and add its results, except those that ``into`` has already."""
        for method in task.methods:
            place = (task.data, task.training, method, task.alpha)
            if place not in into.bands:
                into.bands[place] = self.measure(task.training, method, task.alpha)
        if task.timed and (task.data, task.training) not in into.seconds:
            into.seconds[task.data, task.training] = self.times(task.training, task.timed)
        if task.squares:
            seeds = self.squares(task.training, task.squares, task.alpha)
            for split, own in zip(task.squares, zip(*seeds, strict=True), strict=True):
                into.squares[task.data, split] = list(own)


_LOCAL = group_coverage.Settings()  # the kernel and guarantee of `ffcp-paper groups`


def _subset(table: datasets.Table, rows: int | None, interval_seed: int | None) -> datasets.Table:
    """Return a fixed random subset of rows; of a time series an interval that depends on a seed."""
    if rows is None or rows >= len(table.y):
        return table
    if interval_seed is None:
        chosen = np.random.default_rng(0).permutation(len(table.y))[:rows]
    else:
        start = int(np.random.default_rng(interval_seed).integers(len(table.y) - rows + 1))
        chosen = np.arange(start, start + rows)
    return datasets.Table(table.x[chosen], table.y[chosen], table.names)


def _digest(table: datasets.Table) -> str:
    digest = hashlib.sha256()
    for values in (table.x, table.y):
        digest.update(f"{values.dtype} {values.shape};".encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()[:16]


# -- one method on one network -----------------------------------------------------------------


def build_predictor(
    method: Method, model: nn.Module, alpha: float = 0.1, seed: int = 0
) -> RegressionPredictor:
    """Build the predictor of a method as the tables use it.

    >>> from ffcp_paper.networks.regression import mlp
    >>> build_predictor(Method("FFCP", 2), mlp(3)).feature
    '3'
    """
    choice: dict[str, Any] = {"selection_alpha": alpha, "seed": seed}
    if method.name in ("CP", "CQR"):
        return {"CP": CP, "CQR": CQR}[method.name](model)
    if method.name in ("FCP", "FCQR"):
        return {"FCP": FCP, "FCQR": FCQR}[method.name](model, FCP_FEATURE, **choice)
    local = Localizer(_LOCAL.kernel, _LOCAL.on)
    if method.name == "LCP":
        return LCP(model, local, guarantee=_LOCAL.guarantee, seed=seed)
    feature: Any = list(SPLIT_POINTS[:-1])
    if method.layer != AUTO:
        feature = SPLIT_POINTS[int(method.layer or 0)]
    if method.name == "FFLCP":
        return FFLCP(model, feature, local, guarantee=_LOCAL.guarantee, seed=seed)
    if method.name == "Learned":
        return Learned(model, **choice)
    if method.name == "Auto":  # by length, which the tables compare
        return Auto(model, "length", **choice)
    kinds = {"FFCP": FFCP, "FFCQR": FFCQR}
    if method.name not in kinds:
        raise ValueError(f"unknown method {method.name!r}")
    return kinds[method.name](model, feature, **choice)


def _measure(method: Method, model: nn.Module, parts: Split, alpha: float, seed: int) -> Measured:
    predictor = build_predictor(method, model, alpha, seed)
    with warnings.catch_warnings():
        # A choice of plain CP, and infinite bands, are part of the result.
        warnings.simplefilter("ignore", FFCPWarning)
        if isinstance(predictor, (LCP, FFLCP)):
            predictor.fit_localizer(parts.x_train, parts.y_train, planned=len(parts.y_cal))
        if isinstance(predictor, (Learned, Auto)):
            predictor.fit(parts.x_train, parts.y_train)
        predictor.calibrate(parts.x_cal, parts.y_cal)
        band = predictor.predict_interval(parts.x_test, alpha)
        in_ball = (
            float(predictor.feature_coverage(parts.x_test, parts.y_test, alpha))
            if isinstance(predictor, FCP)
            else None
        )
    chosen = getattr(predictor, "choice", None) if method.layer == AUTO else None
    return Measured(
        float(metrics.coverage(band, parts.y_test)),
        metrics.mean_length(band),
        float(metrics.group_coverage(band, parts.y_test).worst),
        len(predictor.calibration),
        len(parts.y_test),
        in_ball,
        None if chosen is None else SPLIT_POINTS.index(chosen.feature),
        isinstance(predictor.calibration, Local),
    )


def _times(
    methods: Sequence[Method], model: nn.Module, parts: Split, seed: int
) -> dict[str, float]:
    """Time each method once; fast ones several times, of which the shortest counts."""
    best = dict.fromkeys((method.name for method in methods), float("inf"))
    for method in methods:
        slow = method.name in ("FCP", "FCQR")
        for _ in range(1 if slow else _REPEATS):
            predictor = build_predictor(method, model, seed=seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FFCPWarning)
                start = time.perf_counter()
                predictor.calibrate(parts.x_cal, parts.y_cal)
                predictor.predict_interval(parts.x_test)
                best[method.name] = min(best[method.name], time.perf_counter() - start)
    return best


# -- prediction sets ---------------------------------------------------------------------------


def network_available(name: str) -> bool:
    """Whether an image network and its images are present, or its outputs cached.

    >>> network_available("digits")
    True
    """
    return name == prediction_sets.DIGITS or not logits.missing(pretrained.NETWORKS[name])


def collect_labels(
    task: ClassificationTask,
    settings: Settings,
    into: Results,
    report: Report = lambda share, text: None,
) -> None:
    """Run a task and add its results: RAPS and FFRAPS on the images of one network."""
    if task.network in into.labels:
        return
    saved = result_cache.record(
        "label_sets", _label_key(task, settings), lambda: _labels(task, settings, report)
    )
    splits = [[prediction_sets.Result(**one) for one in split] for split in saved["splits"]]
    into.labels[task.network] = LabelResult(**{**saved, "splits": splits})


def _label_key(task: ClassificationTask, settings: Settings) -> dict[str, Any]:
    """Return the settings of prediction sets; the name of the logits' file hashes the images."""
    digits = task.network == prediction_sets.DIGITS
    answers = task.network if digits else logits.cached_path(logits.named(task.network)).name
    return {"version": _VERSION, "answers": answers, "splits": settings.splits, "alpha": task.alpha}


def _labels(task: ClassificationTask, settings: Settings, report: Report) -> dict[str, Any]:
    text = f"{task.network}: images"
    outcome = prediction_sets.outputs(task.network, lambda done, total: report(done / total, text))
    splits = prediction_sets.run(
        task.network,
        settings.splits,
        task.alpha,
        outcome,
        lambda: report(1.0, f"{task.network}: label sets"),
    )
    result = LabelResult(outcome.title, len(outcome.labels), outcome.top1, outcome.top5, splits)
    return asdict(result)
