"""Segmentation as in the paper: bands for every pixel and class, and where they are wide.

A network's scores log(-log p) for every pixel and class are a response of thousands of numbers.
CP, FCP and FFCP put a band around each, and the map of their lengths shows where the network is
unsure. Beside it stand the label sets of :class:`ffcp.segmentation.PixelSets`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ffcp import CP, FCP, FFCP, Interval, Sketch, gradients
from ffcp.metrics import Coverage
from ffcp.paper import scenes, segnets, segtrain
from ffcp.paper.images import read
from ffcp.paper.scenes import Scenes
from ffcp.predictors import BandPredictor
from ffcp.segmentation import PixelSets, targets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEATURE = "feature"
PROBES = 32
FCP_STEPS = 20
_WITHIN = 2  # pixels: what counts as a boundary

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Experiment:
    """A network, and images it was not trained on for calibration and test."""

    title: str
    model: nn.Sequential
    calibration: Scenes
    test: Scenes
    inputs: Callable[[Tensor], Tensor]
    batch: int = 8

    def pairs(self, part: Scenes) -> Iterator[tuple[Tensor, Tensor]]:
        """Give batches of inputs with the numbers that stand for their label maps."""
        for some in self.batches(part):
            yield self.inputs(some.pixels), _targets(some)

    def batches(self, part: Scenes) -> Iterator[Scenes]:
        """Cut scenes into batches."""
        for start in range(0, len(part), self.batch):
            yield part.take(slice(start, start + self.batch))


def _targets(part: Scenes) -> Tensor:
    return targets(part.labels, part.classes, ignore=part.ignore)


def _shapes(seed: int, progress: Progress) -> Experiment:
    pool = scenes.shapes(300, seed=seed)
    rows, others = scenes.split(len(pool), 200, seed)
    model = segtrain.trained("shapes", progress=progress)
    title = "painted shapes, a small residual network"
    return Experiment(title, model, pool.take(rows), pool.take(others), scenes.normalised, batch=16)


def _camvid(seed: int, progress: Progress) -> Experiment:
    model = segtrain.trained("camvid", progress=progress)
    title = "CamVid road scenes, a residual network trained on CamVid"
    return _road_scenes(title, model, scenes.normalised, seed, size=(180, 240))


def _deeplab(seed: int, progress: Progress) -> Experiment:
    model = segnets.deeplab(read(segnets.DEEPLAB_FILE))
    title = "CamVid road scenes, a DeepLab trained on Cityscapes"
    return _road_scenes(title, model, segnets.deeplab_inputs, seed, size=(360, 480))


def _road_scenes(
    title: str, model: nn.Sequential, inputs: Callable[[Tensor], Tensor], seed: int,
    size: tuple[int, int],
) -> Experiment:  # fmt: skip
    pool = scenes.join(list(scenes.camvid(*size, splits=("val", "test")).values()))
    rows, others = scenes.split(len(pool), 200, seed)
    return Experiment(title, model, pool.take(rows), pool.take(others), inputs, batch=4)


#: The experiments by the name of their network.
EXPERIMENTS: dict[str, Callable[[int, Progress], Experiment]] = {
    "shapes": _shapes,
    "camvid": _camvid,
    "deeplab": _deeplab,
}


def methods(model: nn.Module) -> dict[str, BandPredictor]:
    """Give the methods that are compared, by name.

    CP and FFCP have a threshold for every pixel and class, as in the paper. FCP, whose inversion
    is too slow to be done for each of them, has one ball for a whole image, as in the paper.
    """
    ways: dict[str, gradients.Method] = {
        "FFCP": "auto",
        f"FFCP, {PROBES} probes": Sketch(PROBES),
    }
    return {
        "CP": CP(model, missing=True),
        "FCP": FCP(model, FEATURE, joint=True, missing=True, steps=FCP_STEPS),
        **{
            name: FFCP(model, FEATURE, method=method, missing=True) for name, method in ways.items()
        },
    }


@dataclass
class _Sums:
    """Totals over test images, from which all means come."""

    hits: float = 0.0
    known: float = 0.0
    length: float = 0.0
    places: float = 0.0
    edge: float = 0.0
    edges: float = 0.0
    inner: float = 0.0
    inners: float = 0.0

    def add(self, band: Interval, target: Tensor, some: Scenes) -> Tensor:
        """Count a batch; return its map of band lengths, averaged over classes."""
        known = ~target.isnan()
        inside = (band.lower <= target) & (target <= band.upper)
        self.hits += float(inside[known].double().sum())
        self.known += float(known.sum())
        lengths = (band.upper - band.lower).double().mean(dim=1)
        self.length += float(lengths.sum())
        self.places += lengths.numel()
        edge = scenes.boundaries(some.labels, _WITHIN, some.ignore)
        inner = scenes.interior(some.labels, _WITHIN, some.ignore)
        self.edge += float(lengths[edge].sum())
        self.edges += float(edge.sum())
        self.inner += float(lengths[inner].sum())
        self.inners += float(inner.sum())
        return lengths.float()


@dataclass(frozen=True)
class Row:
    """How one method did on the test images."""

    method: str
    coverage: float
    length: float
    boundary: float
    interior: float
    calibrate: float  # seconds
    predict: float
    maps: Tensor = field(repr=False)  # band lengths of the images that are drawn

    @property
    def contrast(self) -> float:
        """How many times longer bands are on boundaries than inside of objects."""
        return self.boundary / self.interior


@dataclass(frozen=True)
class SetRow:
    """How one kind of label sets did."""

    score: str
    promise: str
    coverage: Coverage
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
    rows: list[Row]
    sets: list[SetRow]
    drawn: Scenes
    predicted: Tensor


def run(
    name: str,
    *,
    alpha: float = 0.1,
    seed: int = 0,
    drawn: int = 3,
    progress: Progress = lambda m: None,
) -> Result:
    """Calibrate all methods on one network, and measure them on its test images.

    Parameters
    ----------
    name
        One of :data:`EXPERIMENTS`.
    alpha
        Share of misses allowed.
    seed
        Of the split into calibration and test images.
    drawn
        How many test images the picture shows.
    progress
        Called with a line to read.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no network {name!r}; there are: {', '.join(EXPERIMENTS)}")
    experiment = EXPERIMENTS[name](seed, progress)
    shown = experiment.test.take(slice(0, drawn))
    rows = []
    for method, predictor in methods(experiment.model).items():
        progress(f"{method}: calibrating on {len(experiment.calibration)} images")
        rows.append(_measure(experiment, method, predictor, alpha, drawn))
    progress("label sets")
    confusion, predicted = _predictions(experiment)
    return Result(
        experiment, alpha, scenes.pixel_accuracy(confusion), scenes.mean_iou(confusion), rows,
        list(_label_sets(experiment, alpha)), shown, predicted[:drawn],
    )  # fmt: skip


