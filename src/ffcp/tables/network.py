"""The network for tables: TabM, an ensemble that shares most of its weights.

TabM is from Gorishniy, Kotelnikov and Babenko (2025); numbers are embedded piecewise linearly.
Both are the authors' own packages. It is sized for a laptop: 16 members of width 192 instead of 32
of width 512. Besides the prediction it can return quantiles of a target.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ffcp.regression.learned.nested import KNOTS
from ffcp.regression.learned.network import ascending, unordered
from ffcp.tables.trees import TargetTrees

_BINS, _FEWEST, _IN_ALL = 48, 16, 50_000  # per number; fewer if there are many numbers
_EMBEDDING, _LEAST, _WIDEST = 12, 2, 1400  # per number; fewer if rows would be wider than this
_FEW = 3000  # with fewer rows dropout is larger, against overfitting
_MEMBERS, _WIDTH = 16, 192
QUANTILES = "quantiles"  # the name of the layer of quantiles
_BENDS = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0)  # strengths of the transform that shortens tails ...
_KURTOSIS = 7.0  # ... until the kurtosis is at most this; that of a normal distribution is 3
_ROWS = 2048  # rows per pass through all members
_SHARES = tuple(i / 10 for i in range(10))  # shares of trees; never all: no gradients
_LARGEST = 30.0  # beyond all targets, with a finite hyperbolic sine


@dataclass(frozen=True)
class Shape:
    """The sizes of a network, which, with its weights, determine it."""

    numbers: int
    flags: int
    outputs: int
    bins: tuple[int, ...]
    dropout: float = 0.1
    embedding: int = _EMBEDDING
    has_quantiles: bool = False
    trees: tuple[int, ...] = ()  # numbers of trees, leaves and splits

    def __post_init__(self) -> None:
        """Raise ValueError for impossible sizes."""
        sizes = (self.outputs, self.embedding, *self.bins, *self.trees)
        if len(self.trees) not in (0, 3):
            raise ValueError(f"'trees' must be empty or three sizes, got {len(self.trees)}")
        small = all(0 < size <= 2**16 for size in sizes) and 0 <= self.dropout < 1
        if not small or min(self.numbers, self.flags) < 0 or len(self.bins) != self.numbers:
            raise ValueError("the sizes of the network are impossible")


class QuantileHead(nn.Module):
    """Quantiles of the target, (n, knots), from those of the target with shortened tails.

    Members and trees learn the transformed target ``asinh((y - middle) / unit) / deviation``; its
    quantiles are the transformed quantiles of the target.
    """

    bend: Tensor

    def __init__(self, bend: tuple[float, float, float] = (0.0, 1.0, 1.0)) -> None:
        super().__init__()
        self.register_buffer("bend", torch.tensor(bend, dtype=torch.float32))

    @classmethod
    def of(cls, y: Tensor) -> QuantileHead:
        """Return the head with the weakest sufficient transform for these targets."""
        y = y.double()
        middle = y.median()
        spread = (y - middle).abs().mean() or torch.ones(())  # all targets may be equal
        for bend in _BENDS:
            transformed = ((y - middle) * bend / spread).asinh()
            if _kurtosis(transformed) <= _KURTOSIS:
                break
        deviation = float(transformed.std(correction=0)) or 1.0
        return cls((float(middle), float(spread) / bend, deviation))

    def transform(self, y: Tensor) -> Tensor:
        """Return transformed targets, as members learn them."""
        middle, unit, deviation = self.bend
        transformed: Tensor = ((y - middle) / unit).asinh() / deviation
        return transformed

    def forward(self, transformed: Tensor) -> Tensor:
        """Return quantiles of the target, (n, knots), from those of transformed targets."""
        middle, unit, deviation = self.bend
        scaled = (transformed * deviation).clamp(-_LARGEST, _LARGEST)
        quantiles: Tensor = scaled.sinh() * unit + middle
        return quantiles


class TableNetwork(nn.Module):
    """A network with one output, or one logit per class: the mean over the members.

    The first ``shape.numbers`` columns of a row are real-valued, the others 0 or 1. With
    ``shape.has_quantiles`` the layer ``quantiles`` returns those of the target, at ``KNOTS``.

    >>> x = torch.cat([torch.randn(50, 2), torch.ones(50, 1)], dim=1)
    >>> network = TableNetwork.for_rows(x, numbers=2, outputs=1).eval()
    >>> network(x).shape, network.members(x)[0].shape
    (torch.Size([50, 1]), torch.Size([50, 16, 1]))
    """

    def __init__(self, shape: Shape, edges: list[Tensor]) -> None:
        super().__init__()
        from rtdl_num_embeddings import PiecewiseLinearEmbeddings
        from tabm import EnsembleView, LinearEnsemble, make_tabm_backbone

        self.shape = shape
        embed = partial(PiecewiseLinearEmbeddings, activation=False, version="B")
        with warnings.catch_warnings():  # a column of two values has one bin, on purpose
            warnings.filterwarnings("ignore", "The .* feature has just two bin edges")
            self.embed = embed(edges, shape.embedding) if edges else None
        chunks = [shape.embedding] * shape.numbers + [1] * shape.flags
        self.view = EnsembleView(k=_MEMBERS)
        self.backbone = make_tabm_backbone(
            d_in=sum(chunks),
            n_blocks=2,
            d_block=_WIDTH,
            dropout=shape.dropout,
            k=_MEMBERS,
            start_scaling_init="normal" if edges else "random-signs",
            start_scaling_init_chunks=chunks,
        )
        self.output = LinearEnsemble(_WIDTH, shape.outputs, k=_MEMBERS)
        self.is_led_by_quantiles = False  # if so, the mean's loss does not train the backbone
        if shape.has_quantiles:
            self.spread = LinearEnsemble(_WIDTH, len(KNOTS), k=_MEMBERS)
            self.quantiles = QuantileHead()
        self.float()  # the type of rows, whatever torch's default type is
        columns = shape.numbers + shape.flags
        self.trees = TargetTrees(shape.trees, columns) if shape.trees else None

    @classmethod
    def for_rows(
        cls, x: Tensor, numbers: int, outputs: int, y: Tensor | None = None
    ) -> TableNetwork:
        """Return an untrained network for these training rows.

        With their targets it has quantiles, initially those of all targets.
        """
        edges = _edges(x[:, :numbers])
        bins = tuple(len(edge) - 1 for edge in edges)
        embedding = max(_LEAST, min(_EMBEDDING, _WIDEST // max(1, numbers)))
        sizes = (numbers, x.shape[1] - numbers, outputs, bins)
        dropout = 0.3 if len(x) < _FEW else 0.1
        shape = Shape(*sizes, dropout=dropout, embedding=embedding, has_quantiles=y is not None)
        network = cls(shape, edges)
        if y is not None:
            network.quantiles = QuantileHead.of(y)
            # Squared errors of a few outliers would dominate the gradient.
            network.is_led_by_quantiles = _kurtosis(y.double()) > _KURTOSIS
            transformed = network.quantiles.transform(y[: 2**20]).double()
            with torch.no_grad():
                network.spread.weight.zero_()
                network.spread.bias.copy_(unordered(torch.quantile(transformed, KNOTS)[None]))
        return network

    @classmethod
    def of_shape(cls, shape: Shape) -> TableNetwork:
        """Return a network of these sizes, whose weights are still to be loaded."""
        # The edges are buffers, so they are loaded with the weights.
        return cls(shape, [torch.linspace(0, 1, count + 1) for count in shape.bins])

    def members(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the members' outputs, (n, members, outputs), and their raw quantiles, if any."""
        numbers = self.shape.numbers
        inputs = x[:, numbers:]
        if self.embed is not None:
            inputs = torch.cat([self.embed(x[:, :numbers]).flatten(1), inputs], dim=1)
        hidden = self.backbone(self.view(inputs))
        raw = self.spread(hidden) if self.shape.has_quantiles else None
        if self.training and self.is_led_by_quantiles:
            hidden = hidden.detach()
        return self.output(hidden), raw

    def means(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the means over the members: (n, outputs), and transformed quantiles, if any."""
        outputs, raw = self.members(x)
        return outputs.mean(dim=1), None if raw is None else ascending(raw).mean(dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean over the members, mixed with the trees, shape (n, outputs)."""
        mean, quantiles = self.means(x)
        if quantiles is None:
            return mean
        if self.trees is not None:
            (tree_mean, tree_quantiles), share = self.trees(x), self.trees.share
            mean = mean.lerp(tree_mean.to(mean.dtype), share[0].to(mean.dtype))
            dtype = quantiles.dtype
            quantiles = quantiles.lerp(tree_quantiles.to(dtype), share[1].to(dtype))
        self.quantiles(quantiles)  # users read the output of this layer
        return mean

    @torch.no_grad()
    def join(self, trees: TargetTrees, x: Tensor, y: Tensor) -> None:
        """Add trees, with the shares in mean and quantiles that are best on validation rows."""
        parts = [self.eval().means(rows) for rows in x.split(_ROWS)]
        mean = torch.cat([means for means, _ in parts]).double()
        quantiles = torch.cat([part for _, part in parts if part is not None]).double()
        tree_mean, tree_quantiles = trees(x)
        y, target = y[:, None], self.quantiles.transform(y)[:, None].double()
        errors = [float((mean.lerp(tree_mean, s) - y).square().mean()) for s in _SHARES]
        losses = [
            float(pinball(target - quantiles.lerp(tree_quantiles, s)).mean()) for s in _SHARES
        ]
        best = [_SHARES[errors.index(min(errors))], _SHARES[losses.index(min(losses))]]
        trees.share.copy_(torch.tensor(best))
        self.trees, self.shape = trees, replace(self.shape, trees=trees.sizes)


def pinball(error: Tensor) -> Tensor:
    """Return the pinball loss of errors (..., knots): targets minus quantiles."""
    return error * (KNOTS.to(error.dtype) - (error < 0).to(error.dtype))


def _edges(numbers: Tensor) -> list[Tensor]:
    """Return the edges of bins of every column, with about equal numbers of training rows."""
    if not numbers.shape[1]:
        return []
    bins = max(_FEWEST, min(_BINS, _IN_ALL // numbers.shape[1]))
    steps = np.linspace(0, 1, min(bins, max(2, len(numbers) // 4)) + 1, dtype=np.float32)
    edges = []
    for block in numbers.T.split(64):
        for column in torch.from_numpy(np.quantile(block.numpy(), steps, axis=1)).T:
            ends = column.unique()
            edges.append(ends if len(ends) > 1 else torch.stack([ends[0], ends[0] + 1]))
    return edges


def _kurtosis(values: Tensor) -> float:
    """Return the kurtosis: 3 for a normal distribution."""
    squares = (values - values.mean()).square()
    return float(squares.square().mean() / squares.mean().square())


class Placed(nn.Module):
    """A network that uses its own columns of a wider row, with outputs in the target's units.

    So networks of several folds, each with its own columns and units, take the same rows.
    """

    units: Tensor

    def __init__(self, network: TableNetwork, start: int, centre: float, scale: float) -> None:
        super().__init__()
        self.network, self.start = network, start
        self.register_buffer("units", torch.tensor([centre, scale], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Return the prediction in float64, shape (n, 1)."""
        shape = self.network.shape
        columns = x[:, self.start : self.start + shape.numbers + shape.flags]
        output: Tensor = self.network(columns).double() * self.units[1] + self.units[0]
        return output

    def extra_repr(self) -> str:
        """Return the start of its columns for the module's repr."""
        return f"start={self.start}"
