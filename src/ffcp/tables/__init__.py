"""Your own table in, bands out: the ``ffcp fit`` command in Python, by the extra ``tables``.

Examples
--------
>>> from ffcp import tables
>>> fitted = tables.fit("houses.csv", "price")  # doctest: +SKIP
>>> fitted.save("houses.ffcp")  # doctest: +SKIP
>>> bands = tables.load("houses.ffcp").predict("new.csv")  # doctest: +SKIP
"""

from ffcp.tables.errors import TableError
from ffcp.tables.fitted import FittedTable
from ffcp.tables.fitting import fit
from ffcp.tables.loading import load

__all__ = ["FittedTable", "TableError", "fit", "load"]
