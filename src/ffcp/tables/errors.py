"""What is wrong with a table or with the folder of a fit, in words that say what to do."""

from __future__ import annotations


class TableError(ValueError):
    """A table, a folder or an option that cannot be used; says which, why, and what to do."""
