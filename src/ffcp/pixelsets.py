"""Label sets for every pixel of an image, with two guarantees from one calibration.

The score of a label at a pixel says how far the band of its output would have to reach. Of a
calibration image only the number of labelled pixels in each of a fixed grid of scores is kept, so
memory does not depend on the size of the images, and all that follows is whole-number arithmetic.
Images are the exchangeable units; the pixels of one image may depend on each other at will.
"""

from __future__ import annotations

import bisect
import math
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ffcp import bands, files
from ffcp.calibrated import Calibrated
from ffcp.conformal.rank import conformal_rank, exact_alpha, points_needed
from ffcp.errors import FFCPWarning
from ffcp.network import inputs, jacobian, passes
from ffcp.network.features import INPUT, OUTPUT, resolve
from ffcp.quantiles import ScoreBuffer, make_room

LOGITS, DOUBLE_LOG = "logits", "double_log"
_NETWORK = "network"  # the user's model, inside the one that ends in log(-log p)
# The grid of scores. A constant: chosen by the data it would break exchangeability. A step is half
# a per cent, some ten steps from p = 0.01 to 0.001; at the default floor scores are below 2**24.
_OCTAVES, _STEPS = 24, 128
_BLOCK = 2**20  # numbers per step of the float64 arithmetic
_IMAGES = 256  # images counted at once
_PIXELS = 2**18  # of input per pass, by default
_FRACTION = 2**32  # in units of 1 / _FRACTION a loss of up to 2**31 pixels fits into 64 bits
Self = TypeVar("Self", bound="PixelSets")


