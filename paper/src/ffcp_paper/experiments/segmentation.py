"""Bands for every pixel and class of segmented images, and where they are wide.

The network predicts log(-log p) for every pixel and class. CP, FCP and FFCP put a band around each,
and the map of band lengths shows where the network is unsure. Prediction sets of
:class:`ffcp.segmentation.PixelSets` are measured too.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ffcp import CP, FCP, FFCP, FFCPWarning, Interval
from ffcp.scales import Sketch
from ffcp.segmentation import PixelSets, targets
from ffcp_paper.data import label_maps, result_cache
from ffcp_paper.data.files import DataFile
from ffcp_paper.data.images import read
from ffcp_paper.data.label_maps import LabelledImages
from ffcp_paper.ffcp_internals import Method, RegressionPredictor, fingerprint
from ffcp_paper.networks import segmentation_nets
from ffcp_paper.training import segmentation_training

FEATURE = "feature"
PROBES = 8
# FCP's number of descent steps and FFCP's floor are selected on images that are used neither for
# calibration nor for the test.
FCP_STEPS = (1, 2, 3, 5, 8, 12, 20)
FLOORS = (1e-6, 0.01, 0.03, 0.1, 0.3)
_SELECTION, _CALIBRATION = 40, 200  # images
_WITHIN = 2  # pixels: what counts as a boundary
_VERSION = 1  # of what a run computes; a change makes stored results stale

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Experiment:
    """A network, and images it was not trained on for calibration and test."""

    title: str
    model: nn.Sequential
    selection: LabelledImages  # for FCP's steps and FFCP's floor
    calibration: LabelledImages
    test: LabelledImages
    inputs: Callable[[Tensor], Tensor]
    batch: int = 8

    def pairs(self, part: LabelledImages) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of inputs with the regression targets of their label maps."""
        for some in self.batches(part):
            yield self.inputs(some.pixels), _targets(some)

    def batches(self, part: LabelledImages) -> Iterator[LabelledImages]:
        """Yield the images in batches."""
        for start in range(0, len(part), self.batch):
            yield part.take(slice(start, start + self.batch))


def _targets(part: LabelledImages) -> Tensor:
    return targets(part.labels, part.classes, ignore=part.ignore)


def _experiment(
    title: str, model: nn.Sequential, pool: LabelledImages, inputs: Callable[[Tensor], Tensor],
    seed: int, batch: int,
) -> Experiment:  # fmt: skip
    """Split a pool of images at random."""
    rows, test = label_maps.split(len(pool), _SELECTION + _CALIBRATION, seed)
    selection, calibration = rows[:_SELECTION], rows[_SELECTION:]
    return Experiment(
        title, model, pool.take(selection), pool.take(calibration), pool.take(test), inputs, batch
    )


def _shapes(seed: int, progress: Progress) -> Experiment:
    model = segmentation_training.trained("shapes", progress=progress)
    title = "painted shapes, a small residual network"
    return _experiment(
        title, model, label_maps.shapes(340, seed=seed), label_maps.normalised, seed, 16
    )


def _camvid(seed: int, progress: Progress) -> Experiment:
    model = segmentation_training.trained("camvid", progress=progress)
    title = "CamVid road scenes, a residual network trained on CamVid"
    return _experiment(title, model, _road_scenes(180, 240), label_maps.normalised, seed, 4)


def _deeplab(seed: int, progress: Progress) -> Experiment:
    model = segmentation_nets.deeplab(read(segmentation_nets.DEEPLAB_FILE))
    title = "CamVid road scenes, a DeepLab trained on Cityscapes"
    return _experiment(
        title, model, _road_scenes(360, 480), segmentation_nets.deeplab_inputs, seed, 2
    )


def _road_scenes(height: int, width: int) -> LabelledImages:
    """Return the CamVid images that no network was trained on."""
    return label_maps.join(list(label_maps.camvid(height, width, splits=("val", "test")).values()))


