"""Which cases give another result than was recorded first, on purpose, and why.

A case named here is compared with ``values_changed/`` instead of ``values/``: what was recorded
first stays as it is. To change a result on purpose:

1. name the case here, with the reason;
2. run ``python -m tests.recorded.record``, which writes the new result to ``values_changed/``;
3. commit both.
"""

from __future__ import annotations

CHANGED: dict[str, str] = {}
