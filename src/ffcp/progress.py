"""A progress bar for work that takes longer than two seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_DELAY = 2.0  # seconds before a bar is shown


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
