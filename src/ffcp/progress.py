"""A progress bar for work that takes longer than two seconds."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_DELAY = 2.0  # seconds before a bar is shown
_HIDDEN: ContextVar[bool] = ContextVar("hidden", default=False)


@contextmanager
def progress(steps: int | None, what: str, unit: str = "steps") -> Iterator[Callable[..., object]]:
    """Return a function to call after every step, or with a number of them.

    The bar is drawn by tqdm, if that is installed, to a terminal and never into a file.

    >>> with progress(2, "learning") as step:
    ...     _ = step(), step()
    """
    stream = sys.stderr
    is_shown = stream is not None and stream.isatty() and not _HIDDEN.get()
    try:
        tqdm = importlib.import_module("tqdm").tqdm if is_shown else None
    except ImportError:
        tqdm = None
    if tqdm is None:
        yield lambda count=1: None
        return
    with tqdm(
        total=steps, desc=what, unit=f" {unit}", delay=_DELAY, leave=False, file=stream
    ) as bar:
        yield bar.update


@contextmanager
def hidden() -> Iterator[None]:
    """Disable progress bars in the block, because the caller draws one."""
    token = _HIDDEN.set(True)
    try:
        yield
    finally:
        _HIDDEN.reset(token)
