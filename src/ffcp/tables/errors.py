"""The error for tables and folders of fits that cannot be used."""

from __future__ import annotations


class TableError(ValueError):
    """A table, a folder or an option cannot be used; the message names it and what to do."""
