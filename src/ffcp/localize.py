"""Localized conformal prediction: calibration points near the new one count more.

A kernel H in [0, 1] on an embedding of the input gives calibration point i the weight H(x, x_i);
the new point itself carries H(x, x) = 1 at infinity. The plain localized quantile at x is the
1 - alpha quantile of the scores under these weights. It has no guarantee in finite samples.
Two corrections have one:

``"level"`` (after Guan, 2023). Let L_i be the weighted share, around point i, of points with a
smaller score. With the new point among them, L_1, ..., L_(n+1) are exchangeable, so the new L is
at most the k-th smallest with probability 1 - alpha, k the conformal rank. The new point changes
the L of a calibration point by one weight of at most 1, so L_i <= (a_i + 1) / (b_i + 1) with a_i
and b_i its sums over the calibration points alone. The k-th smallest of these bounds is a level
that depends on no test point: the band at x goes to the first score where the running weight
exceeds that share. Guan's own level sits between this one and the same with ``a_i / (b_i + 1)``,
and costs a pass over all calibration points for every test point.

``"random"`` (Hore and Barber, 2023). The weights are taken around a random point near x, drawn
from the kernel as a density.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ffcp.conformal.rank import conformal_rank, exact_alpha, points_needed
from ffcp.quantiles import RunningSums, make_room

KERNELS = ("gaussian", "laplace", "box", "nearest")
AUTO = "auto"
PREDICTION = "prediction"
FEATURE = "feature"
ONE = 2**23  # the weight 1, in whole numbers
_BLOCK = 2**22  # weights held at once: 16 MB
_CACHE = 2**19  # of them worked on at once: they stay in the cache
_ROWS = 2**16  # points made ready at once
LEVEL_ROWS = 5000  # calibration points that set the recalibrated level
_COLUMNS = (16, 128)  # test points at once: fewer are slow, more gain nothing
# Beyond these dimensions and this share of all points as neighbours, a search tree is slower than
# comparing with all points.
_TREE_DIMENSIONS, _TREE_SHARE = 4, 32


@dataclass(frozen=True)
class Localizer:
    """Which calibration points are near: a kernel on an embedding of the input.

    Parameters
    ----------
    kernel
        ``"nearest"``, weight 1 for the nearest calibration points, however far; or, with d the
        Euclidean distance of the embeddings and h the bandwidth, ``"gaussian"`` exp(-d^2 / 2h^2),
        ``"laplace"`` exp(-d / h), ``"box"`` 1 where d <= h.
    on
        The embedding: ``"prediction"``, ``"input"``, the dotted name of a layer, ``"feature"``
        for the layer whose gradient FFLCP takes, or a function from a batch of inputs to a
        tensor of rows. In many dimensions all points are about equally far; a few that matter
        localize better.
    bandwidth
        The bandwidth h; for ``"nearest"`` the number of neighbours. ``"auto"`` chooses it on
        points that do not calibrate.

    Examples
    --------
    >>> Localizer("box", on="prediction", bandwidth=0.5)
    Localizer(kernel='box', on='prediction', bandwidth=0.5)
    """

    kernel: str = "nearest"
    on: str | Callable[[Any], Any] = PREDICTION
    bandwidth: float | str = AUTO

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"unknown kernel {self.kernel!r}: choose one of {', '.join(KERNELS)}")
        if not (isinstance(self.on, str) or callable(self.on)):
            raise TypeError(f"on must name an embedding or be a function, got {self.on!r}")
        if self.bandwidth == AUTO:
            return
        if isinstance(self.bandwidth, (str, bool)) or not 0 < self.bandwidth < math.inf:
            raise ValueError(f"bandwidth must be a positive number or 'auto', got {self.bandwidth}")
        if self.kernel == "nearest" and self.bandwidth != int(self.bandwidth):
            raise ValueError(
                f"the bandwidth of kernel 'nearest' is the number of neighbours, a whole number; "
                f"got {self.bandwidth}"
            )

    @property
    def described(self) -> dict[str, Any]:
        """What a saved calibration remembers of it; a function by its name."""
        on = self.on if isinstance(self.on, str) else f"function {self.on.__qualname__}"
        return {"kernel": self.kernel, "on": on}


def log_kernel(kernel: str, squared: Tensor) -> Tensor:
    """Logarithm of the kernel at squared distances in units of the bandwidth; overwrites them.

    >>> log_kernel("laplace", torch.tensor([0.0, 4.0]))
    tensor([-0., -2.])
    """
    if kernel == "gaussian":
        return squared.mul_(-0.5)
    if kernel == "laplace":
        return squared.sqrt_().neg_()
    return torch.where(squared <= 1, 0.0, -math.inf).to(squared.dtype)


def whole(log_weights: Tensor) -> Tensor:
    """Round weights, given by their logarithms, to multiples of 2**-23; overwrites them.

    The result is in these units, and still floating point: a copy to integers cuts it off.

    >>> whole(torch.tensor([0.0, -2.0, -100.0])).int()
    tensor([8388608, 1135275,       0], dtype=torch.int32)
    """
    # Below exp(-17) all is rounded to zero; exp() of less would only make slow tiny numbers.
    weights = log_weights.clamp_(-17.0, 0.0).exp_()
    return torch.add(weights.new_tensor(0.5), weights, alpha=ONE, out=weights)


class Points:
    """Embedded points to which distances are taken, in blocks.

    Parameters
    ----------
    embedding
        The points (n, e).
    unit
        What distances are measured in.
    order
        Rows in the order in which distances are wanted.
    fine
        Smallest distance that matters, in these units.
    """

    def __init__(
        self,
        embedding: Tensor,
        unit: float = 1.0,
        order: Tensor | None = None,
        fine: float = 1.0,
    ) -> None:
        self._unit = unit
        # Distances come from |a|^2 + |b|^2 - 2ab, which cancels; centring makes it harmless
        # unless distances of interest are tiny beside the spread of the points.
        self._centre = embedding.mean(dim=0, dtype=torch.float64)
        spread = max((float(p.abs().max()) for p in self._moved(embedding)), default=0.0)
        near = spread * math.sqrt(embedding.shape[1]) < 100 * fine
        self._type = torch.float32 if near else torch.float64
        order = torch.arange(len(embedding)) if order is None else order
        # Two more columns make one product of all three terms, in one pass.
        self._points = torch.ones(len(embedding), embedding.shape[1] + 2, dtype=self._type)
        for rows, some in zip(self._points.split(_ROWS), order.split(_ROWS), strict=True):
            rows[:, :-2] = next(self._moved(embedding[some]))
            rows[:, -2] = rows[:, :-2].square().sum(dim=1)

    def __len__(self) -> int:
        return len(self._points)

    def _moved(self, x: Tensor) -> Iterator[Tensor]:
        for part in x.split(_ROWS):
            yield (part.double() - self._centre) / self._unit

    def moved(self, x: Tensor) -> Tensor:
        """Express other points as these are."""
        return torch.cat(list(self._moved(x))).to(self._type)

    def squared_distances(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks (rows, b) of squared distances to the moved points ``x``, (b, e)."""
        factors = torch.cat([-2 * x, x.new_ones(len(x), 2)], dim=1)
        factors[:, -1] = x.square().sum(dim=1)
        transposed = factors.T.contiguous()
        size = max(1, _CACHE // max(1, len(x)))
        block = torch.empty(min(size, len(self)), len(x), dtype=self._type)
        for start in range(0, len(self), size):
            rows = slice(start, min(start + size, len(self)))
            found = block[: rows.stop - rows.start]
            torch.mm(self._points[rows], transposed, out=found)
            yield rows, found.clamp_min_(0)


class Sums(Protocol):
    """How the weights around some points lie over the sorted scores."""

    @property
    def total(self) -> Tensor:
        """Weight of all calibration points, whole numbers, one per point asked."""

    def reach(self, target: Tensor) -> Tensor:
        """Position of the first score where the running weight reaches the target, or n."""

    def before(self, row: Tensor) -> Tensor:
        """Weight of all scores before a position."""


class Around(Protocol):
    """Weighs calibration points around other points; ``own`` is the weight 1 in its numbers."""

    own: int

    def sums(self, x: Tensor, output: int) -> Sums:
        """Weigh all calibration points, in the order of one output's scores, around ``x``."""


class Kernel:
    """Weights by a kernel of the distance, see :class:`Localizer`.

    Parameters
    ----------
    embedding
        Calibration points (n, e).
    orders
        For each output the rows by ascending score.
    kernel, bandwidth
        As in :class:`Localizer`.
    """

    def __init__(
        self, embedding: Tensor, orders: list[Tensor], kernel: str, bandwidth: float
    ) -> None:
        self.kernel, self.bandwidth = kernel, bandwidth
        self.own = 1 if kernel == "box" else ONE
        # In the order of the first output, so that a single output needs no rearranging.
        # A box is cut in the units that were given: a point on its edge is in.
        units = (1.0, bandwidth) if kernel == "box" else (bandwidth, 1.0)
        self.points = Points(embedding, units[0], orders[0], fine=units[1])
        place = torch.empty_like(orders[0])
        place[orders[0]] = torch.arange(len(place))
        self._places = [place[order] for order in orders]
        self._last: tuple[Tensor, Tensor] | None = None

    def sums(self, x: Tensor, output: int) -> RunningSums:
        """Weigh the points around ``x``, (b, e)."""
        weights = self._weights(x)
        return RunningSums(weights if output == 0 else weights[self._places[output]])

    def _weights(self, x: Tensor) -> Tensor:
        if self._last is None or self._last[0] is not x:  # the outputs share the weights
            self._last = None  # free before the next ones are made
            self._last = (x, self._weigh(self.points.moved(x)))
        return self._last[1]

    def _weigh(self, x: Tensor) -> Tensor:
        weights = torch.empty(len(self.points), len(x), dtype=torch.int32)
        for rows, squared in self.points.squared_distances(x):
            if self.kernel == "box":
                weights[rows] = squared <= self.bandwidth**2
            else:
                weights[rows] = whole(log_kernel(self.kernel, squared))
        return weights

    def around_random(
        self, x: Tensor, random: np.random.Generator, output: int
    ) -> tuple[RunningSums, Tensor]:
        """Weigh all points, and ``x`` itself, around a random neighbour of x."""
        if self._last is None or self._last[0] is not x:
            self._last = None
            moved = self.points.moved(x)
            step = self._draw(random, *x.shape).to(moved.dtype)
            if self.kernel == "box":  # within reach of the neighbour, as x is
                self._own = torch.ones(len(x), dtype=torch.int64)
                weights = self._weigh(moved + self.bandwidth * step)
            else:
                weights, self._own = self._weigh_by_ratio(moved + step, step)
            self._last = (x, weights)
        weights = self._last[1]
        return RunningSums(weights if output == 0 else weights[self._places[output]]), self._own

    def _weigh_by_ratio(self, centre: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Weigh points, and those ``step`` away, relative to the largest weight of each column.

        Only ratios matter here, and in many dimensions the centre is far from everything.
        """
        own = log_kernel(self.kernel, step.square().sum(dim=1))
        logs = torch.empty(len(self.points), len(centre), dtype=centre.dtype)
        for rows, squared in self.points.squared_distances(centre):
            logs[rows] = log_kernel(self.kernel, squared)
        largest = torch.maximum(own, logs.amax(dim=0))
        weights = torch.empty(logs.shape, dtype=torch.int32)
        size = max(1, _CACHE // max(1, len(centre)))
        for some, part in zip(logs.split(size), weights.split(size), strict=True):
            part.copy_(whole(some.sub_(largest)))
        return weights, whole(own - largest).long()

    def _draw(self, random: np.random.Generator, rows: int, dimensions: int) -> Tensor:
        """Draw steps from the kernel as a density, in units of the bandwidth."""
        normal = random.standard_normal((rows, dimensions))
        if self.kernel == "gaussian":
            return torch.from_numpy(normal)
        direction = normal / np.linalg.norm(normal, axis=1, keepdims=True)
        if self.kernel == "laplace":
            length = random.gamma(dimensions, 1.0, (rows, 1))
        else:
            length = random.random((rows, 1)) ** (1 / dimensions)
        return torch.from_numpy(direction * length)


class Nearest:
    """Weight 1 for the nearest calibration points, whatever their distance."""

    own = 1

    def __init__(self, embedding: Tensor, orders: list[Tensor], neighbours: int) -> None:
        if neighbours > len(embedding):
            raise ValueError(
                f"there are only {len(embedding)} calibration points, fewer than the "
                f"{neighbours} neighbours asked for: lower the bandwidth"
            )
        self.neighbours = neighbours
        self._find = _neighbour_search(embedding, neighbours)
        self._ranks = [torch.empty_like(order) for order in orders]
        for ranks, order in zip(self._ranks, orders, strict=True):
            ranks[order] = torch.arange(len(order))
        self._last: tuple[Tensor, Tensor] | None = None

    def sums(self, x: Tensor, output: int) -> NearestSums:
        """Find the neighbours of ``x``, (b, e)."""
        if self._last is None or self._last[0] is not x:
            self._last = (x, self._find(x, self.neighbours))
        return NearestSums(self._ranks[output][self._last[1]], len(self._ranks[output]))

    def sums_without(self, x: Tensor, rows: Tensor, output: int) -> NearestSums:
        """Find one neighbour fewer of calibration points ``rows``, themselves left out."""
        found = self._find(x, self.neighbours)
        # Copies of a point may push it out of its own list; then the farthest goes.
        itself = found == rows[:, None]
        itself[:, -1] |= ~itself.any(dim=1)
        others = found[~itself].view(len(found), -1)
        return NearestSums(self._ranks[output][others], len(self._ranks[output]))


class NearestSums:
    """Neighbours as positions (b, k) among the sorted scores, each of weight 1."""

    def __init__(self, positions: Tensor, n: int) -> None:
        self._positions = positions.sort(dim=1).values
        self._n = n

    @property
    def total(self) -> Tensor:
        """The number of neighbours of each point."""
        return torch.full((len(self._positions),), self._positions.shape[1])

    def reach(self, target: Tensor) -> Tensor:
        """Position of the target-th neighbour among the scores, or n."""
        width = self._positions.shape[1]
        if not width:
            return torch.full((len(self._positions),), self._n)
        found = self._positions.gather(1, target.clamp(1, width)[:, None] - 1)[:, 0]
        return found.where(target <= width, self._n)

    def before(self, row: Tensor) -> Tensor:
        """Count the neighbours with a score before a position."""
        return (self._positions < row[:, None]).sum(dim=1)


def _neighbour_search(embedding: Tensor, neighbours: int) -> Callable[[Tensor, int], Tensor]:
    """Return a search for the rows of the nearest points: with an index where that is faster."""
    if embedding.shape[1] == 1:
        return _search_sorted(embedding[:, 0])
    few = neighbours <= len(embedding) // _TREE_SHARE
    if few and embedding.shape[1] <= _TREE_DIMENSIONS:
        try:
            from sklearn.neighbors import KDTree
        except ImportError:  # scikit-learn is optional; comparing with all gives the same
            pass
        else:
            tree = KDTree(embedding.numpy())
            return lambda x, k: torch.from_numpy(
                tree.query(x.numpy(), k, return_distance=False, sort_results=True)
            )
    return _compare_all(embedding)


def _search_sorted(values: Tensor) -> Callable[[Tensor, int], Tensor]:
    """On a line the nearest points stand side by side: find where they begin, by bisection."""
    line, rows = values.sort(stable=True)

    def search(x: Tensor, k: int) -> Tensor:
        at = x[:, 0]
        low = torch.zeros(len(at), dtype=torch.int64)
        high = torch.full_like(low, len(line) - k)
        while bool((low < high).any()):
            middle = (low + high) // 2
            # The window moves on while its first point is farther than the one behind its last.
            behind = line[(middle + k).clamp_max(len(line) - 1)]
            on = (at - line[middle] > behind - at) & (low < high)
            low, high = torch.where(on, middle + 1, low), torch.where(on, high, middle)
        found: Tensor = rows[low[:, None] + torch.arange(k)]
        return found

    return search


def _compare_all(embedding: Tensor) -> Callable[[Tensor, int], Tensor]:
    points = Points(embedding, fine=0.01 * float(embedding.std(dim=0).max()))

    def search(x: Tensor, k: int) -> Tensor:
        distances = np.empty((len(x), len(points)), dtype=np.float32)
        for rows, squared in points.squared_distances(points.moved(x)):
            distances[:, rows] = squared.T.numpy()
        # numpy's vectorised partition of values, then who is within: torch.topk, which carries
        # indices along, takes three times as long.
        last = np.partition(distances, k - 1, axis=1)[:, k - 1 : k]
        within = distances <= last
        for row in np.flatnonzero(within.sum(axis=1) > k):  # equal distances at the edge
            edge = np.flatnonzero(distances[row] == last[row])
            within[row, edge[k - within[row].sum() :]] = False
        return torch.from_numpy(within.nonzero()[1].reshape(len(x), k))

    return search


@dataclass(frozen=True)
class Level:
    """Bounds on the shares L_i of the module's docstring, ascending, as fractions."""

    numerators: Tensor
    denominators: Tensor

    def at(self, alpha: Any) -> Fraction | None:
        """Give the recalibrated level, or None where there are too few points for any."""
        k = conformal_rank(len(self.numerators), alpha)
        if k > len(self.numerators):
            return None
        return Fraction(int(self.numerators[k - 1]), int(self.denominators[k - 1]))


def plain_target(total: Tensor, alpha: Any) -> Tensor:
    """Weight that the plain 1 - alpha quantile must reach, exactly: ceil((1 - alpha) total).

    >>> plain_target(torch.tensor([10, 11]), 0.1)
    tensor([ 9, 10])
    """
    missed = exact_alpha(alpha)
    share = 1 - missed
    return _exactly(total, lambda w: -((-w * share.numerator) // share.denominator))


def level_target(total: Tensor, level: Fraction) -> Tensor:
    """Weight that must be reached so that it exceeds the share ``level`` of the total.

    >>> level_target(torch.tensor([10, 11]), Fraction(9, 10))
    tensor([10, 10])
    """
    return _exactly(total, lambda w: (w * level.numerator) // level.denominator + 1)


def _exactly(total: Tensor, target: Callable[[Any], Any]) -> Tensor:
    # Python's whole numbers: the products pass 64 bits.
    return torch.from_numpy(target(total.numpy().astype(object)).astype(np.int64))


class LocalStore(nn.Module):
    """Calibration scores with their embeddings; thresholds that depend on where one asks.

    Points stay in the order they came, on the CPU: scores in float64, embeddings in float32.

    >>> store = LocalStore()
    >>> store.replace(torch.arange(40.0)[:, None], torch.arange(40.0)[:, None])
    >>> x = torch.tensor([[10.0], [30.0]])
    >>> store.threshold(0.2, x, "box", bandwidth=5.0, guarantee="none")[:, 0]
    tensor([14., 34.], dtype=torch.float64)
    """

    scores: Tensor
    embedding: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scores", torch.empty(0, 0, dtype=torch.float64))
        self.register_buffer("embedding", torch.empty(0, 0))
        self._known: dict[Any, Any] = {}  # worked out once, until the points change

    def __len__(self) -> int:
        return len(self.scores)

    def replace(self, scores: Tensor, embedding: Tensor) -> None:
        """Keep these points, scores (n, m) and embeddings (n, e), and no others."""
        self.scores = scores.detach().to("cpu", torch.float64, copy=True)
        self.embedding = embedding.detach().to("cpu", torch.float32, copy=True)
        self._known = {}

    def add(self, scores: Tensor, embedding: Tensor) -> None:
        """Keep these points as well."""
        if not len(self):
            self.replace(scores, embedding)
            return
        self._check_width(embedding)
        if scores.shape[1] != self.scores.shape[1]:
            raise ValueError(
                f"the store has scores for {self.scores.shape[1]} outputs, got {scores.shape[1]}"
            )
        self.replace(
            torch.cat([self.scores, scores.detach().cpu().double()]),
            torch.cat([self.embedding, embedding.detach().cpu().float()]),
        )

    def threshold(
        self,
        alpha: Any,
        x: Tensor,
        kernel: str,
        bandwidth: float,
        guarantee: str,
        random: np.random.Generator | None = None,
    ) -> Tensor:
        """Give the localized quantiles (b, m) at embedded points ``x``, (b, e).

        ``guarantee`` is ``"none"``, ``"level"`` or ``"random"``; the last draws from ``random``.
        """
        self._check_width(x)
        x = x.detach().to("cpu", torch.float32)
        around = self.around(kernel, bandwidth)
        outputs = self.scores.shape[1]
        ends = [self._sorted_scores(output) for output in range(outputs)]
        found = torch.empty(len(x), outputs, dtype=torch.float64)
        for rows in _blocks(len(x), len(self)):
            part = x[rows]
            for output in range(outputs):
                if guarantee == "random":
                    assert isinstance(around, Kernel)
                    assert random is not None
                    sums, own = around.around_random(part, random, output)
                    target = plain_target(sums.total + own, alpha)
                    found[rows, output] = ends[output][sums.reach(target)]
                    continue
                near = around.sums(part, output)
                target = self._target(near.total + around.own, alpha, around, guarantee, output)
                found[rows, output] = ends[output][near.reach(target)]
        return found

    def _target(
        self, total: Tensor, alpha: Any, around: Around, guarantee: str, output: int
    ) -> Tensor:
        if guarantee == "none":
            return plain_target(total, alpha)
        level = self.level(around, output).at(alpha)
        # Without a level nothing is enough: more than all there is.
        return total + 1 if level is None else level_target(total, level)

    def around(self, kernel: str, bandwidth: float) -> Kernel | Nearest:
        """Give the weights that a kernel puts on these points."""
        orders = [self._order(output) for output in range(self.scores.shape[1])]

        def make() -> Kernel | Nearest:
            if kernel == "nearest":
                return Nearest(self.embedding, orders, int(bandwidth))
            return Kernel(self.embedding, orders, kernel, bandwidth)

        key = ("around", kernel, bandwidth)
        if key not in self._known:  # another bandwidth: what belongs to the last one can go
            last = [k for k in self._known if k[0] in ("around", "level")]
            for old in last:
                del self._known[old]
        found: Kernel | Nearest = self._once(key, make)
        return found

    def level(self, around: Kernel | Nearest | Around, output: int) -> Level:
        """Work out how the scores lie among those around them, for the recalibrated level."""
        found: Level = self._once(("level", around, output), lambda: self._level(around, output))
        return found

    def _level(self, around: Any, output: int) -> Level:
        # Any rows that were picked without looking are exchangeable with a new point.
        few = np.random.default_rng(0).permutation(len(self))[:LEVEL_ROWS]
        picked = torch.from_numpy(few)
        left = torch.searchsorted(
            self._sorted_scores(output)[:-1], self.scores[picked, output].contiguous()
        )
        smaller, everyone = torch.empty_like(left), torch.empty_like(left)
        for rows in _blocks(len(picked), len(self)):
            x = self.embedding[picked[rows]]
            if isinstance(around, Nearest):
                # The new point may push out the farthest neighbour, and take its place.
                near: Sums = around.sums_without(x, picked[rows], output)
                everyone[rows] = near.total + 1
            else:
                near = around.sums(x, output)
                everyone[rows] = near.total
            smaller[rows] = near.before(left[rows])
        bounds = smaller + around.own, everyone + around.own
        order = (bounds[0].double() / bounds[1].double()).argsort()
        return Level(bounds[0][order], bounds[1][order])

    def _order(self, output: int) -> Tensor:
        order: Tensor = self._once(
            ("order", output), lambda: self.scores[:, output].argsort(stable=True)
        )
        return order

    def _sorted_scores(self, output: int) -> Tensor:
        """Ascending scores of one output, and infinity behind the last."""
        beyond = self.scores.new_full((1,), math.inf)
        ends: Tensor = self._once(
            ("scores", output),
            lambda: torch.cat([self.scores[self._order(output), output], beyond]),
        )
        return ends

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _check_width(self, embedding: Tensor) -> None:
        if embedding.shape[1] != self.embedding.shape[1]:
            raise ValueError(
                f"calibrated with embeddings of {self.embedding.shape[1]} numbers, got "
                f"{embedding.shape[1]}"
            )

    def _apply(self, fn: Any, recurse: bool = True) -> LocalStore:
        return self  # stays where it is, as it is

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        make_room(self, state_dict, prefix)
        self._known = {}
        super()._load_from_state_dict(state_dict, prefix, *args)


def _blocks(rows: int, points: int) -> Iterator[slice]:
    fewest, most = _COLUMNS
    size = max(fewest, min(most, _BLOCK // max(1, points)))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


@dataclass(frozen=True)
class BandwidthTrial:
    """How one bandwidth did on the rows set aside: the smaller the loss, the better."""

    bandwidth: float
    loss: float
    infinite: float


@dataclass(frozen=True)
class BandwidthChoice:
    """Which bandwidth was chosen, on how many rows, and how all candidates did.

    ``loss`` is the quantile loss of the localized quantile of each row, the row itself left out,
    on the ranks of the scores; ``infinite`` the share of rows with too few points around them.
    """

    bandwidth: float
    trials: tuple[BandwidthTrial, ...]
    rows: int
    alpha: float

    def __str__(self) -> str:
        lines = [
            f"bandwidth {self.bandwidth:.4g}, chosen on {self.rows} rows at alpha={self.alpha}"
        ]
        lines += [
            f"  {trial.bandwidth:<10.4g} loss {trial.loss:.5f}  infinite {trial.infinite:.1%}"
            for trial in self.trials
        ]
        return "\n".join(lines)


def choose_bandwidth(
    kernel: str, scores: Tensor, embedding: Tensor, alpha: Any, planned: int
) -> BandwidthChoice:
    """Choose the bandwidth whose local quantiles fit best, on points that do not calibrate.

    Every point is judged by the localized quantile of all others, under the quantile loss.
    Scores count by their rank: their quantiles are the same, and one huge score does not
    decide. A bandwidth that leaves a point without enough others around it is taken only if
    all do. The largest candidates hardly localize at all, so plain conformal prediction is
    among them; of bandwidths that do equally well, up to chance, the widest is taken.

    Parameters
    ----------
    kernel
        As in :class:`Localizer`.
    scores, embedding
        Of the choosing points: (n, m) and (n, e).
    alpha
        Level at which quantiles are compared.
    planned
        How many points will calibrate: the more there are, the smaller a neighbourhood may be.

    Examples
    --------
    >>> x = torch.linspace(0, 1, 200)[:, None]
    >>> steps = (x > 0.5).double() + torch.rand(200, 1, generator=torch.manual_seed(0)) / 10
    >>> choose_bandwidth("gaussian", steps, x, alpha=0.1, planned=1000).bandwidth < 0.2
    True
    """
    n = len(scores)
    if n < 3:
        raise ValueError(
            f"{n} rows are too few to choose a bandwidth: give more rows, or a bandwidth"
        )
    squared = torch.cdist(embedding.double(), embedding.double()).square()
    squared.fill_diagonal_(math.inf)  # no point judges itself
    level = float(1 - exact_alpha(alpha))
    trials, losses = [], []
    for bandwidth, weights in _candidates(kernel, squared, planned, points_needed(alpha)):
        judged = [
            _judge(weights, scores[:, output], level, planned / n)
            for output in range(scores.shape[1])
        ]
        loss, infinite = (torch.stack(part).mean(dim=0) for part in zip(*judged, strict=True))
        losses.append(loss)
        trials.append(BandwidthTrial(bandwidth, float(loss.mean()), float(infinite.mean())))
    best = _widest_of_the_best(trials, losses)
    return BandwidthChoice(best.bandwidth, tuple(trials), n, float(exact_alpha(alpha)))


def _widest_of_the_best(trials: list[BandwidthTrial], losses: list[Tensor]) -> BandwidthTrial:
    """Take the widest that is not worse than the best by more than a standard error.

    More points stand behind a wider neighbourhood.
    """
    fewest = min(trial.infinite for trial in trials)
    finite = [i for i, trial in enumerate(trials) if trial.infinite == fewest]
    best = losses[min(finite, key=lambda i: trials[i].loss)]
    excess = [losses[i] - best for i in finite]
    errors = [float(e.std()) / math.sqrt(len(e)) for e in excess]
    good = [i for i, e, se in zip(finite, excess, errors, strict=True) if float(e.mean()) <= se]
    return trials[max(good)]


def _candidates(
    kernel: str, squared: Tensor, planned: int, fewest: int
) -> Iterator[tuple[float, Tensor]]:
    """Yield bandwidths, from narrow to hardly local, with the weights they give."""
    n = len(squared)
    if kernel == "nearest":
        places = squared.argsort(dim=1).argsort(dim=1)
        shares = {max(fewest, round(planned * 2.0 ** (-step / 2))) for step in range(13)}
        for neighbours in sorted(k for k in shares if k <= planned):
            yield float(neighbours), (places < math.ceil(neighbours * n / planned)).double()
        return
    finite = squared[squared.isfinite()]
    middle = math.sqrt(float(finite.median())) or math.sqrt(float(finite.mean())) or 1.0
    for step in range(-8, 7):
        bandwidth = middle * 2.0 ** (step / 2)
        yield bandwidth, log_kernel(kernel, squared / bandwidth**2).exp_()


def _judge(weights: Tensor, scores: Tensor, level: float, ratio: float) -> tuple[Tensor, Tensor]:
    """Quantile loss of every point's local quantile, on ranks, and whether it is infinite."""
    n = len(scores)
    order = scores.argsort()
    running = (weights[:, order] * ratio).cumsum(dim=1)
    target = level * (running[:, -1] + 1)
    found = (running < target[:, None]).sum(dim=1)
    infinite = found >= n
    rank = torch.empty(n, dtype=torch.float64)
    rank[order] = (torch.arange(n) + 1.0).double() / n
    miss = rank - (found.clamp_max(n - 1) + 1.0) / n
    return torch.maximum(level * miss, (level - 1) * miss), infinite.double()


def enough_bandwidth(points: Tensor, x: Tensor, kernel: str, start: float, needed: float) -> float:
    """Find the smallest bandwidth that puts the weight ``needed`` around each of a few points.

    >>> points = torch.arange(10.0)[:, None]
    >>> round(enough_bandwidth(points, torch.zeros(1, 1), "box", start=0.1, needed=4.0), 2)
    3.0
    """
    squared = torch.cdist(x.double(), points.double()).square()

    def enough(bandwidth: float) -> bool:
        weights = log_kernel(kernel, squared / bandwidth**2).exp_()
        return bool((weights.sum(dim=1) >= needed).all())

    low, high = start, start
    while not enough(high):
        low, high = high, 2 * high
        if high > 1e30:
            return math.inf
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
