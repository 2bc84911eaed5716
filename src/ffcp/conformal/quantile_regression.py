"""Linear quantile regression with one further row, solved exactly by the simplex method.

With scores s_i, features f_i and level l, a coefficient vector b is sought that minimises

    sum_i pinball(s_i - f_i b) - g b

where the tilt g is 0 for the calibration rows alone, and t f for a further row with the features f
whose dual variable is t: such a row pulls the plane up (t > 0) or down. The optimum goes through as
many rows as there are features, the basis. All other rows have the dual variable l (above the
plane) or l - 1 (below); those of the basis follow from sum_i eta_i f_i + g = 0, and the basis is
optimal if they lie between l - 1 and l. Otherwise the plane lets go of the row that is farthest
beyond, moves away from it as long as that pays, and goes through another row from then on.

Rows of one call that come to the same basis take the next step together.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

Array = np.ndarray
Basis = tuple[int, ...]
_RANK = 1e-9  # directions with a smaller share of the largest singular value are dropped
_BEYOND = 1e-11  # by which a dual variable may pass its bounds
# Duals are lowered by this: at ties, as with rank (n + 1) (1 - alpha), rounding would decide.
_BELOW = 1e-9
_NUDGE = 1e-11  # of a score, by which ties are broken
_MOST_STEPS = 10_000
_NEAR = 32  # rows of a line search that are sorted at first: few are passed


class Design:
    """Features and a constant, reduced to independent columns.

    Parameters
    ----------
    features : array
        The features of rows, (n, p). Collinear ones are joined: the linear functions of what is
        left are the same.

    Examples
    --------
    >>> design = Design(np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))  # the sum is the constant
    >>> design.rows.shape
    (3, 2)
    >>> design.of(np.array([[1.0, 0.0], [1.0, 1.0]]))[1]  # the second is none of these functions
    array([ True, False])
    """

    def __init__(self, features: Array) -> None:
        self._unit = np.abs(features).max(axis=0, initial=0.0)
        self._unit[self._unit == 0] = 1.0
        whole = self._with_constant(features)
        _, sizes, directions = np.linalg.svd(whole, full_matrices=False)
        kept = sizes > _RANK * sizes.max(initial=0.0)
        self._back = directions[kept]
        self._to = directions[kept].T * (np.sqrt(len(features)) / sizes[kept])
        self.rows = whole @ self._to

    def of(self, features: Array) -> tuple[Array, Array]:
        """Return features (b, k) in these columns, and which rows (b,) have no others."""
        whole = self._with_constant(features)
        lost = whole - whole @ self._back.T @ self._back
        inside = np.abs(lost).max(axis=1) <= 1e3 * _RANK * np.abs(whole).max(axis=1)
        return whole @ self._to, inside

    def _with_constant(self, features: Array) -> Array:
        return np.column_stack([np.ones(len(features)), features / self._unit])


class Vertex(NamedTuple):
    """A plane through the rows of a basis."""

    basis: Array
    inverse: Array  # of the features of these rows
    residuals: Array
    pull: Array  # the sum of dual variables times features, over all other rows


class QuantileRegression:
    """The quantile regression of scores, solved once, and where a further row moves it.

    Parameters
    ----------
    design : Design
        The features of the rows.
    scores : array
        Their scores, (n,), finite.
    level : float
        The share of rows below, 1 - alpha.

    Examples
    --------
    >>> scores = np.arange(1.0, 10.0)
    >>> regression = QuantileRegression(Design(np.empty((9, 0))), scores, level=0.8)
    >>> new = np.empty((2, 0))
    >>> regression.thresholds(new, np.array([0.8, -0.2])).round(6)  # rank 0.8 (9 + 1) = 8
    array([8., 7.])
    """

    def __init__(self, design: Design, scores: Array, level: float) -> None:
        self._design, self._scores, self._level = design, scores, level
        sizes = np.abs(scores)
        usual = np.median(sizes[sizes > 0]) if sizes.any() else 1.0
        # Equal scores would make the walk cycle; a tiny difference avoids that.
        noise = np.random.default_rng(0).random(len(scores))
        self._nudged = scores + _NUDGE * (usual + sizes) * noise

    def thresholds(self, features: Array, duals: Array) -> Array:
        """Return the largest score of a further row whose dual variable stays below a number.

        ``features`` (b, p) are those of the rows, ``duals`` (b,) the numbers. Infinite where no
        score is large enough.
        """
        new, inside = self._design.of(features)
        valid, found = inside.nonzero()[0], np.full(len(new), np.inf)
        if not len(valid):
            return found
        for basis, done in self._walk(self._solved, new[valid] * (duals[valid, None] - _BELOW)):
            rows, through = valid[done], list(basis)
            weights = new[rows] @ np.linalg.inv(self._design.rows[through])
            found[rows] = weights @ self._scores[through]
            # Rounded up: a score that equals the threshold must not exceed it.
            found[rows] += 1e-12 * (np.abs(weights) @ np.abs(self._scores[through]))
        return found

    @cached_property
    def _solved(self) -> Basis:
        """The optimal basis of the rows alone."""
        rows = self._design.rows
        ((basis, _),) = self._walk(self._first(), np.zeros((1, rows.shape[1])))
        return basis

    def _first(self) -> Basis:
        """Return independent rows near the plane of least squares, moved to the level."""
        rows = self._design.rows
        errors = self._nudged - rows @ np.linalg.lstsq(rows, self._nudged, rcond=None)[0]
        places = np.abs(errors - np.quantile(errors, self._level)).argsort().argsort()
        rest, basis = rows / (1 + places)[:, None], []
        for _ in range(rows.shape[1]):
            basis.append(int(np.square(rest).sum(axis=1).argmax()))
            unit = rest[basis[-1]] / np.linalg.norm(rest[basis[-1]])
            rest = rest - np.outer(rest @ unit, unit)
        return tuple(sorted(basis))

    def _walk(self, start: Basis, tilts: Array) -> Iterator[tuple[Basis, Array]]:
        """Yield optimal bases, each with the numbers of the tilts (b, k) that it is optimal for.

        Tilts for which there is none are left out.
        """
        waiting = {start: [np.arange(len(tilts))]}
        for _ in range(_MOST_STEPS):
            following: dict[Basis, list[Array]] = {}
            for basis, parts in waiting.items():
                rows, vertex = np.concatenate(parts), self._vertex(basis)
                etas = -(vertex.pull + tilts[rows]) @ vertex.inverse
                beyond = np.maximum(etas - self._level, self._level - 1 - etas)
                places = beyond.argmax(axis=1)
                sizes = beyond[np.arange(len(rows)), places]
                are_high = etas[np.arange(len(rows)), places] > self._level
                are_done = sizes <= _BEYOND
                if are_done.any():
                    yield basis, rows[are_done]
                edges = np.where(are_done, -1, 2 * places + are_high)
                for edge in np.unique(edges[~are_done]).tolist():
                    along = edges == edge
                    entering = self._along(vertex, edge // 2, 2 * (edge % 2) - 1, sizes[along])
                    for row in np.unique(entering[entering >= 0]).tolist():
                        new = [*basis[: edge // 2], *basis[edge // 2 + 1 :], row]
                        moved = rows[along][entering == row]
                        following.setdefault(tuple(sorted(new)), []).append(moved)
            waiting = following
            if not waiting:
                return

    def _vertex(self, basis: Basis) -> Vertex:
        through, rows = np.array(basis), self._design.rows
        inverse = np.linalg.inv(rows[through])
        residuals = self._nudged - rows @ (inverse @ self._nudged[through])
        etas = np.where(residuals > 0, self._level, self._level - 1)
        etas[through] = 0
        return Vertex(through, inverse, residuals, etas @ rows)

    def _along(self, vertex: Vertex, place: int, sign: int, slopes: Array) -> Array:
        """Return the rows at which the step from a vertex ends; -1 where it never does.

        The row at ``place`` of the basis comes to lie above the plane (sign 1) or below. The
        objective falls with each of ``slopes`` at first, and with less from every row on that is
        passed.
        """
        moves = self._design.rows @ (-sign * vertex.inverse[:, place])
        moves[vertex.basis] = 0
        passed = (vertex.residuals * moves > 0).nonzero()[0]
        times = vertex.residuals[passed] / moves[passed]
        for most in (_NEAR, len(passed)):
            near = np.argpartition(times, most)[:most] if most < len(passed) else slice(None)
            order = np.argsort(times[near])
            rows = passed[near][order]
            sums = np.abs(moves[rows]).cumsum()
            if len(sums) and sums[-1] >= slopes.max():
                break
        places = np.searchsorted(sums, slopes - _BEYOND / 2)
        return np.append(rows, -1)[places]
