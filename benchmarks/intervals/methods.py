"""The methods that are compared, and how each is measured on one case."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import ffcp
from benchmarks.intervals import cases, opponents, peers
from benchmarks.intervals.cases import ALPHA, PROBLEMS, Case
from ffcp import metrics
from ffcp.conformal.selection import Aside, Selected
from ffcp.regression import auto
from ffcp.regression.learned.nested import GROWN
from ffcp_paper.data import result_cache as runs

AUTO, AUTO_LENGTH, PROTOTYPE = "Auto", "Auto, length", "prototype"
CP, FFCP, LCP, LEARNED = "CP", "FFCP", "LCP", "Learned"
CQR, BOOSTED = "CQR network", "boosted CQR"
LAPLACE, EPIC = "last-layer Laplace", "EPICSCORE"
# Of the measurements. A change makes stored results stale.
_VERSIONS = {"ffcp": 3, "own": 1, "crepes": 2, "mapie": 2}


class Made(NamedTuple):
    """A calibrated method, and what is reported about it."""

    predict: Callable[[Tensor], Sequence[Any]]
    calibrated: int | None = None  # rows; all of them if not given
    choice: Any = None
    candidates: Callable[[], dict[str, tuple[float, float]]] | None = None


@dataclass(frozen=True)
class Measured:
    """Results of a method on the test rows.

    Seconds are those of learning and calibrating, and of predicting, as the processor counts them
    for this process. ``worst`` is the coverage of the worst third of the targets, ``excess`` the
    excess risk of the target coverage, ``noisiest`` the coverage of the noisiest third of the
    rows where that is known; ``candidates`` interval score and length of all that Auto compared,
    each made for good.
    """

    score: float
    length: float
    coverage: float
    worst: float
    excess: float
    calibrated: int  # rows that calibrate
    tested: int
    learn: float
    predict: float
    noisiest: float | None = None
    chosen: str | None = None
    candidates: dict[str, tuple[float, float]] | None = None
    library: str | None = None  # of others, with its version


# -- methods of ffcp -------------------------------------------------------------------------------


def _ready(predictor: Any, case: Case) -> Made:
    predictor.calibrate(case.parts.x_cal, case.parts.y_cal)
    rows = len(predictor.calibrated().calibration)
    return Made(partial(predictor.predict_interval, alpha=ALPHA), rows)


def _cp(case: Case) -> Made:
    return _ready(ffcp.CP(case.model), case)


def _ffcp(case: Case) -> Made:
    return _ready(ffcp.FFCP(case.model, selection_alpha=ALPHA, seed=case.seed), case)


def _lcp(case: Case) -> Made:
    predictor, parts = ffcp.LCP(case.model, seed=case.seed), case.parts
    return _ready(
        predictor.fit_localizer(parts.x_train, parts.y_train, planned=len(parts.y_cal)), case
    )


def _learned(case: Case) -> Made:
    predictor = ffcp.Learned(case.model, selection_alpha=ALPHA, seed=case.seed)
    return _ready(predictor.fit(case.parts.x_train, case.parts.y_train), case)


class _Memory:
    """The candidates of Auto for a case, and the one to select, if any."""

    case: Case | None = None
    candidates: ClassVar[dict[str, Any]] = {}
    scores: ClassVar[dict[str, Any]] = {}
    taken: str | None = None


_GROWN = ", from the densest part"  # ends the name of other sets from the same quantiles


@dataclass(frozen=True)
class RememberingSelection(auto.MethodSelection):
    """Auto's selection; it stores all candidates, so that each can be measured on test rows."""

    def _candidates(self, *given: Any) -> Any:
        parent: Any = super()
        if not _Memory.candidates:
            _Memory.candidates = dict(parent._candidates(*given))
        return _Memory.candidates.items()

    def select(self, aside: Aside) -> Selected:
        """Select the requested candidate, or the best."""
        name = _Memory.taken
        if name is None:
            return super().select(aside)
        plain = name.removesuffix(_GROWN)
        if plain not in _Memory.scores:
            _Memory.scores[plain] = _Memory.candidates[name].make()
        score = _Memory.scores[plain]
        return Selected(score if plain == name else score.shaped(GROWN), aside.calibration, {})


