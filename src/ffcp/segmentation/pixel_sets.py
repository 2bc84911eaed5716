"""The predictor of prediction sets for the pixels of a segmentation network."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ffcp.batch import BatchOutput, Requires
from ffcp.calibrated import Counts
from ffcp.calibration_loop import Batch, BatchRunner, Result
from ffcp.conformal.columns import Columns, joined, take
from ffcp.conformal.rank import requested_alpha
from ffcp.conformal.score import Score
from ffcp.network import jacobian
from ffcp.network.features import INPUT, OUTPUT, resolve
from ffcp.network.inputs import RowBuffer
from ffcp.network.jacobian import Method
from ffcp.network.model_output import Output, picking
from ffcp.predictor import Predictor, steady
from ffcp.regression.intervals import as_float64
from ffcp.segmentation.counts import BINS, PixelCounts, exact_share, to_bins
from ffcp.segmentation.sets import Maps, PixelSet, check_maps, label_maps
from ffcp.segmentation.targets import DoubleLog
from ffcp.warnings import warn

LOGITS, DOUBLE_LOG = "logits", "double_log"
_NETWORK = "network"  # the user's model, inside the one that ends in log(-log p)
_BLOCK = 2**20  # numbers per step of the float64 arithmetic, of whole images
_PIXELS = 2**18  # of input per pass, by default


@dataclass(frozen=True)
class PixelScore(Score):
    """The score of a label at a pixel: the distance of its output from that of a certain pixel.

    Parameters are those of :class:`PixelSets`.
    """

    feature: str
    ignore: int | None
    norm: float
    floor: float
    smallest: float
    method: Method

    def __post_init__(self) -> None:
        jacobian.checked_norm(self.norm)
        jacobian.checked_method(self.method)

    def requires(self) -> Requires:
        """Return the required features: the gradient norms at the feature, if any."""
        if self.feature == OUTPUT:
            return Requires()
        return Requires((self.feature,), norm=self.norm, method=self.method)

    def score(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Return the number of labelled pixels of each image in each bin of scores."""
        check_maps(out.output)
        maps = label_maps(y.to(out.output.device), out.output, self.ignore, out.rows[0])
        return torch.cat([self._counts(out, maps, part) for part in _parts(out.output)])

    def _counts(self, out: BatchOutput, maps: Maps, part: slice) -> Tensor:
        """Return the counts of some of the images."""
        bins = to_bins(self.of_labels(out, maps.labels, part))
        known = maps.known[part].to(bins.device)
        images = torch.arange(len(bins), device=bins.device)[:, None, None]
        counts = torch.bincount((images * BINS + bins)[known], minlength=len(bins) * BINS)
        return counts.view(-1, BINS).int().cpu()

    def of_labels(self, out: BatchOutput, labels: Tensor, part: slice = slice(None)) -> Tensor:
        """Return the score of one label at each pixel of some images."""
        output, scale, index = out.output[part], self._scale(out), labels[part, None]
        scale = None if scale is None else scale[part].gather(1, index)[:, 0]
        scores = self._distance(output.gather(1, index)[:, 0], scale)
        is_top = output.argmin(dim=1) == labels[part]
        return scores.masked_fill_(is_top.to(scores.device), 0.0)

    def mask(self, out: BatchOutput, level: Tensor) -> Tensor:
        """Return a mask of the labels with scores at most the level, (n, 1) or (1,)."""
        output, scale = out.output, self._scale(out)
        levels = level.expand(len(output), 1)[:, :, None, None]
        mask = torch.empty(output.shape, dtype=torch.bool, device=output.device)
        for part in _parts(output):
            distance = self._distance(output[part], None if scale is None else scale[part])
            mask[part] = (distance <= levels[part].to(distance.device)).to(output.device)
        return mask.scatter_(1, output.argmin(dim=1)[:, None], True)

    def _scale(self, out: BatchOutput) -> Tensor | None:
        return None if self.feature == OUTPUT else out.norms[self.feature]

    def _distance(self, output: Tensor, scale: Tensor | None) -> Tensor:
        """Return how far outputs lie above those of a certain pixel, in units of the scale."""
        certain = math.log(-math.log1p(-self.smallest))
        distance = (as_float64(output) - certain).clamp_min_(0)
        if scale is None:
            return distance
        return distance.div_(as_float64(scale).clamp_min(self.floor))