#: The experiments by the name of their network.
EXPERIMENTS: dict[str, Callable[[int, Progress], Experiment]] = {
    "shapes": _shapes,
    "camvid": _camvid,
    "deeplab": _deeplab,
}
#: The files each of them needs.
FILES: dict[str, tuple[DataFile, ...]] = {
    "shapes": (),
    "camvid": (label_maps.CAMVID_FILE,),
    "deeplab": (label_maps.CAMVID_FILE, segmentation_nets.DEEPLAB_FILE),
}


_SKETCHED, _FLOORED = f"FFCP, {PROBES} probes", "FFCP, floor"
METHODS = ("CP", "FCP", "FFCP", _SKETCHED, _FLOORED)


def predictor(experiment: Experiment, method: str, alpha: float) -> RegressionPredictor:
    """Return the predictor of a method.

    CP and FFCP have a threshold for every pixel and class, as in the paper. FCP, whose inversion
    is too slow to be done for each of them, has one ball for a whole image, as in the paper.
    Two variants of FFCP have norms from a few probes, and a selected floor.
    """
    model = experiment.model
    if method == "CP":
        return CP(model, missing=True)
    if method == "FCP":
        return fcp(model, _steps(experiment, alpha))
    way: Method = Sketch(PROBES) if method == _SKETCHED else "auto"
    floor = _floor(experiment, alpha) if method == _FLOORED else FLOORS[0]
    return FFCP(model, FEATURE, floor=floor, method=way, missing=True)


def fcp(model: nn.Module, steps: int) -> FCP:
    """Return FCP with one ball for all pixels and classes of an image."""
    return FCP(model, FEATURE, joint="known", missing=True, steps=steps)


def _steps(experiment: Experiment, alpha: float) -> int:
    """Return the smallest number of FCP's steps whose bands cover enough."""
    for steps in FCP_STEPS:
        sums = _trial(experiment, fcp(experiment.model, steps), alpha)
        if sums.hits >= (1 - alpha) * sums.known:
            return steps
    return FCP_STEPS[-1]


def _floor(experiment: Experiment, alpha: float) -> float:
    """Return the floor of FFCP with the shortest bands.

    Where the network is confident and wrong, its gradient is tiny. Without a floor the scores there
    are huge, and so is the threshold of a pixel where that happens in a share alpha of images.
    """
    lengths = {}
    for floor in FLOORS:
        tried = FFCP(experiment.model, FEATURE, floor=floor, method=Sketch(PROBES), missing=True)
        sums = _trial(experiment, tried, alpha)
        lengths[floor] = sums.length / sums.places
    return min(lengths, key=lambda floor: lengths[floor])


def _trial(experiment: Experiment, tried: RegressionPredictor, alpha: float) -> _Sums:
    """Calibrate on one half of the selection images, and measure on the other."""
    half = len(experiment.selection) // 2
    first, second = (experiment.selection.take(part) for part in (slice(half), slice(half, None)))
    sums = _Sums()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FFCPWarning)  # few images, so some places have no band
        tried.calibrate(experiment.pairs(first))
        for some in experiment.batches(second):
            sums.add(tried.predict_interval(experiment.inputs(some.pixels), alpha), some)
    return sums


