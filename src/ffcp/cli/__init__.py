"""The ``ffcp`` command, which the extra ``cli`` brings the packages for."""

from __future__ import annotations

import sys

_EXTRA = ("typer", "rich", "matplotlib")


def main() -> None:
    """Run the command; without the extra, say what to install."""
    try:
        from ffcp.cli.app import app

        app()
    except ModuleNotFoundError as missing:
        package = (missing.name or "").split(".")[0]
        if package not in _EXTRA:
            raise
        sys.exit(
            f"The ffcp command needs {package}, which comes with an extra of this library: "
            "pip install 'ffcp[cli]'"
        )
