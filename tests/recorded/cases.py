"""All cases by name: each builds a small fixed model and data, runs a method, gives values.

Only the public API is used, so cases stay as they are when the library's parts move. A case
with an automatic choice (a layer, a number of steps, a bandwidth, settings of label sets) has
``auto`` in its name and stands in a family of its own, ``..._auto``: which rows choose may
change without anything else changing.
"""

from __future__ import annotations

from tests.recorded import fcp as fcp
from tests.recorded import intervals as intervals
from tests.recorded import labels as labels
from tests.recorded import localized as localized
from tests.recorded import parts as parts
from tests.recorded import pixels as pixels
from tests.recorded.recording import CASES as CASES
from tests.recorded.recording import FAMILIES as FAMILIES