def _auto(case: Case, criterion: str) -> Made:
    """Make Auto; of both criteria the second finds the candidates that the first has learned."""
    if _Memory.case != case:
        _Memory.case, _Memory.candidates, _Memory.scores = case, {}, {}
    parts = case.parts
    with mock.patch.object(auto, "MethodSelection", RememberingSelection):
        made = ffcp.Auto(case.model, criterion, selection_alpha=ALPHA, seed=case.seed)
    made.fit(parts.x_train, parts.y_train).calibrate(parts.x_cal, parts.y_cal)
    choice, rows = made.choice, len(made.calibrated().calibration)

    def candidates() -> dict[str, tuple[float, float]]:
        found = {}
        for name in _Memory.candidates:
            with mock.patch.object(_Memory, "taken", name):
                made.calibrate(parts.x_cal, parts.y_cal)
            ends = made.predict_interval(parts.x_test, alpha=ALPHA)
            found[name] = _score_and_length(ends, parts.y_test)
        return found

    predict = partial(made.predict_interval, alpha=ALPHA)
    return Made(predict, rows, choice, candidates if criterion == "score" else None)


# -- others ----------------------------------------------------------------------------------------


def _pooled(case: Case) -> Made:
    return Made(opponents.pooled(case.model, case.parts, ALPHA))


def _laplace(case: Case) -> Made:
    return Made(opponents.laplace(case.model, case.parts, ALPHA))


def _epicscore(case: Case) -> Made:
    return Made(opponents.epicscore(case.model, case.parts, ALPHA, case.seed))


def _crepes(case: Case, by: str) -> Made:
    return Made(peers.crepes(case.model, case.parts, ALPHA, by))


def _mapie(case: Case, boosted: bool) -> Made:
    from sklearn.ensemble import HistGradientBoostingRegressor

    estimator = HistGradientBoostingRegressor(random_state=0) if boosted else None
    return Made(peers.mapie(case.model, case.parts, ALPHA, estimator, case.seed))


def _cqr(case: Case) -> Made:
    return _ready(ffcp.CQR(case.quantile_network()), case)


def _boosted_cqr(case: Case) -> Made:
    return Made(peers.boosted_cqr(case.parts, ALPHA))


Group = dict[str, Callable[[Case], Made]]

# Methods measured together: both criteria of Auto share the learned candidates.
GROUPS: tuple[Group, ...] = (
    {AUTO: partial(_auto, criterion="score"), AUTO_LENGTH: partial(_auto, criterion="length")},
    {PROTOTYPE: _pooled},
    {CP: _cp, FFCP: _ffcp, LCP: _lcp},
    {LEARNED: _learned},
    {CQR: _cqr, BOOSTED: _boosted_cqr},
    {f"crepes, {by}": partial(_crepes, by=by) for by in ("targets", "residuals")},
    {
        "MAPIE, linear": partial(_mapie, boosted=False),
        "MAPIE, boosted": partial(_mapie, boosted=True),
    },
    {LAPLACE: _laplace, EPIC: _epicscore},
)
METHODS = {name: method for group in GROUPS for name, method in group.items()}
PEERS = tuple(name for name in METHODS if name.startswith(("crepes", "MAPIE")))
RETRAINED, PUBLISHED = (CQR, BOOSTED), (LAPLACE, EPIC)
ON_PROBLEMS = (AUTO, PROTOTYPE, CP, "crepes, residuals")  # which have networks of their own


def library(method: str) -> str:
    """Return the library of a method: "ffcp", "own" (this benchmark), or another."""
    if method in PEERS:
        return method.split(",")[0].lower()
    return "own" if method in (PROTOTYPE, *RETRAINED, *PUBLISHED) else "ffcp"


