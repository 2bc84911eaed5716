"""Optional packages: an error that says how to install one."""

from __future__ import annotations

import importlib
from typing import Any


def needed(module: str, extra: str, what: str) -> Any:
    """Import a module of an extra; raise ImportError with the command that installs it.

    >>> needed("no_such_package", "frames", "to_frame()")
    Traceback (most recent call last):
    ImportError: to_frame() needs no_such_package, which is not installed: pip install
    'ffcp[frames]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{what} needs {package}, which is not installed: pip install 'ffcp[{extra}]'"
        ) from error