def _measure(
    experiment: Experiment, method: str, predictor: BandPredictor, alpha: float, drawn: int
) -> Row:
    start = time.perf_counter()
    predictor.calibrate(experiment.pairs(experiment.calibration))
    calibrated = time.perf_counter() - start
    sums, predicting = _Sums(), 0.0
    maps: list[Tensor] = []
    for some in experiment.batches(experiment.test):
        x, target = experiment.inputs(some.pixels), _targets(some)
        start = time.perf_counter()
        band = predictor.predict_interval(x, alpha)
        predicting += time.perf_counter() - start
        lengths = sums.add(band, target, some)
        if sum(len(part) for part in maps) < drawn:
            maps.append(lengths)
    return Row(
        method, sums.hits / sums.known, sums.length / sums.places, sums.edge / sums.edges,
        sums.inner / sums.inners, calibrated, predicting, torch.cat(maps)[:drawn],
    )  # fmt: skip


def _predictions(experiment: Experiment) -> tuple[Tensor, Tensor]:
    """Give the confusion matrix and the label maps that the network predicts."""
    test, parts = experiment.test, []
    with torch.inference_mode():
        for some in experiment.batches(test):
            scores = experiment.model(experiment.inputs(some.pixels))
            parts.append(segnets.predicted_labels(scores))
    predicted = torch.cat(parts)
    return scenes.confusion(predicted, test.labels, test.classes, test.ignore), predicted


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
        found = predictor.predict_set(experiment.inputs(some.pixels), alpha, **settings)
        shares.append(found.coverage(some.labels, some.ignore))
        size = found.size.double()
        sizes.append(size.mean(dim=(1, 2)))
        certain.append(found.certain.double().mean(dim=(1, 2)))
        edge.append(size[scenes.boundaries(some.labels, _WITHIN, some.ignore)])
        inner.append(size[scenes.interior(some.labels, _WITHIN, some.ignore)])
    share = torch.cat(shares).double()
    wanted = settings.get("share")
    # One promise is about the mean share of an image, the other about how often it is enough.
    kept = share.nanmean() if wanted is None else (share >= wanted).double().mean()
    return SetRow(
        score, promise, Coverage(float(kept), len(share)), float(torch.cat(sizes).mean()),
        float(torch.cat(certain).mean()), float(torch.cat(edge).mean()),
        float(torch.cat(inner).mean()),
    )  # fmt: skip


