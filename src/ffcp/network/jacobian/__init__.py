"""Norms of the rows of the head's Jacobian.

One output needs one backward pass. Of many outputs the rows are taken one by one (``"exact"``),
several at once where windows do not overlap (``"coloured"``), or estimated for all outputs
together by random probes (:class:`Sketch`). :class:`Smooth` averages over perturbed features.
``"auto"`` picks by the head.
"""

from ffcp.network.jacobian.dispatch import take_norms
from ffcp.network.jacobian.norms import (
    AUTO,
    EXACT,
    Method,
    Sketch,
    Smooth,
    checked_method,
    checked_norm,
)

__all__ = [
    "AUTO",
    "EXACT",
    "Method",
    "Sketch",
    "Smooth",
    "checked_method",
    "checked_norm",
    "take_norms",
]
