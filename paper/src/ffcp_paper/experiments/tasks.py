"""What is to be computed for the paper's tables, and what was found.

:mod:`ffcp_paper.tables.paper_tables` says which pieces of :class:`Work` a table needs,
:mod:`ffcp_paper.experiments.studies` does them, and a :class:`Collected` has what they found.
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

Report = Callable[[float, str], None]  # the share of a piece of work that is done, and what it is


@dataclass(frozen=True)
class Settings:
    """How much is computed.

    Parameters
    ----------
    seeds
        How many: 0, 1, and so on. Each has its own division of the rows and its own network.
    epochs, patience
        The most epochs of a training, and how long it goes on without getting better.
    rows
        The most rows of a data set that are used, drawn at random; all if not given.
    only
        The data sets to use; all of the paper's that are there if not given.
    networks
        The image networks to use; all that are there if not given.
    splits
        How often images are divided into calibration and test.
    rounds
        How often methods are timed at most, if their ratio does not become stable before.
    """

    seeds: int = 5
    epochs: int = 1000
    patience: int = 100
    rows: int | None = None
    only: tuple[str, ...] | None = None
    networks: tuple[str, ...] | None = None
    splits: int = 20
    rounds: int = 25


#: What ``--quick`` runs: enough to go through everything, too little to judge the paper by.
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
    """How a network came about: as the paper trains it, not at all, or for two quantiles.

    >>> Training("quantiles", (0.1, 0.9)).outputs
    2
    """

    kind: str = "mean"
    levels: tuple[float, float] | None = None

    @property
    def outputs(self) -> int:
        """How many numbers the network predicts."""
        return 1 if self.levels is None else 2


TRAINED, UNTRAINED = Training("mean"), Training("none")


@dataclass(frozen=True)
class Method:
    """A method by its name in the paper, and where FFCP and its kin take the gradient.

    ``"Learned"`` and ``"Auto"`` are ours, not the paper's; both are taught by the training rows.
    ``layer`` is a split point from 0 to 4, or ``"auto"``, chosen among them without looking at
    the test rows.
    """

    name: str
    layer: int | str | None = None


@dataclass(frozen=True)
class Measured:
    """How a method did on the test rows of one seed.

    Parameters
    ----------
    coverage, length
        Share of test rows inside their band, and the mean length.
    worst
        Coverage of the worst third of the test rows cut by y.
    calibrated, tested
        How many scores set the threshold, and how many rows were tested.
    feature_coverage
        Of FCP and FCQR: the share of test rows whose score is in the ball.
    chosen
        The split point that the automatic choice took.
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
class Work:
    """A piece of work: one kind of network on one data set, and what is asked about it."""

    data: str
    training: Training
    methods: tuple[Method, ...] = ()
    alpha: float = 0.1
    timed: tuple[Method, ...] = ()
    squares: tuple[int, ...] = ()  # split points whose square conditions are measured

    def cost(self, settings: Settings, trainings: int = 1) -> float:
        """Guess the seconds it takes with a number of trainings before it, for a progress bar."""
        rows = min(datasets.known(self.data).rows, settings.rows or math.inf)
        taught = sum(_SECONDS_PER_ROW.get(method.name, 2e-5) for method in self.methods)
        timed = 2e-5 * len(self.timed) * rounds_needed(error_of_look(settings.seeds))
        bands = rows * settings.seeds * (taught + timed)
        each = 0.0 if self.training.kind == "none" else 1e-6 * rows * settings.seeds
        return bands + trainings * each * settings.epochs


@dataclass(frozen=True)
class LabelWork:
    """A piece of work: label sets for the images of one network."""

    network: str
    alpha: float = 0.1

    @property
    def cost(self) -> float:
        """As in :class:`Work`."""
        return 2.0 if self.network == prediction_sets.DIGITS else 60.0


@dataclass(frozen=True)
class LabelResult:
    """Accuracy of a network, and how the methods did on each division of its images."""

    title: str
    images: int
    top1: float
    top5: float
    splits: list[list[prediction_sets.Result]]


@dataclass
class Collected:
    """Everything found so far, from which tables are made.

    ``bands`` holds a measurement for each seed, ``seconds`` for each seed the times of each
    method, round by round, and ``squares`` for each seed the square conditions at a split point.
    """

    bands: dict[tuple[str, Training, Method, float], list[Measured]] = field(default_factory=dict)
    seconds: dict[tuple[str, Training], list[dict[str, list[float]]]] = field(default_factory=dict)
    squares: dict[tuple[str, int], list[Square]] = field(default_factory=dict)
    labels: dict[str, LabelResult] = field(default_factory=dict)

    def of(
        self, data: str, method: Method, alpha: float = 0.1, training: Training = TRAINED
    ) -> list[Measured]:
        """Give what was measured, one for each seed; an error if it was not."""
        return self.bands[data, training, method, alpha]

    def records(self) -> Iterator[dict[str, Any]]:
        """Give everything as plain values, for each seed or division: whose result, and the result.

        >>> good = Measured(0.9, 1.5, 0.8, calibrated=100, tested=50)
        >>> result = Collected(bands={("com", TRAINED, Method("FFCP", 2), 0.1): [good]})
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