def missing_peers() -> list[str]:
    """Return the libraries to compare with that are not installed."""
    return [name for name in ("crepes", "mapie") if peers.version(name) is None]


# -- measuring -------------------------------------------------------------------------------------


def key(case: Case, method: str, label: str) -> dict[str, Any]:
    """Return what a result depends on; ``label`` tells states of ffcp apart."""
    whose = library(method)
    rows = {} if case.data in PROBLEMS else {"rows": cases.SETTINGS.rows}
    return {
        "version": _VERSIONS[whose],
        **asdict(case),
        **rows,
        "method": method,
        "alpha": ALPHA,
        **({"label": label} if whose == "ffcp" else {}),
    }


def known(case: Case, method: str, label: str) -> Measured | None:
    """Look up a result."""
    result = runs.known("interval_scores", key(case, method, label))
    return None if result is None else Measured(**result)


def measure(case: Case, method: str, label: str) -> Measured:
    """Measure a method on one case, or look it up."""

    def find() -> dict[str, Any]:
        return measured(METHODS[method], case) | {"library": _with_version(method)}

    return Measured(**runs.record("interval_scores", key(case, method, label), find))


def _with_version(method: str) -> str | None:
    whose = library(method)
    return f"{method.split(',')[0]} {peers.version(whose)}" if method in PEERS else None


def _score_and_length(ends: Sequence[Any], y: Tensor) -> tuple[float, float]:
    low, high = (torch.as_tensor(end).reshape(-1) for end in ends[:2])
    flat = y.reshape(-1)
    return metrics.interval_score((low, high), flat, ALPHA), metrics.mean_length((low, high))


def measured(method: Callable[[Case], Made], case: Case) -> dict[str, Any]:
    """Calibrate a method on a case and measure its intervals on the test rows."""
    parts, noise = case.parts, cases.loaded(case).noise  # loaded before the clock starts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a choice of plain CP, for example, is part of the result
        times = [time.process_time()]
        made = method(case)
        times.append(time.process_time())
        ends = [torch.as_tensor(end).reshape(-1) for end in made.predict(parts.x_test)[:2]]
        times.append(time.process_time())
        candidates = made.candidates() if made.candidates is not None else None
    learn, predict = (after - before for before, after in pairwise(times))
    y = parts.y_test.reshape(-1)
    noisiest = None
    if noise is not None:
        some = noise >= noise.quantile(2 / 3)
        noisiest = float(metrics.coverage([end[some] for end in ends], y[some]))
    return asdict(
        Measured(
            *_score_and_length(ends, y),
            float(metrics.coverage(ends, y)),
            float(metrics.group_coverage(ends, y).worst),
            float(metrics.excess_risk(ends, y, parts.x_test, ALPHA)),
            made.calibrated or len(parts.y_cal),
            len(y),
            learn,
            predict,
            noisiest,
            None if made.choice is None else made.choice.method,
            candidates,
        )
    )


# -- how long learning takes -----------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """How many seconds Auto takes to learn and calibrate, complete, and from how many rows."""

    seconds: float
    rows: int
    calibrated: int
    columns: int
    threads: int


def time_key(label: str, threads: int) -> dict[str, Any]:
    """Return what a time depends on."""
    return {"version": _VERSIONS["ffcp"], "threads": threads, "label": label}


def timed(label: str, threads: int) -> Timed:
    """Time Auto, the shorter of two runs, or look it up; nothing else should be running."""

    def find() -> dict[str, Any]:
        torch.set_num_threads(threads)
        parts, model, _ = cases.large()
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            made = ffcp.Auto(model, selection_alpha=ALPHA, seed=0)
            made.fit(parts.x_train, parts.y_train).calibrate(parts.x_cal, parts.y_cal)
            seconds.append(time.perf_counter() - start)
        rows, columns = parts.x_train.shape
        return asdict(Timed(min(seconds), rows, len(parts.y_cal), columns, threads))

    return Timed(**runs.record("interval_seconds", time_key(label, threads), find))
