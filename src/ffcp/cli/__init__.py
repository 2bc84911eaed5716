"""The ``ffcp`` command; it needs the extra ``cli``, and ``tables`` for the commands on tables."""

from __future__ import annotations

import sys

_TABLES = ("pandas", "pyarrow", "jinja2", "tabm", "rtdl_num_embeddings")
_CLI = ("typer", "rich", "matplotlib")


def main() -> None:
    """Run the command; exit with installation instructions if a package is missing."""
    try:
        from ffcp.cli.app import app

        app()
    except ImportError as missing:
        package = (missing.name or "").split(".")[0]
        if "pip install" in str(missing):
            sys.exit(str(missing))
        if package not in _CLI + _TABLES:
            raise
        extra = "cli" if package in _CLI else "tables"
        sys.exit(
            f"The ffcp command needs the package {package!r}. Install it with: "
            f"pip install 'ffcp[{extra}]'"
        )