COLUMNS = ("method", "coverage", "length", "boundary", "interior", "ratio", "calibrate", "predict")
SET_COLUMNS = ("score", "promise", "kept", "labels", "one label", "boundary", "interior")


def tabulate(result: Result) -> list[list[str]]:
    """Format the lines of the table of bands."""
    return [
        [
            row.method, f"{row.coverage:.1%}", f"{row.length:.2f}", f"{row.boundary:.2f}",
            f"{row.interior:.2f}", f"{row.contrast:.2f}", f"{row.calibrate:.1f} s",
            f"{row.predict:.1f} s",
        ]
        for row in result.rows
    ]  # fmt: skip


def tabulate_sets(result: Result) -> list[list[str]]:
    """Format the lines of the table of label sets."""
    return [
        [
            row.score, row.promise, f"{row.coverage:.1%}", f"{row.size:.2f}",
            f"{row.certain:.0%}", f"{row.boundary:.2f}", f"{row.interior:.2f}",
        ]
        for row in result.sets
    ]  # fmt: skip


def picture(result: Result) -> Figure:
    """Draw image, label, prediction and the maps of band length side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    shown = result.drawn
    by_method = {row.method: row for row in result.rows if row.method in ("CP", "FCP", "FFCP")}
    height, width = shown.labels.shape[1:]
    columns = 3 + len(by_method)
    figure = Figure(
        figsize=(2.3 * columns, (2.3 * height / width + 0.1) * len(shown) + 0.75),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(shown), columns, squeeze=False)
    colours = ListedColormap([*_COLOURS[: shown.classes], "black"])
    last = shown.classes  # ignored pixels are black
    for row, line in enumerate(axes):
        labels = shown.labels[row].long()
        if shown.ignore is not None:
            labels = labels.masked_fill(labels == shown.ignore, last)
        line[0].imshow(shown.pixels[row].permute(1, 2, 0).numpy())
        for axis, drawn in zip(line[1:3], (labels, result.predicted[row]), strict=True):
            axis.imshow(drawn.numpy(), cmap=colours, vmin=0, vmax=last, interpolation="nearest")
        for axis, found in zip(line[3:], by_method.values(), strict=True):
            # One scale for all images of a method; a few extreme pixels do not set it.
            low, high = torch.quantile(found.maps.flatten()[:: _step(found.maps)], _SCALE).tolist()
            drawn_map = axis.imshow(found.maps[row].numpy(), cmap="inferno", vmin=low, vmax=high)
            if row == len(axes) - 1:
                figure.colorbar(drawn_map, ax=axes[:, 3 + list(by_method).index(found.method)],
                                location="bottom", aspect=25, pad=0.01)  # fmt: skip
    titles = ["image", "label", "prediction", *(f"{m}: band length" for m in by_method)]
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=9)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    return figure


_SCALE = torch.tensor([0.005, 0.995])
# Dark and light alternate, so that neighbours differ in grey too.
_COLOURS = (
    "#9ecae9", "#7a3b2e", "#f7f7f7", "#8a6fa8", "#f2a7c3", "#3f8f4f", "#f0e442", "#b08d57",
    "#1f3b8c", "#e6550d", "#40c8c8",
)  # fmt: skip


def _step(maps: Tensor) -> int:
    """Thin out the pixels, because torch.quantile takes 16 million numbers at most."""
    return 1 + maps.numel() // 2**20
