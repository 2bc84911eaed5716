"""The ``ffcp`` command, which the extras ``cli`` and ``tables`` bring the packages for."""

from __future__ import annotations

import sys

_TABLES = ("pandas", "pyarrow", "jinja2", "tabm", "rtdl_num_embeddings")
_CLI = ("typer", "rich", "matplotlib")


def main() -> None:
    """Run the command; without the extra, say what to install."""
    try:
        from ffcp.cli.app import app

        app()
    except ModuleNotFoundError as missing:
        package = (missing.name or "").split(".")[0]
        if package not in _CLI + _TABLES:
            raise
        extra = "cli" if package in _CLI else "tables"
        sys.exit(
            f"The ffcp command needs {package}, which comes with an extra of this library: "
            f"pip install 'ffcp[{extra}]'"
        )