@dataclass
class _Sums:
    """Totals over test images, for means."""

    hits: float = 0.0
    known: float = 0.0
    length: float = 0.0
    places: float = 0.0
    infinite: float = 0.0
    edge: float = 0.0
    edges: float = 0.0
    inner: float = 0.0
    inners: float = 0.0

    def add(self, band: Interval, some: LabelledImages) -> Tensor:
        """Count a batch; return its map of band lengths, averaged over classes."""
        target = _targets(some)
        known = ~target.isnan()
        inside = (band.lower <= target) & (target <= band.upper)
        self.hits += float(inside[known].double().sum())
        self.known += float(known.sum())
        lengths = (band.upper - band.lower).double().mean(dim=1)
        # Where too few calibration images have a label the band is infinite.
        finite = lengths.isfinite()
        self.infinite += float((~finite).sum())
        self.length += float(lengths[finite].sum())
        self.places += float(finite.sum())
        edge = finite & label_maps.boundaries(some.labels, _WITHIN, some.ignore)
        inner = finite & label_maps.interior(some.labels, _WITHIN, some.ignore)
        self.edge += float(lengths[edge].sum())
        self.edges += float(edge.sum())
        self.inner += float(lengths[inner].sum())
        self.inners += float(inner.sum())
        return lengths.float().masked_fill(~finite, math.nan)


@dataclass(frozen=True)
class Row:
    """Metrics of one method on the test images."""

    method: str
    coverage: float
    length: float
    boundary: float
    interior: float
    infinite: float  # share of places without a band, which the lengths leave out
    calibrate: float  # seconds
    predict: float
    maps: Tensor = field(repr=False)  # band lengths of the images that are drawn

    @property
    def contrast(self) -> float:
        """How many times longer bands are on boundaries than inside objects."""
        return self.boundary / self.interior

    def saved(self) -> dict[str, Any]:
        """Return plain values, the maps to four digits."""
        values = {name: value for name, value in vars(self).items() if name != "maps"}
        return {**values, "maps": [[[float(f"{v:.4g}") for v in line] for line in one]
                                   for one in self.maps.tolist()]}  # fmt: skip

    @staticmethod
    def restored(values: dict[str, Any]) -> Row:
        """Undo :meth:`saved`."""
        return Row(**{**values, "maps": torch.tensor(values["maps"])})


@dataclass(frozen=True)
class SetRow:
    """Metrics of one kind of prediction sets."""

    score: str
    promise: str
    kept: float
    size: float
    certain: float
    boundary: float
    interior: float


@dataclass(frozen=True)
class Result:
    """An experiment with its numbers and the images to draw."""

    experiment: Experiment
    alpha: float
    accuracy: float
    mean_iou: float
    recall: dict[str, float]  # by class
    rows: list[Row]
    sets: list[SetRow]
    drawn: LabelledImages
    predicted: Tensor


