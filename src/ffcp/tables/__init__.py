"""Prediction intervals for tables, the ``ffcp fit`` command in Python (extra ``tables``).

Examples
--------
>>> from ffcp import tables
>>> fitted = tables.fit("houses.csv", "price")  # doctest: +SKIP
>>> fitted.save("houses.ffcp")  # doctest: +SKIP
>>> intervals = tables.load("houses.ffcp").predict("new.csv")  # doctest: +SKIP
"""

from ffcp.extras import needed

needed("pandas", "tables", "ffcp.tables")

from ffcp.tables.errors import TableError  # noqa: E402 - after saying what is missing
from ffcp.tables.fitted import FittedTable  # noqa: E402
from ffcp.tables.fitting import fit  # noqa: E402
from ffcp.tables.loading import load  # noqa: E402

__all__ = ["FittedTable", "TableError", "fit", "load"]
