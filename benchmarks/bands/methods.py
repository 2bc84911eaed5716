"""The contestants, and how each is measured on one network."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ffcp
from benchmarks.bands import peers, research
from benchmarks.opponent import Opponent
from ffcp import metrics
from ffcp.network import forward
from ffcp.regression.learned.training_rows import MOST_ROWS
from ffcp_paper import runs
from ffcp_paper.datasets import Split
from ffcp_paper.experiments import Study
from ffcp_paper.works import TRAINED, Settings

ALPHA = 0.1
_ROWS = 4096  # at once through network and learner
DATA = ("com", "bike", "bio", "star", "synthetic", "fb1", "blog")
AUTO, AUTO_LENGTH, OPPONENT = "Auto", "Auto, length", "opponent"
CP, FFCP, LCP = "CP", "FFCP", "LCP"
LEARNED = "Learned, training rows, all, central"  # what Learned(model).fit(...) is by itself
BOOSTED = "Learned by boosting"
CHR, CIR = "CHR, same quantiles", "CIR, same quantiles"
_ON = {"all": ("prediction", "norms", "values", "input"), "few": ("prediction", "norms")}
_LAYERS = ("input", "0", "1", "3", "4", "6", "7")  # of the paper's network: all that can be cut
# Of what is computed here. A change makes stored results stale.
_VERSIONS = {"ffcp": 1, OPPONENT: 1, "crepes": 1, "mapie": 1}


@dataclass(frozen=True)
class Case:
    """One data set and seed: the rows as the paper divides them, and its network."""

    data: str
    seed: int

    @property
    def parts(self) -> Split:
        return _loaded(self)[0]

    @property
    def model(self) -> nn.Sequential:
        return _loaded(self)[1]


@lru_cache(maxsize=1)
def _loaded(case: Case) -> tuple[Split, nn.Sequential]:
    study = Study(case.data, Settings())
    (model,) = study.networks(TRAINED, [case.seed])
    assert isinstance(model, nn.Sequential)
    return study.parts(case.seed), model


class Made(NamedTuple):
    """A method that is ready to predict, and what there is to say about it."""

    predict: Callable[[Tensor], Sequence[Any]]
    choice: ffcp.regression.comparison.AutoChoice | None = None


@dataclass(frozen=True)
class Measured:
    """How a method did on the test rows.

    Seconds are those of learning and calibrating, and of predicting; ``busy`` ones count what
    the processor did for this process, whatever else the machine was doing.
    """

    score: float
    length: float
    coverage: float
    worst: float
    calibrated: int
    tested: int
    learn_seconds: float
    learn_busy: float
    predict_seconds: float
    predict_busy: float
    chosen: str | None = None
    trials: dict[str, dict[str, float]] | None = None
    library: str | None = None  # of others, with its version


# -- methods of ffcp -------------------------------------------------------------------------------


def _ready(predictor: Any, case: Case) -> Made:
    predictor.calibrate(case.parts.x_cal, case.parts.y_cal)
    choice = predictor.choice if isinstance(predictor, ffcp.Auto) else None
    return Made(partial(predictor.predict_interval, alpha=ALPHA), choice)


def _cp(case: Case) -> Made:
    return _ready(ffcp.CP(case.model), case)


def _ffcp(case: Case, layer: str = "auto") -> Made:
    return _ready(ffcp.FFCP(case.model, layer, selection_alpha=ALPHA, seed=case.seed), case)


def _lcp(case: Case) -> Made:
    predictor, parts = ffcp.LCP(case.model, seed=case.seed), case.parts
    return _ready(
        predictor.fit_localizer(parts.x_train, parts.y_train, planned=len(parts.y_cal)), case
    )


def _auto(case: Case, criterion: str) -> Made:
    predictor = ffcp.Auto(case.model, criterion, selection_alpha=ALPHA, seed=case.seed)
    return _ready(predictor.fit(case.parts.x_train, case.parts.y_train), case)


def _learned(case: Case, on: str, nested: str) -> Made:
    # The same quantiles serve both families of sets; only a benchmark wants both.
    score = _taught(case, on).shaped(nested)
    return _ready(ffcp.IntervalPredictor(case.model, score=score), case)


@lru_cache(maxsize=1)
def _taught(case: Case, on: str) -> Any:
    predictor = ffcp.Learned(case.model, _ON[on], selection_alpha=ALPHA, seed=case.seed)
    predictor.fit(case.parts.x_train, case.parts.y_train)
    return predictor.calibrate(case.parts.x_cal, case.parts.y_cal).calibrated().score


def _boosted(case: Case) -> Made:
    predictor = ffcp.Learned(case.model, learner="boosting", seed=case.seed)
    return _ready(predictor.fit(case.parts.x_train, case.parts.y_train), case)


def _research(case: Case, by: str) -> Made:
    """Put another family of sets on the quantiles that Learned has learned."""
    family = _taught(case, "all")

    def seen(x: Tensor) -> tuple[Tensor, Tensor]:
        parts = []
        for start in range(0, len(x), _ROWS):
            one = forward.see(case.model, x[start : start + _ROWS], family.requires(), start)
            parts.append((one.output.double().reshape(-1), family.quantiles(one)[:, 0]))
        centre, quantiles = zip(*parts, strict=True)
        return torch.cat(centre), torch.cat(quantiles)

    centre, quantiles = seen(case.parts.x_cal)
    residuals = case.parts.y_cal.double().reshape(-1) - centre
    if by == CHR:
        taught = case.parts.y_train.double().reshape(-1) - seen(case.parts.x_train)[0]
        bands = research.histogram(quantiles, residuals, ALPHA, taught)
    else:
        bands = research.interquantile(quantiles, residuals, ALPHA)

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        centre, quantiles = seen(x)
        low, high = bands(quantiles)
        return centre + low, centre + high

    return Made(predict)


def _learned_aside(case: Case, on: str, nested: str) -> Made:
    return _ready(
        ffcp.Learned(case.model, _ON[on], nested, selection_alpha=ALPHA, seed=case.seed), case
    )


# -- others ----------------------------------------------------------------------------------------


def _opponent(case: Case) -> Made:
    parts = case.parts
    made = Opponent(case.model, ALPHA).fit(parts.x_train, parts.y_train)
    return Made(made.calibrate(parts.x_cal, parts.y_cal).predict)


def _crepes(case: Case, by: str) -> Made:
    return Made(peers.crepes(case.model, case.parts, ALPHA, by))


def _mapie(case: Case, boosted: bool) -> Made:
    from sklearn.ensemble import HistGradientBoostingRegressor

    estimator = HistGradientBoostingRegressor(random_state=0) if boosted else None
    return Made(peers.mapie(case.model, case.parts, ALPHA, estimator, case.seed))


Group = dict[str, Callable[[Case], Made]]


def _learned_on(on: str) -> Group:
    return {
        f"Learned, training rows, {on}, {nested}": partial(_learned, on=on, nested=nested)
        for nested in ("central", "grown")
    }


# What is measured in one go, so that what was learned can serve several.
GROUPS: tuple[Group, ...] = (
    {AUTO: partial(_auto, criterion="score")},
    {OPPONENT: _opponent},
    {AUTO_LENGTH: partial(_auto, criterion="length")},
    {
        CP: _cp,
        FFCP: _ffcp,
        **{f"FFCP at {layer!r}": partial(_ffcp, layer=layer) for layer in _LAYERS},
        LCP: _lcp,
    },
    {**_learned_on("all"), **{by: partial(_research, by=by) for by in (CHR, CIR)}},
    _learned_on("few"),
    {BOOSTED: _boosted},
    {
        f"Learned, rows set aside, {on}, {nested}": partial(_learned_aside, on=on, nested=nested)
        for on in _ON
        for nested in ("central", "grown")
    },
    {f"crepes, {by}": partial(_crepes, by=by) for by in ("targets", "residuals")},
    {
        "MAPIE, linear": partial(_mapie, boosted=False),
        "MAPIE, boosted": partial(_mapie, boosted=True),
    },
)
METHODS = {name: method for group in GROUPS for name, method in group.items()}
CANDIDATES = tuple(
    name for name in METHODS if name in (CP, LCP) or name.startswith(("FFCP at", "Learned,"))
)
PEERS = tuple(name for name in METHODS if name.startswith(("crepes", "MAPIE")))


def library(method: str) -> str:
    """Say whose code a method is."""
    if method in PEERS:
        return method.split(",")[0].lower()
    return OPPONENT if method == OPPONENT else "ffcp"


def missing_peers() -> list[str]:
    """Name the libraries to compare with that are not installed."""
    return [name for name in ("crepes", "mapie") if peers.version(name) is None]


# -- measuring -------------------------------------------------------------------------------------


def key(data: str, seed: int, method: str, label: str) -> dict[str, Any]:
    """Say what a result depends on; ``label`` tells states of ffcp apart."""
    whose = library(method)
    return {
        "version": _VERSIONS[whose],
        "data": data,
        "seed": seed,
        "method": method,
        "alpha": ALPHA,
        **({"label": label} if whose == "ffcp" else {}),
    }


def known(data: str, seed: int, method: str, label: str) -> Measured | None:
    """Look up a result."""
    result = runs.known("band_scores", key(data, seed, method, label))
    return None if result is None else Measured(**result)


def measure(data: str, seed: int, method: str, label: str) -> Measured:
    """Measure a method on one data set and seed, or look it up."""

    def find() -> dict[str, Any]:
        result = _measured(METHODS[method], Case(data, seed))
        return result | {"library": _with_version(method)}

    return Measured(**runs.record("band_scores", key(data, seed, method, label), find))


def _with_version(method: str) -> str | None:
    whose = library(method)
    return f"{method.split(',')[0]} {peers.version(whose)}" if method in PEERS else None


@dataclass(frozen=True)
class Timed:
    """How long Auto took to learn from so many rows and to calibrate."""

    seconds: float
    busy: float
    rows: int


def known_time(data: str, seed: int, label: str, threads: int) -> Timed | None:
    """Look up a time."""
    result = runs.known("band_seconds", {**key(data, seed, AUTO, label), "threads": threads})
    return None if result is None else Timed(**result)


def timed(data: str, seed: int, label: str, threads: int) -> Timed:
    """Time Auto, the shortest of two, or look it up; nothing else should be running."""
    case = Case(data, seed)

    def find() -> dict[str, Any]:
        torch.set_num_threads(threads)
        result = [_measured(METHODS[AUTO], case) for _ in range(2)]
        best = min(result, key=lambda one: one["learn_seconds"])
        rows = min(len(case.parts.y_train), MOST_ROWS)
        return asdict(Timed(best["learn_seconds"], best["learn_busy"], rows))

    saved = {**key(data, seed, AUTO, label), "threads": threads}
    return Timed(**runs.record("band_seconds", saved, find))


def _measured(method: Callable[[Case], Made], case: Case) -> dict[str, Any]:
    parts = case.parts  # loaded before the clock starts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a choice of plain CP, say, is part of the result
        times = [_clock()]
        made = method(case)
        times.append(_clock())
        band = made.predict(parts.x_test)
        times.append(_clock())
    (learn, learn_busy), (predict, predict_busy) = (
        (after[0] - before[0], after[1] - before[1]) for before, after in pairwise(times)
    )
    ends = [torch.as_tensor(end).reshape(-1) for end in band[:2]]
    y = parts.y_test.reshape(-1)
    choice = made.choice
    return asdict(
        Measured(
            metrics.interval_score(ends, y, ALPHA),
            metrics.mean_length(ends),
            float(metrics.coverage(ends, y)),
            float(metrics.group_coverage(ends, y).worst),
            len(parts.y_cal),
            len(y),
            learn,
            learn_busy,
            predict,
            predict_busy,
            None if choice is None else choice.method,
            None if choice is None else {n: asdict(one) for n, one in choice.trials.items()},
        )
    )


def _clock() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