def run(
    name: str,
    *,
    alpha: float = 0.1,
    seed: int = 0,
    drawn: int = 3,
    methods: Sequence[str] = METHODS,
    sets: bool = True,
    progress: Progress = lambda m: None,
) -> Result:
    """Calibrate methods on one network, and measure them on its test images.

    Parameters
    ----------
    name
        One of :data:`EXPERIMENTS`.
    alpha
        Miscoverage level.
    seed
        Of the split into calibration and test images.
    drawn
        How many test images the picture shows.
    methods
        Some of :data:`METHODS`.
    sets
        Whether to compute prediction sets for every pixel too.
    progress
        Called with a status line.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"unknown network {name!r}: choose one of {', '.join(EXPERIMENTS)}")
    experiment = EXPERIMENTS[name](seed, progress)
    key = {
        "version": _VERSION, "data": name, "alpha": alpha, "seed": seed, "drawn": drawn,
        "weights": fingerprint(experiment.model),
    }  # fmt: skip
    rows = []
    for method in methods:
        progress(f"{method}: calibrating on {len(experiment.calibration)} images")
        saved = result_cache.record(
            "segments",
            {**key, "method": method},
            lambda method=method: _measure(experiment, method, alpha, drawn).saved(),  # type: ignore[misc]
        )
        rows.append(Row.restored(saved))
    saved_sets: list[dict[str, Any]] = []
    if sets:
        progress("prediction sets")
        saved_sets = result_cache.record(
            "segments",
            {**key, "sets": True},
            lambda: [asdict(r) for r in _label_sets(experiment, alpha)],
        )
    confusion, predicted = _predictions(experiment)
    return Result(
        experiment, alpha, label_maps.pixel_accuracy(confusion), label_maps.mean_iou(confusion),
        dict(zip(experiment.test.class_names, label_maps.class_recall(confusion), strict=True)),
        rows, [SetRow(**row) for row in saved_sets], experiment.test.take(slice(0, drawn)),
        predicted[:drawn],
    )  # fmt: skip


def _measure(experiment: Experiment, method: str, alpha: float, drawn: int) -> Row:
    start = time.perf_counter()
    used = predictor(experiment, method, alpha)  # includes the time of its selection
    used.calibrate(experiment.pairs(experiment.calibration))
    calibrated = time.perf_counter() - start
    sums, predicting = _Sums(), 0.0
    maps: list[Tensor] = []
    for some in experiment.batches(experiment.test):
        x = experiment.inputs(some.pixels)
        start = time.perf_counter()
        band = used.predict_interval(x, alpha)
        predicting += time.perf_counter() - start
        lengths = sums.add(band, some)
        if sum(len(part) for part in maps) < drawn:
            maps.append(lengths)
    return Row(
        method, sums.hits / sums.known, sums.length / sums.places, sums.edge / sums.edges,
        sums.inner / sums.inners, sums.infinite / (sums.infinite + sums.places), calibrated,
        predicting, torch.cat(maps)[:drawn],
    )  # fmt: skip


def _predictions(experiment: Experiment) -> tuple[Tensor, Tensor]:
    """Return the confusion matrix and the predicted label maps."""
    test, parts = experiment.test, []
    with torch.inference_mode():
        for some in experiment.batches(test):
            scores = experiment.model(experiment.inputs(some.pixels))
            parts.append(segmentation_nets.predicted_labels(scores))
    predicted = torch.cat(parts)
    return label_maps.confusion(predicted, test.labels, test.classes, test.ignore), predicted


def _label_sets(experiment: Experiment, alpha: float) -> Iterator[SetRow]:
    share = 1 - alpha
    promises: dict[str, dict[str, Any]] = {
        f"{share:.0%} of pixels on average": {},
        f"{share:.0%} of an image's pixels": {"share": share},
    }
    for score, feature in (("plain", "output"), ("gradient", FEATURE)):
        model, ignore = experiment.model, experiment.test.ignore
        predictor = PixelSets(model, feature, outputs="double_log", ignore=ignore)
        predictor.calibrate(
            (experiment.inputs(some.pixels), some.labels)
            for some in experiment.batches(experiment.calibration)
        )
        for promise, settings in promises.items():
            yield _measure_sets(experiment, predictor, score, promise, alpha, settings)


def _measure_sets(
    experiment: Experiment, predictor: PixelSets, score: str, promise: str, alpha: float,
    settings: dict[str, Any],
) -> SetRow:  # fmt: skip
    shares, sizes, certain, edge, inner = [], [], [], [], []
    for some in experiment.batches(experiment.test):
        result = predictor.predict_set(experiment.inputs(some.pixels), alpha, **settings)
        shares.append(result.coverage(some.labels, some.ignore))
        size = result.size.double()
        sizes.append(size.mean(dim=(1, 2)))
        certain.append(result.certain.double().mean(dim=(1, 2)))
        edge.append(size[label_maps.boundaries(some.labels, _WITHIN, some.ignore)])
        inner.append(size[label_maps.interior(some.labels, _WITHIN, some.ignore)])
    share = torch.cat(shares).double()
    wanted = settings.get("share")
    # One guarantee is about the mean share of an image, the other about how often it suffices.
    kept = share.nanmean() if wanted is None else (share >= wanted).double().mean()
    return SetRow(
        score, promise, float(kept), float(torch.cat(sizes).mean()),
        float(torch.cat(certain).mean()), float(torch.cat(edge).mean()),
        float(torch.cat(inner).mean()),
    )  # fmt: skip