def _edges() -> Tensor:
    steps = range(-_OCTAVES * _STEPS, _OCTAVES * _STEPS + 1)
    powers = [math.ldexp(2.0 ** (k % _STEPS / _STEPS), k // _STEPS) for k in steps]
    return torch.tensor([0.0, *powers], dtype=torch.float64)


EDGES = _edges()  # the largest score of each bin but the last, which has what lies beyond
BINS = len(EDGES) + 1


def to_bins(scores: Tensor) -> Tensor:
    """Round scores up to the grid and return the numbers of their bins, int32.

    Bin 0 has the score 0, bin j the scores up to ``EDGES[j]``, the last bin those beyond 2**24.
    A score is in bin j or below exactly if it is at most ``EDGES[j]``.

    >>> to_bins(torch.tensor([0.0, 1e-9, 1.0, 1.001, 1e9]))
    tensor([   0,    1, 3073, 3074, 6146], dtype=torch.int32)
    """
    scores = bands.as_float64(scores)
    return torch.bucketize(scores, EDGES.to(scores.device), out_int32=True)


# -- what is kept of a calibration -------------------------------------------------------------


class PixelCounts(nn.Module):
    """How many labelled pixels of each calibration image fall into each bin of scores.

    An image takes 25 KB whatever its size. The counts are a buffer, so ``state_dict`` carries
    them; ``.to()`` and ``.half()`` leave them alone.

    >>> store, bins = PixelCounts(), torch.zeros(3, BINS, dtype=torch.int32)
    >>> bins[:, 0], bins[:, 1], bins[0, 7] = 8, 1, 1
    >>> store.replace(bins)
    >>> store.risk_bin(0.3)  # beyond bin 1 lies a tenth of one image: (1/10 + 1) / 4 <= 0.3
    1
    >>> store.share_bin(0.3, share=1)
    7
    """

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.empty(0, BINS, dtype=torch.int32))

    def __len__(self) -> int:
        return len(self.counts)

    def replace(self, counts: Tensor) -> None:
        """Keep these counts, of shape (n, BINS), and no others."""
        self.counts = counts.detach().to("cpu", torch.int32, copy=True)

    def add(self, counts: Tensor) -> None:
        """Keep these counts as well."""
        self.counts = torch.cat([self.counts, counts.detach().to("cpu", torch.int32)])

    def risk_bin(self, alpha: Any) -> int:
        """Find the smallest bin t with (sum of losses + 1) / (n + 1) <= alpha.

        The loss of an image is the share of its labelled pixels beyond bin t. Where no bin does,
        the last one, which leaves nothing out.
        """
        # Losses are ratios k / m, and m differs between images: no floating point, which could
        # fall on the wrong side where the sum meets the budget exactly.
        budget = exact_alpha(alpha) * (len(self) + 1) - 1
        if budget < 0:
            return BINS - 1
        pixels = self._within(BINS - 1)
        return bisect.bisect_left(
            range(BINS), True, key=lambda t: _sum_at_most(pixels - self._within(t), pixels, budget)
        )

    def share_bin(self, alpha: Any, share: Any) -> int:
        """Find the conformal quantile of the images' bins, or the last bin if n is too small.

        The bin of an image is the smallest with at least ``share`` of its labelled pixels in it
        or below.
        """
        share, rank = _exact_share(share), conformal_rank(len(self), alpha)
        if rank > len(self):
            return BINS - 1
        return int(self.image_bins(share).kthvalue(rank).values)

    def image_bins(self, share: Any) -> Tensor:
        """Give the smallest bin of each image that reaches ``share`` of its labelled pixels."""
        exact = _exact_share(share)
        # Python's integers: a share such as 0.3333333333333333 has a denominator of 10**16.
        needed = torch.tensor([math.ceil(exact * m) for m in self._within(BINS - 1).tolist()])
        found = torch.empty(len(self), dtype=torch.int64)
        for start in range(0, len(self), _IMAGES):
            part = slice(start, start + _IMAGES)
            sums = self.counts[part].cumsum(dim=1, dtype=torch.int32)
            found[part] = (sums < needed[part, None]).sum(dim=1)
        return found

    def _within(self, t: int) -> Tensor:
        """Count the labelled pixels of each image in bin t or below."""
        # Summed as int32, or torch would copy all counts; no image has 2**31 pixels.
        return self.counts[:, : t + 1].sum(dim=1, dtype=torch.int32).long()

    def _apply(self, fn: Any, recurse: bool = True) -> PixelCounts:
        return self  # stays where it is, as it is

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # The saved counts may be of any number of images.
        make_room(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _sum_at_most(parts: Tensor, wholes: Tensor, budget: Fraction) -> bool:
    """Say exactly whether the sum of parts / wholes is at most ``budget``.

    >>> third = torch.tensor([1, 1, 1]), torch.tensor([3, 3, 3])
    >>> _sum_at_most(*third, Fraction(1)), _sum_at_most(*third, Fraction(999_999_999, 10**9))
    (True, False)
    """
    scaled = parts * _FRACTION
    below = scaled // wholes
    above = below + (scaled % wholes != 0)
    if int(above.sum()) <= budget * _FRACTION:
        return True
    if int(below.sum()) > budget * _FRACTION:
        return False
    # Closer than the rounding: fractions, one for each number of pixels that occurs.
    kinds, which = wholes.unique(return_inverse=True)
    sums = torch.zeros_like(kinds).index_add(0, which, parts)
    exact = sum(map(Fraction, sums.tolist(), kinds.tolist()), start=Fraction(0))
    return exact <= budget


# -- the result --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class PixelSet:
    """The labels that are possible at each pixel.

    Parameters
    ----------
    mask
        Shape (n, classes, height, width): whether the label is in the pixel's set.
    prediction
        Shape (n, height, width): the most likely label, which is in every set.

    Examples
    --------
    >>> mask = torch.tensor([[[[True, True]], [[False, True]], [[False, False]]]])
    >>> found = PixelSet(mask, torch.tensor([[[0, 1]]]))
    >>> found
    PixelSet(1 images of 1 x 2 pixels, 3 classes, mean size 1.5)
    >>> found.size
    tensor([[[1, 2]]])
    >>> found.coverage(torch.tensor([[[0, 2]]]))
    tensor([0.5000], dtype=torch.float64)
    """

    mask: Tensor
    prediction: Tensor

    def __len__(self) -> int:
        return len(self.mask)

    def __repr__(self) -> str:
        n, classes, height, width = self.mask.shape
        mean = float(self.mean_size.mean())
        return (
            f"PixelSet({n} images of {height} x {width} pixels, {classes} classes, "
            f"mean size {mean:.4g})"
        )

    @property
    def size(self) -> Tensor:
        """How many labels the set of each pixel holds, shape (n, height, width)."""
        found = torch.zeros_like(self.prediction, dtype=torch.int64)
        for inside in self.mask.unbind(dim=1):  # mask.sum would copy the mask as int64
            found += inside
        return found

    @property
    def certain(self) -> Tensor:
        """Where the set holds one label only, shape (n, height, width)."""
        return self.size == 1

    @property
    def mean_size(self) -> Tensor:
        """The mean number of labels per pixel of each image, shape (n,)."""
        held = torch.stack([image.count_nonzero() for image in self.mask])
        return held.double() / self.mask[0, 0].numel()

    def coverage(self, labels: Any, ignore: int | None = None) -> Tensor:
        """Give the share of each image's labelled pixels whose label is in the set."""
        return pixel_coverage(self.mask, labels, ignore)


def pixel_coverage(mask: Tensor, labels: Any, ignore: int | None = None) -> Tensor:
    """Give the share of each image's labelled pixels whose label is in the set.

    Parameters
    ----------
    mask
        Label sets, (n, classes, height, width).
    labels
        Label maps, (n, height, width).
    ignore
        The label of pixels that have none.

    Returns
    -------
    Tensor
        Shape (n,), float64; NaN for images without a labelled pixel.

    Examples
    --------
    >>> mask = torch.tensor([[[[True, True, True]], [[False, True, False]]]])
    >>> pixel_coverage(mask, torch.tensor([[[0, 1, 255]]]), ignore=255)
    tensor([1.], dtype=torch.float64)
    """
    if mask.dim() != 4:
        raise ValueError(
            f"the mask must have shape (n, classes, height, width), got {tuple(mask.shape)}"
        )
    maps = _label_maps(inputs.target_tensor(labels).to(mask.device), mask, ignore)
    inside = mask.gather(1, maps.labels[:, None])[:, 0] & maps.known
    return inside.sum(dim=(1, 2)).double() / maps.known.sum(dim=(1, 2))


# -- the predictor -----------------------------------------------------------------------------


class PixelSets(Calibrated):
    """Label sets for the pixels of a segmentation network, with a guarantee for every image.

    The network's outputs are taken as f_c = log(-log p_c) for every pixel and class. A certain
    pixel of class c has f_c = t = log(-log(1 - smallest)). The score of label c is
    max(0, f_c - t) / slack, the slack being the norm of the gradient of f_c with respect to the
    feature: label c is in the set if and only if the FFCP band around f_c reaches t. The most
    likely label has score 0, so no set is empty.

    Two guarantees rest on the same calibration, and both assume nothing but that images are
    exchangeable (see docs/segmentation.md): of the mean share of missed pixels, and of the
    probability that an image is covered to a given share.

    Parameters
    ----------
    model
        A trained network; forward returns (n, classes, height, width).
    feature
        Where the gradient is taken: a dotted module name of the model, a module, ``"input"``,
        or ``"output"`` (slack 1, plain conformal prediction).
    outputs
        What the model returns: ``"logits"``, or ``"double_log"`` for log(-log p), as networks do
        that were trained on :func:`ffcp.segmentation.targets`.
    ignore
        The label of pixels that have none. They do not count.
    norm
        Norm of the gradient: 1, 2 or ``inf``.
    floor
        Smallest slack, for gradients that vanish. A constant; it must not be estimated from the
        calibration data.
    smallest
        A certain pixel has probability 1 - smallest.
    method
        How gradient norms are taken, as in :func:`ffcp.gradient_norms`.
    batch_size
        Images per pass over arrays; by default about 2**18 pixels, one image of 512 x 512, since
        outputs and norms take memory for every class.

    Attributes
    ----------
    skipped : int
        How many images of the calibration had no labelled pixel. They do not calibrate, and the
        guarantees are about images that have one.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    >>> x, y = torch.randn(40, 3, 6, 6), torch.randint(0, 4, (40, 6, 6))  # yours are real
    >>> sets = PixelSets(model, feature="0").calibrate(x[:30], y[:30])
    >>> sets.predict_set(x[30:], alpha=0.2).mask.shape
    torch.Size([10, 4, 6, 6])
    """

    calibration: PixelCounts  # type: ignore[assignment]

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
        method: jacobian.Method = jacobian.AUTO,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(model, batch_size)
        if outputs not in (LOGITS, DOUBLE_LOG):
            raise ValueError(f"outputs must be {LOGITS!r} or {DOUBLE_LOG!r}, got {outputs!r}")
        if ignore is not None and (isinstance(ignore, bool) or not isinstance(ignore, int)):
            raise TypeError(f"ignore must be an integer label or None, got {ignore!r}")
        if not 0 < floor < math.inf:
            raise ValueError(f"floor must be a positive number, got {floor}")
        if not 0 < smallest < 0.5:
            raise ValueError(f"smallest must lie between 0 and 0.5, got {smallest}")
        self.feature = resolve(model, feature)
        self.outputs = outputs
        self.ignore = ignore
        self.norm = jacobian.checked_norm(norm)
        self.floor = floor
        self.smallest = smallest
        self.method = jacobian.checked_method(method)
        self.classes: int | None = None
        self.skipped = 0
        self.calibration = PixelCounts()
        self._name = self.feature
        if outputs == LOGITS:
            self.model = _with_double_log(model)
            self._name = _inside(self.feature)

    def _settings(self) -> dict[str, Any]:
        return {
            **super()._settings(),
            "feature": self.feature,
            "outputs": self.outputs,
            "ignore": self.ignore,
            "norm": float(self.norm),
            "floor": self.floor,
            "smallest": self.smallest,
            "gradient": str(self.method),
            "bins": BINS,
        }

    # -- calibrating ----------------------------------------------------------------------

    def calibrate(self: Self, x: Any, y: Any = None, *, update: bool = False) -> Self:
        """Score the labelled pixels of held-out images; every later set rests on them.

        Parameters
        ----------
        x, y
            Images (n, channels, height, width) and label maps (n, height, width), as tensors or
            arrays; or ``x`` alone, a loader that yields such pairs, whose batches may be of
            different sizes. The images must not have trained the model.
        update
            Add to the images there are instead of replacing them.

        Returns
        -------
        self
            Unchanged if anything goes wrong on the way. Images without a labelled pixel are left
            out, with a warning.
        """
        with torch.inference_mode(False):  # the counts outlive the caller's inference_mode
            buffer, images, classes = ScoreBuffer(torch.int32), 0, self.classes if update else None
            for f, slack, maps in self._labelled(x, y, classes):
                images, classes = images + len(f), f.shape[1]
                for counts in self._counts(f, slack, maps):
                    buffer.extend(counts)
            found = buffer.scores
            if not len(found):
                raise ValueError(
                    "the calibration data is empty: "
                    + ("no image has a labelled pixel" if images else "there are no images")
                )
            (self.calibration.add if update else self.calibration.replace)(found)
        skipped = images - len(found)
        self.classes, self.skipped = classes, skipped + (self.skipped if update else 0)
        if skipped:
            warnings.warn(
                f"{skipped} of {images} images have no labelled pixel and do not calibrate: the "
                "guarantees are about images that have one",
                FFCPWarning,
                stacklevel=2,
            )
        return self

    def _labelled(
        self, x: Any, y: Any, classes: int | None
    ) -> Iterator[tuple[Tensor, Tensor | None, _Maps]]:
        """Yield batches of outputs, slacks and label maps."""
        row = 0
        for whole, target in inputs.pairs(x, y, self.model):
            start = 0
            for batch in self._batches(whole):
                if not row:
                    # Four images, as they can be large.
                    passes.check_rows(self.model, batch, self._features(), sample=4)
                f, slack = self._run(batch, row, classes)
                classes = f.shape[1]
                part = target[start : start + len(f)].to(f.device)
                yield f, slack, _label_maps(part, f, self.ignore, row)
                start, row = start + len(f), row + len(f)

    def _counts(self, f: Tensor, slack: Tensor | None, maps: _Maps) -> Iterator[Tensor]:
        """Yield the counts of the images that have labelled pixels, (at most 256, BINS)."""
        size = max(1, min(_IMAGES, _BLOCK // f[0, 0].numel()))
        for start in range(0, len(f), size):
            part = slice(start, start + size)
            bins = to_bins(self._label_scores(f, slack, maps.labels, part))
            known = maps.known[part].to(bins.device)
            images = torch.arange(len(bins), device=bins.device)[:, None, None]
            counts = torch.bincount((images * BINS + bins)[known], minlength=len(bins) * BINS)
            labelled = known.any(dim=2).any(dim=1)
            if bool(labelled.any()):
                yield counts.view(-1, BINS)[labelled].int().cpu()

    # -- scores ---------------------------------------------------------------------------

    def _batches(self, x: Any) -> Iterator[Any]:
        images = self.batch_size
        if images is None and isinstance(x, Tensor) and x.dim() > 2:
            images = max(1, _PIXELS // max(1, x.shape[2:].numel()))
        return inputs.batches(x, images) if inputs.row_count(x) else iter(())

    def _features(self) -> list[str]:
        return [] if self._name == OUTPUT else [self._name]

    def _run(self, x: Any, row: int, classes: int | None) -> tuple[Tensor, Tensor | None]:
        """Run the model on a batch; return outputs and gradient norms, ``None`` for slack 1."""
        f, norms = passes.run(
            self.model, x, self._features(), self.norm, self.batch_size, row, method=self.method
        )
        _check_maps(f)
        if classes is not None and f.shape[1] != classes:
            raise ValueError(
                f"calibrated on {classes} classes, but the model now gives {f.shape[1]}"
            )
        return f, norms.get(self._name)

    def _distance(self, f: Tensor, slack: Tensor | None) -> Tensor:
        """Measure how far outputs lie above those of a certain pixel, in units of the slack."""
        certain = math.log(-math.log1p(-self.smallest))
        distance = (bands.as_float64(f) - certain).clamp_min_(0)
        return distance if slack is None else distance.div_(bands.floored(slack, self.floor))

    def _label_scores(self, f: Tensor, slack: Tensor | None, labels: Tensor, part: slice) -> Tensor:
        """Score one label at each pixel of some images."""
        index = labels[part, None]
        own = None if slack is None else slack[part].gather(1, index)[:, 0]
        scores = self._distance(f[part].gather(1, index)[:, 0], own)
        is_top = f[part].argmin(dim=1) == labels[part]
        return scores.masked_fill_(is_top.to(scores.device), 0.0)

    def score(self, x: Any, y: Any) -> Tensor:
        """Return the scores of one label at each pixel, (n, height, width), in float64.

        NaN where the label is the ignored one. Not rounded to the grid.
        """
        if y is None:
            raise TypeError("score(x, y) needs the label maps y")
        ((x, y),) = inputs.pairs(x, y, self.model)
        if not len(y):
            raise ValueError("x has no rows")
        buffer = inputs.RowBuffer(len(y))
        start = 0
        for batch in self._batches(x):
            f, slack = self._run(batch, start, self.classes)
            maps = _label_maps(y[start : start + len(f)].to(f.device), f, self.ignore, start)
            scores = self._label_scores(f, slack, maps.labels, slice(None))
            unknown = ~maps.known.to(scores.device)
            buffer.add({"scores": scores.masked_fill_(unknown, math.nan)})
            start += len(f)
        return buffer["scores"]

    # -- using the calibration ------------------------------------------------------------

    def predict_set(self, x: Any, alpha: Any = 0.1, *, share: Any = None) -> PixelSet:
        """Give every pixel a set of labels.

        Parameters
        ----------
        x
            Images, (n, channels, height, width).
        alpha
            What may be missed, in (0, 1). Any value, without calibrating again.
        share
            ``None``: of a new image's labelled pixels a share of at most ``alpha`` is missed on
            average over images. A number in (0, 1]: with probability at least 1 - alpha, at
            least this share of a new image's labelled pixels is covered; 1 means all of them.

        Returns
        -------
        PixelSet
            The mask of labels and the most likely label of every pixel.
        """
        exact = exact_alpha(alpha)
        self._must_be_calibrated()
        level = self._level(exact, share)
        x = inputs.to_tensors(x, self.model)
        rows = inputs.row_count(x)
        if not rows:
            raise ValueError("x has no rows")
        buffer, start = inputs.RowBuffer(rows), 0
        for batch in self._batches(x):
            f, slack = self._run(batch, start, self.classes)
            top = f.argmin(dim=1)
            buffer.add({"mask": self._mask(f, slack, top, level), "prediction": top})
            start += len(f)
        return PixelSet(buffer["mask"], buffer["prediction"])

    def _mask(self, f: Tensor, slack: Tensor | None, top: Tensor, level: float) -> Tensor:
        mask = torch.empty(f.shape, dtype=torch.bool, device=f.device)
        for part in _tiles(f.shape):
            own = None if slack is None else slack[part]
            mask[part] = (self._distance(f[part], own) <= level).to(f.device)
        return mask.scatter_(1, top[:, None], True)

    def _level(self, alpha: Fraction, share: Any) -> float:
        """Look up the largest score of labels in the set; warn where it is infinite."""
        store = self.calibration
        found = store.risk_bin(alpha) if share is None else store.share_bin(alpha, share)
        if found < BINS - 1:
            return float(EDGES[found])
        needed = points_needed(alpha)
        if len(store) < needed:
            reason = (
                f"alpha={float(alpha):g} needs at least {needed} calibration images and there are "
                f"{len(store)}"
            )
        else:
            reason = (
                f"too many scores lie beyond {float(EDGES[-1]):g}, the end of the grid. Where "
                "gradients vanish, a larger floor or another feature helps"
            )
        warnings.warn(f"every set holds all labels: {reason}", FFCPWarning, stacklevel=3)
        return math.inf

    # -- sharing the calibration ----------------------------------------------------------

    def merge(self: Self, other: PixelSets) -> Self:
        """Add the images of another predictor of the same model, calibrated on other images.

        So calibration can be divided over workers and put together here.
        """
        if not isinstance(other, PixelSets):
            raise TypeError(f"cannot merge a {type(other).__name__}")
        if other is self:
            raise ValueError("a predictor cannot be merged with itself: images would count twice")
        self._must_match(other._settings(), "the predictor to merge")
        if not len(other.calibration):
            raise ValueError("the predictor to merge has no calibration")
        if self.classes not in (None, other.classes):
            raise ValueError(
                f"calibrated on {self.classes} classes, the predictor to merge on {other.classes}"
            )
        self.calibration.add(other.calibration.counts)
        self.classes, self.skipped = other.classes, self.skipped + other.skipped
        return self

    def _remembered(self) -> dict[str, Any]:
        return {"classes": self.classes, "skipped": self.skipped}

    def set_extra_state(self, state: Tensor) -> None:
        """Check the settings of a loaded calibration; take over what else it remembers."""
        super().set_extra_state(state)
        saved = files.unpack(state)
        self.classes, self.skipped = saved["classes"], saved["skipped"]


def _with_double_log(model: nn.Module) -> nn.Sequential:
    from ffcp.segmentation import DoubleLog  # here, as that module exports this one's class

    scores = DoubleLog()
    scores.register_forward_pre_hook(_check_logits)
    return nn.Sequential(OrderedDict({_NETWORK: model, "scores": scores}))


def _inside(feature: str) -> str:
    """Name a feature of the user's model as one of the model around it.

    >>> _inside("output"), _inside("input[0]"), _inside("trunk.4")
    ('output', 'input[0]', 'network.trunk.4')
    """
    if feature == OUTPUT or feature.partition("[")[0] == INPUT:
        return feature
    return f"{_NETWORK}.{feature.removeprefix('.')}"  # a dot marks modules named "input"


def _tiles(shape: torch.Size) -> Iterator[tuple[slice, slice, slice]]:
    """Cut (n, classes, height, width) into images, or rows of one, of about a million numbers.

    >>> len(list(_tiles(torch.Size([2, 8, 1024, 1024]))))
    16
    """
    n, classes, height, width = shape
    images = max(1, _BLOCK // (classes * height * width))
    rows = max(1, min(height, _BLOCK // (classes * width)))
    for i in range(0, n, images):
        for j in range(0, height, rows):
            yield slice(i, i + images), slice(None), slice(j, j + rows)


# -- checks ------------------------------------------------------------------------------------


class _Maps(NamedTuple):
    """Label maps, 0 where there is no label, and where there is one."""

    labels: Tensor
    known: Tensor


def _label_maps(y: Tensor, output: Tensor, ignore: int | None, first_row: int = 0) -> _Maps:
    """Check label maps against the output of the model, or a mask, of the same images."""
    if y.is_floating_point() or y.dtype == torch.bool:
        raise TypeError(
            f"labels must be integers, the numbers of classes from 0, got {y.dtype}: "
            "convert them, for example with y.long()"
        )
    n, classes, height, width = output.shape
    if y.shape != (n, height, width):
        raise ValueError(
            f"labels have shape {tuple(y.shape)}, the model's output {tuple(output.shape)}: labels "
            f"must have shape {(n, height, width)}. {_shape_hint(y, classes)}"
        )
    y = y.long()
    known = torch.ones_like(y, dtype=torch.bool) if ignore is None else y != ignore
    outside = known & ((y < 0) | (y >= classes))
    if bool(outside.any()):
        image = int(outside.nonzero()[0, 0])
        values = y[image][outside[image]].unique()[:5].tolist()
        others = "" if ignore is None else f", or the ignored {ignore}"
        hint = ". Pixels without a label: PixelSets(..., ignore=label)" if ignore is None else ""
        raise ValueError(
            f"image {first_row + image} (counted from 0) has labels {values}: the model has "
            f"{classes} classes, so labels go from 0 to {classes - 1}{others}{hint}"
        )
    return _Maps(y.where(known, 0), known)


def _shape_hint(y: Tensor, classes: int) -> str:
    if y.dim() == 4 and y.shape[1] == 1:
        return "Remove the channel with y[:, 0]"
    if y.dim() == 4 and y.shape[1] == classes:
        return "For one-hot maps use y.argmax(dim=1)"
    return (
        "To predict at the size of the labels, end the model in "
        "nn.Upsample(size=(height, width), mode='bilinear'); or shrink the labels with "
        "functional.interpolate(y[:, None].float(), size=..., mode='nearest')[:, 0].long()"
    )


def _check_maps(output: Any) -> None:
    """Refuse outputs that are not maps of several classes."""
    wanted = "PixelSets needs a tensor of shape (n, classes, height, width)"
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the model returned a {type(output).__name__}: {wanted}; wrap the model in a module "
            "whose forward returns it alone, as model(x)['out']"
        )
    if output.dim() != 4:
        raise ValueError(f"the model's output has shape {tuple(output.shape)}: {wanted}")
    if output.shape[1] < 2:
        raise ValueError(
            f"the model's output has shape {tuple(output.shape)}, one class: {wanted}. For one "
            "logit z of foreground return torch.cat([torch.zeros_like(z), z], dim=1)"
        )


def _check_logits(module: nn.Module, args: tuple[Any, ...]) -> None:
    # Before log(-log p) is taken, which would fail in a way that says nothing of the model.
    _check_maps(args[0])


def _exact_share(share: Any) -> Fraction:
    """Read ``share`` as the decimal number the user wrote, and check that it lies in (0, 1].

    >>> _exact_share(0.9), _exact_share(1)
    (Fraction(9, 10), Fraction(1, 1))
    """
    try:
        one = not isinstance(share, bool) and bool(share == 1)
        return Fraction(1) if one else exact_alpha(share)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"share must be a number above 0 and at most 1, got {share!r}: it is the share of an "
            "image's labelled pixels to be covered, and 1 means all"
        ) from None