class PixelSets(Predictor):
    """Prediction sets for the pixels of a segmentation network, with a guarantee for every image.

    The network's outputs are taken as f_c = log(-log p_c) for every pixel and class. A certain
    pixel of class c has f_c = t = log(-log(1 - smallest)). The score of label c is
    max(0, f_c - t) / scale, the scale being the norm of the gradient of f_c with respect to the
    feature: label c is in the set if and only if the FFCP interval around f_c contains t. The most
    likely label has score 0, so no set is empty.

    The same calibration gives two guarantees, both for exchangeable images (see
    docs/segmentation.md): on the mean share of missed pixels, and on the probability that a given
    share of an image is covered.

    Parameters
    ----------
    model : nn.Module
        A trained network; forward returns (n, classes, height, width).
    feature : str or nn.Module, default="output"
        Where the gradient is taken: a dotted module name of the model, a module, ``"input"``,
        or ``"output"`` (scale 1, plain conformal prediction).
    outputs : str, default="logits"
        What the model returns: ``"logits"``, or ``"double_log"`` for log(-log p), as networks
        trained on :func:`ffcp.segmentation.targets` do.
    ignore : int, default=None
        The label that marks unlabelled pixels, which do not count.
    norm : float, default=2
        Norm of the gradient: 1, 2 or ``inf``.
    floor : float, default=1e-06
        Smallest scale, for gradients that vanish. A constant; it must not be estimated from the
        calibration data.
    smallest : float, default=0.01
        A certain pixel has probability 1 - smallest.
    method : Method, default="auto"
        How gradient norms are computed, as in :func:`ffcp.gradient_norms`.
    batch_size : int, default=None
        Images per pass over arrays; by default about 2**18 pixels, one image of 512 x 512, since
        outputs and norms take memory for every class.
    output : str, int or callable, default=None
        Which part of the model's return value is the prediction, if it is a tuple, a dict or
        similar: a key (``"logits"``), an index, or a function.

    Notes
    -----
    Images without a labelled pixel are left out of the calibration, with a warning; the guarantees
    concern images that have one.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    >>> x, y = torch.randn(40, 3, 6, 6), torch.randint(0, 4, (40, 6, 6))  # yours are real
    >>> sets = PixelSets(model, feature="0").calibrate(x[:30], y[:30])
    >>> sets.predict_set(x[30:], alpha=0.2).mask.shape
    torch.Size([10, 4, 6, 6])
    """

    compared = ("outputs", "output")

    def __init__(
        self,
        model: nn.Module,
        feature: str | nn.Module = OUTPUT,
        *,
        outputs: str = LOGITS,
        ignore: int | None = None,
        norm: float = 2,
        floor: float = 1e-6,
        smallest: float = 0.01,
        method: Method = jacobian.AUTO,
        batch_size: int | None = None,
        output: Output = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"'model' must be a torch.nn.Module, got {type(model).__name__}")
        if outputs not in (LOGITS, DOUBLE_LOG):
            raise ValueError(f"'outputs' must be {LOGITS!r} or {DOUBLE_LOG!r}, got {outputs!r}")
        if ignore is not None and (isinstance(ignore, bool) or not isinstance(ignore, int)):
            raise TypeError(f"'ignore' must be an integer label or None, got {ignore!r}")
        if not 0 < floor < math.inf:
            raise ValueError(f"'floor' must be a positive number, got {floor}")
        if not 0 < smallest < 0.5:
            raise ValueError(f"'smallest' must lie between 0 and 0.5, got {smallest}")
        self.feature, self.outputs = resolve(model, feature), outputs
        self._picked = output
        name, model = self.feature, picking(model, output)
        if outputs == LOGITS:
            name = _inside(self.feature)
            model = nn.Sequential(OrderedDict({_NETWORK: model, "scores": DoubleLog()}))
        score = PixelScore(name, ignore, norm, floor, smallest, method)
        super().__init__(model, score, PixelCounts(), batch_size=batch_size)

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments, but for the model."""
        config = {name: getattr(self, name) for name in ("feature", "outputs", "batch_size")}
        for name in ("ignore", "norm", "floor", "smallest", "method"):
            config[name] = getattr(self._given[0], name)
        return {**config, "output": self._picked}

    def _runner(self, update: bool) -> BatchRunner:
        return _ImageRunner(self.model, self._given[0].ignore)

    def rows_at_once(self, x: Any) -> int | None:
        """Return the number of images in a batch: about 2**18 pixels by default."""
        if self.batch_size is None and isinstance(x, Tensor) and x.dim() > 2:
            return max(1, _PIXELS // max(1, x.shape[2:].numel()))
        return self.batch_size

    # -- using the calibration --------------------------------------------------------------

    @steady
    def score(self, x: Any, y: Any = None) -> Tensor:
        """Return the scores of one label at each pixel, (n, height, width), in float64.

        ``x`` may be a loader of pairs ``(x, y)``, passed without ``y``. NaN where the label is the
        ignored one. Not rounded to the grid.

        Parameters
        ----------
        x : array-like, frame, tuple, dict or loader
            Inputs, a row each; or a loader of pairs ``(images, labels)``, passed alone.
        y : array-like, default=None
            Label maps, unless ``x`` is a loader.
        """
        buffer, score = RowBuffer(), self._state.score
        for out, labels in self.targeted(x, y):
            check_maps(out.output)
            maps = label_maps(labels.to(out.output.device), out.output, score.ignore, out.rows[0])
            scores = score.of_labels(out, maps.labels)
            unknown = ~maps.known.to(scores.device)
            buffer.add({"scores": scores.masked_fill_(unknown, math.nan)})
        return buffer["scores"]

    @steady
    def predict_set(
        self,
        /,
        x: Any,
        alpha: Any = None,
        *,
        confidence_level: Any = None,
        share: Any = None,
        groups: Any = None,
        **unknown: NoReturn,
    ) -> PixelSet:
        """Return a set of labels for every pixel.

        Parameters
        ----------
        x : array-like or loader
            Images, (n, channels, height, width); or a loader of batches of images, or of pairs
            ``(x, y)``, whose sets are returned together.
        alpha : float, default=None
            Allowed share or probability of misses, in (0, 1); 0.1 if neither is given. Any value,
            without calibrating again.
        confidence_level : float, default=None
            Instead of ``alpha``: 1 - alpha.
        share : float, default=None
            ``None``: the share of a new image's labelled pixels that is missed is at most
            ``alpha``, on average over images. A number in (0, 1]: with probability at least
            1 - alpha, at least this share of a new image's labelled pixels is covered; 1 means all
            of them.
        groups : array-like, default=None
            The group of each image, if the calibration had groups.

        Returns
        -------
        PixelSet
            The mask of labels and the most likely label of every pixel.
        """
        exact = requested_alpha(alpha, confidence_level, unknown)
        calibration, rows = self.calibrated().calibration, self.rows(x)
        share = None if share is None else exact_share(share)
        buffer = RowBuffer(rows.count)
        infinite_rows: list[Columns] = []
        for out, metadata, *_ in self.batch_outputs(rows, groups):
            check_maps(out.output)
            metadata["share"] = [share] * len(out.output)
            threshold = calibration.quantile(exact, metadata)
            infinite = threshold.isinf().any(dim=-1).expand(len(out.output))
            if bool(infinite.any()):
                infinite_rows.append(take(metadata, infinite))
            mask = self._state.score.mask(out, threshold)
            buffer.add({"mask": mask, "prediction": out.output.argmin(dim=1)})
        if infinite_rows:
            columns = joined(infinite_rows)
            message, count = "every set holds all labels", len(columns["share"])
            if rows.count is not None and count < rows.count:
                message = f"the sets of {count} of {rows.count} images hold all labels"
            warn(f"{message}{self.explain_infinite(exact, columns)}")
        return PixelSet(buffer["mask"], buffer["prediction"])

    def forward(self, x: Any, alpha: Any = None, **options: Any) -> PixelSet:
        """Return a set of labels for every pixel, as :meth:`predict_set`: ``predictor(x)``."""
        return self.predict_set(x, alpha, **options)


class _ImageRunner(BatchRunner):
    """Runs a segmentation network on calibration images."""

    sample = 4  # images can be large

    def __init__(self, model: nn.Module, ignore: int | None) -> None:
        super().__init__(model)
        self._ignore, self._images, self._unlabelled = ignore, 0, 0

    def __call__(self, batch: Batch, requires: Requires) -> BatchOutput:
        """Run the model on one batch, and count the images without a labelled pixel."""
        self._images += len(batch.y)
        if self._ignore is not None:
            self._unlabelled += int((batch.y == self._ignore).flatten(1).all(dim=1).sum())
        return super().__call__(batch, requires)

    def finish(self, result: Result) -> Counts:
        """Add a warning if images have no labelled pixel and are left out."""
        if self._unlabelled:
            images = f"{self._unlabelled} of {self._images} images"
            result.warnings.append(f"{images} have no labelled pixel and are left out")
        return super().finish(result)


def _inside(feature: str) -> str:
    """Return the name of a feature of the user's model in the wrapped model.

    >>> _inside("output"), _inside("input[0]"), _inside("trunk.4")
    ('output', 'input[0]', 'network.trunk.4')
    """
    if feature == OUTPUT or feature.partition("[")[0] == INPUT:
        return feature
    return f"{_NETWORK}.{feature.removeprefix('.')}"  # a leading dot marks modules named "input"


def _parts(output: Tensor) -> list[slice]:
    """Return slices of a batch of about a million numbers each."""
    size = max(1, _BLOCK // output[0].numel())
    return [slice(start, start + size) for start in range(0, len(output), size)]
