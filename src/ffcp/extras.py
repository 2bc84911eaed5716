"""Optional packages: an error that says how to install one, and a progress bar if tqdm is there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_DELAY = 2.0  # seconds before a progress bar is shown


def needed(module: str, extra: str, what: str) -> Any:
    """Import a module of an extra, or say how to install it.

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


@contextmanager
def progress(steps: int, what: str) -> Iterator[Callable[[], object]]:
    """Return a function to call after every step.

    The bar is drawn by tqdm, if that is installed, to a terminal and never into a file.

    >>> with progress(2, "learning") as step:
    ...     _ = step(), step()
    """
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda: None
        return
    # disable=None: no bar unless the stream is a terminal.
    with tqdm(
        total=steps, desc=what, delay=_DELAY, disable=None, leave=False, file=sys.stderr
    ) as bar:
        yield bar.update
