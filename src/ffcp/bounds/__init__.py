"""Bounds on a head's outputs over a ball around each row: IBP and CROWN.

A head is read once into a list of nodes (`trace`). Every node follows one of three
rules: an affine map, a sum of earlier nodes, or an elementwise activation. `ibp`
pushes intervals forward through that list; `crown` pulls linear functions back.
A new layer needs one small function that returns its rule, and a line in the table of
`ffcp.bounds.rules`. A user-defined module can bound itself, for `ibp` only: give it a method
``bounds(lower, upper)`` that takes elementwise bounds on its input and returns elementwise bounds
on its output.
"""

from ffcp.bounds.crown import crown
from ffcp.bounds.ibp import ibp
from ffcp.bounds.rules import Bounds
from ffcp.bounds.trace import Head, trace

__all__ = ["Bounds", "Head", "crown", "ibp", "trace"]
