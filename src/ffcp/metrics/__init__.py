"""Metrics of prediction intervals and sets: coverage, with its uncertainty, and size.

Functions of intervals take any tuple that starts with ``(lower, upper)``, as tensors or arrays.
With several outputs a row counts by the share of its outputs that are covered; with ``joint=True``
it is covered if all of them are; with a number like 0.9, if at least that share is. Intervals of
several levels have one more dimension, the first, and every score is a list. With
``missing=True`` a NaN in ``y`` is a missing target, which does not count; with ``joint=True`` or
a share its whole row does not count, unless ``"known"`` restricts it to the known outputs.
"""

from ffcp.metrics.excess import ExcessRisk, excess_risk
from ffcp.metrics.groups import cut, group_coverage, size_stratified_coverage, tertiles
from ffcp.metrics.intervals import coverage, crps, interval_score, mean_length, pinball_loss
from ffcp.metrics.sets import (
    class_coverage,
    class_coverage_gap,
    mean_set_size,
    median_set_size,
    set_coverage,
    singleton_hit_ratio,
    size_stratified_violation,
)
from ffcp.metrics.shares import Coverage, GroupCoverage, clopper_pearson, wilson
from ffcp.metrics.slabs import worst_slab_coverage

__all__ = [
    "Coverage",
    "ExcessRisk",
    "GroupCoverage",
    "class_coverage",
    "class_coverage_gap",
    "clopper_pearson",
    "coverage",
    "crps",
    "cut",
    "excess_risk",
    "group_coverage",
    "interval_score",
    "mean_length",
    "mean_set_size",
    "median_set_size",
    "pinball_loss",
    "set_coverage",
    "singleton_hit_ratio",
    "size_stratified_coverage",
    "size_stratified_violation",
    "tertiles",
    "wilson",
    "worst_slab_coverage",
]
