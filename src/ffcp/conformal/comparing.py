"""The nearest of all points, found by comparing with each of them.

Distances are products of matrices in float64, rounded to float32, and of equal ones those of the
first rows count as smaller. Products in float32 take half the time and are off by at most an error
that is known. So the k-th smallest of them says of almost every point whether it is among the k
nearest. The distances of the few that lie within the errors of it are taken again, in full. Where
they are many, as among copies or in small clusters, all products are taken in float64.

With many dimensions the points that are nearest in float32 come from faiss, if it is installed.
What they say is compared again in the same way, so that neighbours are the same with and without.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from ffcp.conformal.weights import Places

_EVERY = 16  # of so many distances one is looked at, to say how far neighbours are
_UNSURE = 64  # so many distances of one point are taken again, at most
_AGREEING = 64  # so many of all points are, to see that products are as exact as float32 is
_FEW = 2**12  # with fewer points than this, products take too little time
_TRIED = (4, 32)  # points that say whether float32 decides enough: fewer where there are many
_ENOUGH = 0.85  # of these; for the rest, all is done twice
_NUMBERS = 2**22  # distances held at once to try that
_PAIRS = 2**20  # coordinates worked on at once where distances are taken again
_SMALL, _LARGE = 1e-36, 1e36  # between these squares float32 is as exact as its digits
_WIDE = 2**10  # with fewer dimensions than this, faiss takes longer than products do

InFull = Callable[[np.ndarray, np.ndarray], np.ndarray]  # numbers, by their rows and columns
Near = Callable[[Tensor, int], "Candidates"]  # of moved points, and how many are wanted
Columns = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of candidates, by row and place there


class EveryPoint:
    """Finds the nearest of the points (n, e), of which ``neighbours`` will be wanted.

    ``way`` is how those are found that are nearest in float32; the faster one if it is not given.
    """

    def __init__(
        self, embedding: Tensor, neighbours: int, way: Callable[[Places], Near] | None = None
    ) -> None:
        self._embedding = embedding
        self._places = Places(embedding, fine=0.0)
        self._near = (way or fastest)(self._places.rounded())
        self._longest = self._places.longest
        self._fine = 2.0**-24 * self._places.typical
        self._is_rough_enough = len(embedding) >= _FEW and self._is_mostly_decided(neighbours)

    def _is_mostly_decided(self, neighbours: int) -> bool:
        fewest, most = _TRIED
        tried = max(fewest, min(most, _NUMBERS // len(self._embedding)))
        some = self._embedding[:: max(1, len(self._embedding) // tried)]
        return bool(self._by_rough(some, neighbours)[1].mean() > _ENOUGH)

    def __call__(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Give the rows of the k nearest points to each of ``x``, and their squared distances."""
        distances = self._distances(x)
        rows = smallest(distances, k)
        near = np.take_along_axis(distances, rows, axis=1)
        return torch.from_numpy(rows), torch.from_numpy(near).double()

    def rows(self, x: Tensor, k: int) -> Tensor:
        """Give the rows alone: the same ones, in less time."""
        if not self._is_rough_enough:
            return torch.from_numpy(smallest(self._distances(x), k))
        rows, is_decided = self._by_rough(x, k)
        if not is_decided.all():
            rest = torch.from_numpy(~is_decided)
            rows[~is_decided] = smallest(self._distances(x[rest]), k)
        return torch.from_numpy(rows)

    def _distances(self, x: Tensor) -> np.ndarray:
        moved = self._places.moved(x)
        distances: np.ndarray = self._places.from_each(moved).numpy()
        # Far from the centre products are off by more than points are apart there.
        error = (x.shape[1] + 8) * 2.0**-53 * 4 * moved.square().sum(dim=1)
        far = np.flatnonzero((error > self._fine).numpy())
        in_full = _in_full(x.numpy(), self._embedding.numpy())
        every = np.arange(distances.shape[1])
        for row in far:  # one by one: the pairs of all of them would need much memory
            distances[row] = in_full(np.full_like(every, row), every)
        return distances

    def _by_rough(self, x: Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Give rows (b, k) by products in float32, and for which of ``x`` these decide."""
        moved = self._places.moved(x)
        near = self._near(moved, k)
        # Points as near as the last are no longer than |x| + sqrt(last). In units of 2**-24 of
        # (|x| + |point|)^2, a sum of e + 2 products is off by e + 2, in whatever order it is taken,
        # and what was rounded before and after by less than 5: by more than that is allowed for.
        own = moved.norm(dim=1).numpy()
        size = (own + np.minimum(own + np.sqrt(near.last.clip(0)), self._longest)) ** 2
        error = 1.2 * (x.shape[1] + 8) * 2.0**-24 * np.minimum(size, _LARGE) + _SMALL
        in_full = _in_full(x.numpy(), self._embedding.numpy())
        rows, is_decided = near.first(2 * error, in_full)
        # Copies of x are as far away as products in float64 are off: these decide.
        is_decided &= (size < _LARGE) & (near.last > 2 * error)
        # Torch can be told to take products in fewer digits than float32 has.
        row, column, values = near.some(_AGREEING, np.flatnonzero(is_decided))
        agree = bool((np.abs(values - in_full(row, column)) <= error[row]).all())
        return rows, is_decided & agree


def fastest(rough: Places) -> Near:
    """Choose how the points that are nearest in float32 are found."""
    # Elsewhere faiss and torch bring two libraries for threads, which can end the process.
    if rough.coordinates.shape[1] >= _WIDE and sys.platform == "linux":
        with suppress(ImportError):
            return Faiss(rough)
    return Products(rough)


class Products:
    """Finds candidates among the products with all points."""

    def __init__(self, rough: Places) -> None:
        self._rough = rough

    def __call__(self, moved: Tensor, k: int) -> Candidates:
        """Find those of moved points."""
        return among(self._rough.products(moved).numpy(), k)


class Faiss:
    """Lets faiss find them, which does not keep the distances of all points.

    They are sums of the same products, taken in another order, and off by no more.
    """

    def __init__(self, rough: Places) -> None:
        import faiss

        points = rough.coordinates.numpy()
        self._index = faiss.IndexFlatL2(points.shape[1])
        self._index.add(points)

    def __call__(self, moved: Tensor, k: int) -> Candidates:
        """Find those of moved points: the k nearest, and some more that may be in doubt."""
        count = min(k + _UNSURE, self._index.ntotal)
        values, columns = self._index.search(moved.float().numpy(), count)
        order = columns.argsort(axis=1)  # of equal numbers, the first columns count
        columns = np.take_along_axis(columns, order, axis=1)
        values = np.take_along_axis(values, order, axis=1)
        # Where squares overflow, faiss gives what is no number, and no column.
        is_one = np.isfinite(values) & (columns >= 0)
        values = np.where(is_one, values, np.inf)
        # Of several that are as far as the last, some may be missing.
        most = np.nextafter(values.max(axis=1, keepdims=True), np.float32(-np.inf))
        bound = most if count < self._index.ntotal else np.full_like(most, np.inf)
        bound[~is_one.all(axis=1)] = -np.inf
        return Candidates(values, is_one, lambda row, place: columns[row, place], bound, k)


def _in_full(x: np.ndarray, points: np.ndarray) -> InFull:
    """Take the squared distances of some points from some of ``x`` in float64, and round them."""
    size = _PAIRS // x.shape[1] + 1

    def in_full(row: np.ndarray, column: np.ndarray) -> np.ndarray:
        squared = np.empty(len(row), dtype=np.float32)
        for start in range(0, len(row), size):
            some = slice(start, start + size)
            apart = np.subtract(x[row[some]], points[column[some]], dtype=np.float64)
            with np.errstate(over="ignore"):  # infinitely far, in float32
                squared[some] = np.einsum("ij,ij->i", apart, apart)
        return squared

    return in_full


class Candidates:
    """Small numbers of each row of a matrix (b, n), the k smallest among them.

    Parameters
    ----------
    values
        The numbers (b, c), of each row in the order of their columns, and infinities after them.
    is_one
        Which of ``values`` are such numbers (b, c).
    columns
        Says in which columns they stand.
    bound
        No number of a row (b, 1) up to this one is left out. Where it is too low, the k smallest
        are not known.
    k
        How many are wanted.
    """

    def __init__(
        self, values: np.ndarray, is_one: np.ndarray, columns: Columns, bound: np.ndarray, k: int
    ) -> None:
        self._values, self._is_one, self._columns = values, is_one, columns
        self._bound, self._k = bound, k
        #: The k-th smallest of each row.
        self.last = np.partition(values, k - 1, axis=1)[:, k - 1]

    def some(self, count: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Give the rows, columns and values of so many candidates, from rows that have k."""
        row = np.resize(rows, count if len(rows) else 0)
        place = np.arange(len(row)) % self._k
        return row, self._columns(row, place), self._values[row, place]

    def first(
        self, doubt: np.ndarray | float = 0.0, in_full: InFull | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Give the columns (b, k) of the smallest, in order; of equal ones those that come first.

        Numbers that differ from the k-th smallest by ``doubt`` at most are compared ``in_full``.
        Say also for which rows all this could be done; the columns of others mean nothing.
        """
        values = self._values
        upper = (self.last + doubt).astype(values.dtype)[:, None]
        inside = self._is_one & (values <= upper)
        counts = inside.sum(axis=1)
        is_known = (counts >= self._k) & (upper <= self._bound)[:, 0]
        rows = np.flatnonzero(is_known & (counts > self._k))
        if len(rows):
            lower = (self.last - doubt).astype(values.dtype)[rows, None]
            unsure = inside[rows] & (values[rows] >= lower)
            if in_full is not None:
                is_few = unsure.sum(axis=1) <= _UNSURE
                is_known[rows[~is_few]] = False
                rows, unsure = rows[is_few], unsure[is_few]
            inside[rows] = self._decided(rows, inside[rows] & ~unsure, unsure, in_full)
        inside[~is_known] = np.arange(inside.shape[1]) < self._k
        row = np.arange(len(inside))[:, None]
        place = np.flatnonzero(inside).reshape(-1, self._k) - row * inside.shape[1]
        return self._columns(row, place), is_known

    def _decided(
        self, rows: np.ndarray, sure: np.ndarray, unsure: np.ndarray, in_full: InFull | None
    ) -> np.ndarray:
        """Add as many of those that are unsure as are missing, the smallest first."""
        missing = (self._k - sure.sum(axis=1))[:, None]
        if in_full is None:  # they are equal
            first: np.ndarray = sure | (unsure & (unsure.cumsum(axis=1) <= missing))
            return first
        row, place = unsure.nonzero()
        values = in_full(rows[row], self._columns(rows[row], place))
        place = place[np.lexsort((values, row))]  # which keeps the order of equal ones
        is_missing = np.arange(len(row)) - np.searchsorted(row, row) < missing[row, 0]
        sure[row[is_missing], place[is_missing]] = True
        return sure


def among(numbers: np.ndarray, k: int, bound: np.ndarray | None = None) -> Candidates:
    """Give the candidates among all numbers (b, n): those up to a bound that lets few through."""
    count, width = numbers.shape
    bound = _bound(numbers, k) if bound is None else bound
    flat = _true_places(numbers <= bound)
    starts = np.searchsorted(flat, np.arange(count + 1) * width)
    counts = np.diff(starts)[:, None]
    is_one = np.arange(counts.max(initial=k)) < counts
    values = np.full(is_one.shape, np.inf, dtype=numbers.dtype)
    values[is_one] = numbers.reshape(-1)[flat]
    places = np.append(flat, np.zeros(k, dtype=flat.dtype))

    def columns(row: np.ndarray, place: np.ndarray) -> np.ndarray:
        result: np.ndarray = places[starts[row] + place] - row * width
        return result

    return Candidates(values, is_one, columns, bound, k)


def smallest(numbers: np.ndarray, k: int) -> np.ndarray:
    """Give the places of the k smallest numbers of each row; of equal ones, those that come first.

    >>> smallest(np.array([[3.0, 1.0, 2.0, 1.0, 1.0]]), 2)
    array([[1, 3]])
    """
    places, is_known = among(numbers, k).first()
    if not is_known.all():
        rest = numbers[~is_known]
        places[~is_known] = among(rest, k, np.full((len(rest), 1), np.inf)).first()[0]
    return places


def _bound(numbers: np.ndarray, k: int) -> np.ndarray:
    """Find, for each row, a number that some more than k of its numbers do not exceed."""
    count, width = numbers.shape
    groups, place = width // _EVERY, k + _UNSURE // 2  # some in doubt beside the k-th, too
    if 2 * place <= groups:
        # The smallest of every group: where more than k of these do not exceed it, it is no guess.
        parts = numbers[:, : groups * _EVERY].reshape(count, _EVERY, groups)
        least = parts.min(axis=1)
    else:  # a guess: of so many, groups would be too few
        least = numbers[:, ::_EVERY]
        expected = k / _EVERY
        place = int(expected + 3 * expected**0.5 + 3)
        if place >= least.shape[1] // 2:
            return np.full((count, 1), np.inf)
    return np.partition(least, place, axis=1)[:, place : place + 1]


def _true_places(mask: np.ndarray) -> np.ndarray:
    """Give the places where a mask is true, of all its numbers: few, and found eight at once.

    >>> _true_places(np.arange(20) % 7 == 1)
    array([ 1,  8, 15])
    """
    flat = mask.reshape(-1)
    end = flat.size - flat.size % 8
    words = flat[:end].view(np.uint64)
    some = np.flatnonzero(words != 0)
    inside = np.flatnonzero(words[some].view(np.bool_))
    places = 8 * some[inside >> 3] + (inside & 7)
    return np.concatenate([places, end + np.flatnonzero(flat[end:])])
