"""The tasks that the paper's tables consist of, and their results.

:mod:`ffcp_paper.tables.paper_tables` lists the tasks of a table,
:mod:`ffcp_paper.experiments.studies` runs them, and :class:`Results` holds what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ffcp_paper.data import datasets
from ffcp_paper.experiments import prediction_sets
from ffcp_paper.experiments.square_conditions import Square
from ffcp_paper.experiments.timing import error_of_look, rounds_needed
from ffcp_paper.networks.regression import SPLIT_POINTS

#: Where the published code cuts its network for FCP: behind the ReLU of the second hidden layer.
FCP_FEATURE = "4"
#: The split point at which FFCP is timed: the same layer, before its ReLU.
TIMED_SPLIT = 2
AUTO = "auto"
#: The last split point, the output itself, where FFCP is CP.
OUTPUT = len(SPLIT_POINTS) - 1

Report = Callable[[float, str], None]  # the completed share of a task, and a description


@dataclass(frozen=True)
class Settings:
    """Size of a run.

    Parameters
    ----------
    seeds
        Number of seeds: 0, 1, and so on. Each has its own split of the rows and its own network.
    epochs, patience
        Largest number of epochs, and how many to wait for an improvement.
    rows
        Largest number of rows of a data set, drawn at random; all if not given.
    only
        The data sets to use; all of the paper's that are present if not given.
    networks
        The image networks to use; all that are present if not given.
    splits
        Number of random splits of the images into calibration and test.
    rounds
        Largest number of timing rounds, if the ratio of methods is not stable before.
    """

    seeds: int = 5
    epochs: int = 1000
    patience: int = 100
    rows: int | None = None
    only: tuple[str, ...] | None = None
    networks: tuple[str, ...] | None = None
    splits: int = 20
    rounds: int = 25


#: The settings of ``--quick``: every step is run, on too little data to judge the paper.
QUICK = Settings(
    seeds=2,
    epochs=30,
    rows=2000,
    only=("synthetic", "com", "bike"),
    networks=(prediction_sets.DIGITS,),
    splits=2,
    rounds=8,
)


@dataclass(frozen=True)
class Training:
    """How a network is trained: for the mean as in the paper, not at all, or for two quantiles.

    >>> Training("quantiles", (0.1, 0.9)).outputs
    2
    """

    kind: str = "mean"
    levels: tuple[float, float] | None = None

    @property
    def outputs(self) -> int:
        """Number of outputs of the network."""
        return 1 if self.levels is None else 2


TRAINED, UNTRAINED = Training("mean"), Training("none")


@dataclass(frozen=True)
class Method:
    """A method by its name in the paper, and the layer at which FFCP takes the gradient.

    ``"Learned"`` and ``"Auto"`` are ours, not the paper's; both learn from the training rows.
    ``layer`` is a split point from 0 to 4, or ``"auto"``, selected without the test rows.
    """

    name: str
    layer: int | str | None = None


@dataclass(frozen=True)
class Measured:
    """Metrics of a method on the test rows of one seed.

    Parameters
    ----------
    coverage, length
        Coverage and mean band length.
    worst
        Coverage of the worst third of the test rows cut by y.
    calibrated, tested
        Number of calibration scores, and of test rows.
    feature_coverage
        Of FCP and FCQR: the share of test rows whose score is in the ball.
    chosen
        The split point that was selected automatically.
    local
        Whether thresholds are localized, so that coverage follows another law.
    """

    coverage: float
    length: float
    worst: float
    calibrated: int
    tested: int
    feature_coverage: float | None = None
    chosen: int | None = None
    local: bool = False


_SECONDS_PER_ROW = {"Learned": 1e-4, "Auto": 4e-4}  # of the methods that learn


@dataclass(frozen=True)
class RegressionTask:
    """One kind of network on one data set, and what is measured with it."""

    data: str
    training: Training
    methods: tuple[Method, ...] = ()
    alpha: float = 0.1
    timed: tuple[Method, ...] = ()
    squares: tuple[int, ...] = ()  # split points whose square conditions are measured

    def cost(self, settings: Settings, trainings: int = 1) -> float:
        """Return a rough estimate of the seconds it takes, with some trainings before it."""
        rows = min(datasets.known(self.data).rows, settings.rows or math.inf)
        taught = sum(_SECONDS_PER_ROW.get(method.name, 2e-5) for method in self.methods)
        timed = 2e-5 * len(self.timed) * rounds_needed(error_of_look(settings.seeds))
        bands = rows * settings.seeds * (taught + timed)
        each = 0.0 if self.training.kind == "none" else 1e-6 * rows * settings.seeds
        return bands + trainings * each * settings.epochs


@dataclass(frozen=True)
class ClassificationTask:
    """Prediction sets for the images of one network."""

    network: str
    alpha: float = 0.1

    @property
    def cost(self) -> float:
        """Rough estimate of the seconds it takes."""
        return 2.0 if self.network == prediction_sets.DIGITS else 60.0


Task = RegressionTask | ClassificationTask


@dataclass(frozen=True)
class LabelResult:
    """Accuracy of a network, and the results of the methods on each split of its images."""

    title: str
    images: int
    top1: float
    top5: float
    splits: list[list[prediction_sets.Result]]


@dataclass
class Results:
    """All results so far, from which tables are made.

    ``bands`` holds a measurement for each seed, ``seconds`` the times of each method in every
    round for each seed, and ``squares`` the square conditions at a split point for each seed.
    """

    bands: dict[tuple[str, Training, Method, float], list[Measured]] = field(default_factory=dict)
    seconds: dict[tuple[str, Training], list[dict[str, list[float]]]] = field(default_factory=dict)
    squares: dict[tuple[str, int], list[Square]] = field(default_factory=dict)
    labels: dict[str, LabelResult] = field(default_factory=dict)

    def of(
        self, data: str, method: Method, alpha: float = 0.1, training: Training = TRAINED
    ) -> list[Measured]:
        """Return the measurement of each seed; a KeyError if there is none."""
        return self.bands[data, training, method, alpha]

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield every result as plain values, with what identifies it, for each seed or split.

        >>> good = Measured(0.9, 1.5, 0.8, calibrated=100, tested=50)
        >>> result = Results(bands={("com", TRAINED, Method("FFCP", 2), 0.1): [good]})
        >>> [(one["of"]["data"], one["of"]["seed"], one["result"]["length"])
        ...  for one in result.records()]
        [('com', 0, 1.5)]
        """
        for (data, training, method, alpha), measured in self.bands.items():
            about = {"what": "bands", **_network(data, training), "method": method.name,
                     "layer": method.layer, "alpha": alpha}  # fmt: skip
            for seed, one in enumerate(measured):
                yield {"of": {**about, "seed": seed}, "result": asdict(one)}
        for (data, training), timed in self.seconds.items():
            about = {"what": "seconds", **_network(data, training)}
            for seed, seconds in enumerate(timed):
                yield {"of": {**about, "seed": seed}, "result": seconds}
        for (data, split), squares in self.squares.items():
            about = {"what": "square conditions", "data": data, "layer": split}
            for seed, square in enumerate(squares):
                yield {"of": {**about, "seed": seed}, "result": asdict(square)}
        for network, outcome in self.labels.items():
            for split, results in enumerate(outcome.splits):
                about = {"what": "label sets", "network": network, "split": split}
                yield {"of": about, "result": [asdict(result) for result in results]}


def _network(data: str, training: Training) -> dict[str, Any]:
    return {"data": data, "training": training.kind, "levels": training.levels}
