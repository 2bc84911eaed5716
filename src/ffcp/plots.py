"""Pictures of intervals, of fans of levels, and of coverage: by level, by group, by width.

Needs matplotlib: ``pip install 'ffcp[plots]'``. All functions draw into ``ax`` if one is given, and
return the axes they drew into; saving and showing is left to the caller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ffcp import metrics
from ffcp.extras import needed

_BAND, _LINE, _DOT, _MISS = "#4c78a8", "#1f3b57", "#555555", "#d1495b"
_BARS = 80  # intervals drawn one by one; more cannot be told apart
_DOTS = 4000  # targets drawn
_PANELS = 9  # outputs drawn
_ROUGH = 6.0  # ends that go up and down by so many times their range are no line
_SMALL_STEP = 0.05  # of their range, on average: a line again, as the steps of trees are


def intervals(
    interval: Any,
    x: Any = None,
    y: Any = None,
    *,
    output: int | None = None,
    xlabel: str | None = None,
    ylabel: str = "target",
    ax: Any = None,
) -> Any:
    """Draw intervals against a feature, or against the prediction; several levels are a fan.

    Where the ends follow the horizontal axis they are drawn as areas. Where neighbours have very
    different intervals, as against one feature of many, they are drawn one by one, at most 80 of
    them, spread over the axis.

    Parameters
    ----------
    interval : Interval
        An :class:`ffcp.Interval`.
    x : array-like, default=None
        A number for each row, a column of the input, say; by default the prediction.
    y : array-like, default=None
        Targets, drawn as dots; those outside the (widest) interval in red.
    output : int, default=None
        Which of several outputs; by default each has a panel of its own, up to nine.
    xlabel : str, default=None
        Label of the horizontal axis.
    ylabel : str, default="target"
        Label of the vertical axis.
    ax : Axes, default=None
        The axes to draw into.

    Returns
    -------
    Axes, or an array of them if there are several panels.
    """
    centre, lower, upper = _laid_out(interval)
    target = None if y is None else _array(y).reshape(len(centre), -1)
    outputs = list(range(centre.shape[1])) if output is None else [output]
    if len(outputs) > 1 and ax is not None:
        raise ValueError(
            f"the interval has {centre.shape[1]} outputs, and 'ax' is one axes: pass output=..."
        )
    axes = [ax] if ax is not None else _panels(min(len(outputs), _PANELS))
    for number, panel in zip(outputs, axes, strict=False):
        across = centre[:, number] if x is None else _array(x).reshape(-1)
        if len(across) != len(centre):
            raise ValueError(f"x has {len(across)} numbers, the interval {len(centre)} rows")
        y_panel = None if target is None else target[:, number]
        ends = lower[..., number], upper[..., number]
        _draw(panel, across, centre[:, number], *ends, y_panel, interval.alpha)
        panel.set(
            xlabel=xlabel or ("prediction" if x is None else "feature"),
            ylabel=ylabel if len(outputs) == 1 else f"{ylabel} {number}",
        )
    _legend(axes)
    return axes[0] if len(axes) == 1 else np.array(axes, dtype=object)


def ellipses(
    ellipsoid: Any, y: Any = None, *, rows: Sequence[int] = range(12), ax: Any = None
) -> Any:
    """Draw the ellipses of two outputs in their plane; those of several levels are nested.

    Parameters
    ----------
    ellipsoid : Ellipsoid
        An :class:`~ffcp.regression.ellipsoid.Ellipsoid` of two outputs.
    y : array-like, default=None
        Targets (n, 2), drawn as dots; those outside the (widest) ellipse in red.
    rows : sequence of int, default=range(12)
        Which rows to draw; the first twelve by default.
    ax : Axes, default=None
        The axes to draw into.
    """
    ax = _panels(1, size=(4.6, 4.6))[0] if ax is None else ax
    root = np.linalg.cholesky(_array(ellipsoid.correlation))
    angle = np.linspace(0, 2 * math.pi, 181)
    circle = root @ np.stack([np.cos(angle), np.sin(angle)])
    centre, lower, upper = _laid_out(ellipsoid)
    if y is not None:
        inside = _array(ellipsoid.contains(y)).reshape(len(lower), -1).max(axis=0)
    for row in [row for row in rows if row < len(centre)]:
        for half in (upper - lower)[:, row] / 2:
            ax.fill(*(centre[row][:, None] + half[:, None] * circle), color=_BAND, alpha=0.25, lw=0)
        ax.plot(*centre[row], ".", color=_LINE, ms=4)
        if y is not None:
            colour = _DOT if inside[row] else _MISS
            ax.plot(*_array(y)[row], "o", ms=5, color=colour, zorder=3)
    ax.set(xlabel="output 0", ylabel="output 1")
    return ax


def calibration_curve(interval: Any, y: Any, *, missing: bool = False, ax: Any = None) -> Any:
    """Draw the coverage of intervals of several levels against the nominal coverage.

    Bars are 95 % confidence intervals of the measured coverage; on the diagonal both are equal.

    Parameters
    ----------
    interval : Interval
        Intervals, or their ends.
    y : array-like
        Targets, in the shape of the ends.
    missing : bool, default=False
        Whether NaN in ``y`` is a missing target, which does not count.
    ax : Axes, default=None
        The axes to draw into.
    """
    if not isinstance(interval.alpha, tuple):
        raise ValueError(
            "a calibration curve needs intervals of several levels: alpha=(0.5, 0.2, ...)"
        )
    coverages = metrics.coverage(interval, y, missing=missing)
    nominal = 1 - np.array(interval.alpha)
    order = nominal.argsort()
    ax = _panels(1, size=(4.2, 4.2))[0] if ax is None else ax
    ax.plot([0, 1], [0, 1], color="#999999", lw=1, ls="--", label="nominal")
    look = {"fmt": "o-", "ms": 4, "lw": 1.2, "color": _BAND, "label": "measured"}
    ax.errorbar(nominal[order], *_shares([coverages[i] for i in order]), **look)
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="1 - alpha", ylabel="covered", aspect="equal")
    ax.legend(frameon=False, fontsize=8, loc="upper left")
    return ax


def group_coverage(
    interval: Any,
    y: Any,
    groups: Any = None,
    *,
    feature: Any = None,
    slices: int = 3,
    xlabel: str = "group",
    ax: Any = None,
) -> Any:
    """Draw the coverage of each group, with its 95 % interval, and the nominal coverage.

    Parameters
    ----------
    interval : Interval
        As in :func:`ffcp.metrics.group_coverage`.
    y : array-like
        As in :func:`ffcp.metrics.group_coverage`.
    groups, feature : array-like, default=None
        As in :func:`ffcp.metrics.group_coverage`.
    slices : int, default=3
        As in :func:`ffcp.metrics.group_coverage`.
    xlabel : str, default="group"
        Label of the horizontal axis.
    ax : Axes, default=None
        The axes to draw into.

    Returns
    -------
    Axes
    """
    if isinstance(interval.alpha, tuple):
        raise ValueError("coverage of groups is drawn for one level: predict with one alpha")
    coverages = metrics.group_coverage(interval, y, groups, feature=feature, slices=slices).groups
    count = len(coverages)
    ax = _panels(1, size=(max(4.2, 0.7 * count + 2), 3.4))[0] if ax is None else ax
    look = {"fmt": "o", "ms": 5, "lw": 1.4, "capsize": 3, "color": _BAND, "label": "measured"}
    ax.errorbar(range(count), *_shares([*coverages.values()]), **look)
    if interval.alpha is not None:
        ax.axhline(1 - interval.alpha, color="#999999", lw=1, ls="--", label="nominal")
    names = [str(name) for name in coverages]
    turned = {"rotation": 30, "ha": "right"} if max(map(len, names)) > 9 else {}
    ax.set_xticks(range(count), names, **turned)
    ax.set(xlabel=xlabel, ylabel="covered", xlim=(-0.5, count - 0.5), ylim=(None, 1.01))
    ax.legend(frameon=False, fontsize=8, bbox_to_anchor=(1, 1), loc="upper left")
    return ax


def coverage_by_width(interval: Any, y: Any, *, slices: int = 5, ax: Any = None) -> Any:
    """Draw the coverage of the narrowest intervals, of the widest, and of those between.

    Where widths follow the noise all are covered alike. Parameters are those of
    :func:`group_coverage`.

    Parameters
    ----------
    interval : Interval
        Intervals, or their ends.
    y : array-like
        Targets, in the shape of the ends.
    slices : int, default=5
        Number of groups of rows, by width.
    ax : Axes, default=None
        The axes to draw into.
    """
    width = interval.width
    if float(width.max() - width.min()) <= 1e-4 * float(width.max()):  # but for rounding
        raise ValueError("all intervals have the same width: draw group_coverage() by a feature")
    return group_coverage(interval, y, feature=width, slices=slices, xlabel="width", ax=ax)


def wealth(curves: Mapping[str, tuple[Sequence[float], float]], ax: Any = None) -> Any:
    """Draw the wealth of tests of drift on a logarithmic scale.

    Parameters
    ----------
    curves : dict
        For every test the logarithms of its wealth after each row, and the limit of its alarm.
    ax : Axes, default=None
        The axes to draw into.
    """
    ax = _panels(1)[0] if ax is None else ax
    for name, (logs, limit) in curves.items():
        (line,) = ax.plot(np.array(logs) / math.log(10), linewidth=1.6, label=name)
        ax.axhline(math.log10(limit), color=line.get_color(), linestyle="--", linewidth=0.9)
    ax.set(xlabel="row", ylabel="wealth, powers of 10")
    if curves:
        ax.legend(title="test (dashed: its alarm)", fontsize="small", frameon=False)
    return ax


def _shares(coverages: Sequence[metrics.Coverage]) -> tuple[np.ndarray, np.ndarray]:
    """Return shares of covered rows, and the lengths of their error bars below and above."""
    share = np.array([float(coverage) for coverage in coverages])
    below = [coverage - coverage.low for coverage in coverages]
    above = [coverage.high - coverage for coverage in coverages]
    return share, np.clip([below, above], 0, 1)


def _legend(axes: Sequence[Any]) -> None:
    """Draw the legend beside the panels."""
    handles, labels = axes[0].get_legend_handles_labels()
    owner = axes[0].figure if len(axes) > 1 else axes[0]
    place = {"loc": "outside right upper"} if len(axes) > 1 else {"bbox_to_anchor": (1, 1)}
    look = {"frameon": False, "fontsize": 8, "markerscale": 2, "loc": "upper left"}
    owner.legend(handles, labels, **{**look, **place})


def _panels(count: int, size: tuple[float, float] = (7.2, 4.0)) -> list[Any]:
    """Return axes side by side on a light background."""
    pyplot = needed("matplotlib.pyplot", "plots", "plot()")
    columns = 2 if count in (2, 4) else min(3, count)
    rows = math.ceil(count / columns)
    size = size if count == 1 else (3.6 * columns, 2.9 * rows)
    look = {"layout": "constrained", "facecolor": "white"}
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, **look)
    panels = list(axes.flat)
    for extra in panels[count:]:
        figure.delaxes(extra)
    for panel in panels[:count]:
        panel.set_facecolor("white")
        panel.grid(color="#e6e6e6", lw=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    return panels[:count]


def _draw(
    ax: Any,
    x: np.ndarray,
    centre: np.ndarray,
    lower: np.ndarray,
    upper: np.ndarray,
    y: np.ndarray | None,
    alpha: float | Sequence[float] | None,
) -> None:
    """Draw one output: levels (levels, n) from the widest to the narrowest."""
    levels: list[Any] = list(alpha) if isinstance(alpha, Sequence) else [alpha]
    order = np.argsort(x, kind="stable")
    if y is not None:
        _targets(ax, x, y, lower.min(axis=0), upper.max(axis=0))
    low, high = _limits(centre, lower, upper, y)
    is_line = all(_is_line(end[order]) for end in (lower[0], upper[0], centre))
    grid = np.linspace(x.min(), x.max(), _BARS)
    bars = order[np.unique(np.searchsorted(x[order], grid).clip(0, len(x) - 1))]
    for depth, level in enumerate(np.argsort(levels)):  # the widest first
        bottom, top = np.clip(lower[level], low, high), np.clip(upper[level], low, high)
        label = _level_label(levels[level], depth, len(levels))
        if is_line:
            colour = _shade(depth, len(levels))
            ax.fill_between(x[order], bottom[order], top[order], color=colour, lw=0, label=label)
        else:
            # Bars are thin, so none is as light as the lightest area.
            look = {"color": _shade(depth + 1, len(levels) + 1), "label": label, "zorder": 2.8}
            width = 1.6 + 2.4 * depth / len(levels)
            ax.vlines(x[bars], bottom[bars], top[bars], lw=width, **look)
    if is_line:
        ax.plot(x[order], centre[order], color=_LINE, lw=1.2, label="prediction")
    else:
        ax.plot(x[bars], centre[bars], ".", color=_LINE, ms=3, label="prediction", zorder=3.1)
    ax.set_ylim(low, high)


def _shade(depth: int, levels: int) -> tuple[float, ...]:
    """Return the colour of a level: the narrower the interval, the darker."""
    light, dark = np.array([0.82, 0.88, 0.94]), np.array([0.22, 0.39, 0.58])
    share = depth / max(1, levels - 1)
    return tuple(light + share * (dark - light))


def _targets(ax: Any, x: np.ndarray, y: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> None:
    """Draw known targets as dots, of many only some."""
    known = np.flatnonzero(~np.isnan(y))
    shown = known[:: math.ceil(len(known) / _DOTS) or 1]
    inside = ((lower <= y) & (y <= upper))[shown]
    size = 12 if len(shown) < 300 else 5 if len(shown) < 1500 else 2
    for rows, colour, label, zorder in (
        (shown[inside], _DOT, "target", 2.5),
        (shown[~inside], _MISS, "target outside", 3.0),
    ):
        look = {"s": size, "color": colour, "alpha": 0.5, "lw": 0, "zorder": zorder}
        ax.scatter(x[rows], y[rows], label=label, **look)


def _level_label(alpha: float | None, depth: int, levels: int) -> str | None:
    """Return the label of a level; of many, only the widest, the middle and the narrowest."""
    if alpha is None:
        return "interval"
    if levels > 6 and depth not in (0, levels // 2, levels - 1):
        return None
    return f"{100 * (1 - alpha):g} % interval"


def _limits(*parts: np.ndarray | None) -> tuple[float, float]:
    """Return the range of the vertical axis: all finite values, and a margin."""
    values = np.concatenate([part.reshape(-1) for part in parts if part is not None])
    values = values[np.isfinite(values)]
    low, high = float(values.min()), float(values.max())
    margin = 0.04 * (high - low) or 0.5
    return low - margin, high + margin


def _is_line(values: np.ndarray) -> bool:
    """Whether values go up and down by their whole range a few times only, or by small steps."""
    values = values[np.isfinite(values)]
    if len(values) < 3 or np.ptp(values) == 0:
        return True
    steps = np.abs(np.diff(values)) / np.ptp(values)
    return bool(steps.sum() < _ROUGH or steps.mean() < _SMALL_STEP)


def _laid_out(interval: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the prediction (n, m) and the ends (levels, n, m) of intervals."""
    centre = _array(interval.prediction)
    levels = len(interval.lower) if interval.lower.dim() > interval.prediction.dim() else 1
    lower = _array(interval.lower).reshape(levels, len(centre), -1)
    upper = _array(interval.upper).reshape(levels, len(centre), -1)
    return centre.reshape(len(centre), -1), lower, upper


def _array(values: Any) -> np.ndarray:
    array = values.detach().cpu().double().numpy() if isinstance(values, Tensor) else values
    return np.asarray(array, dtype=np.float64)
