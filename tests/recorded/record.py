"""Record the values of cases: ``python -m tests.recorded.record [--again NAME ...]``.

Cases that have no recorded values yet are added to ``values/``; cases named in ``changed.py``
are recorded in ``values_changed/``. What is recorded already stays, unless it is named after
``--again`` (or with ``--again all``). Every case is run again with all numbers moved a
little; one that jumps rests on a near-tie, would differ between machines, and is refused.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable

import torch

import ffcp
from tests.recorded import material
from tests.recorded.cases import CASES
from tests.recorded.changed import CHANGED
from tests.recorded.recording import VALUES, VALUES_CHANGED, Values, differences, read, run, write

_SHAKEN = {1e-14: 1e-10, 1e-12: 1e-7}  # how far numbers are moved, and results may move


def steady(name: str) -> Values:
    """Run a case and make sure that tiny changes of its numbers change it no more than a little."""
    found = run(name)
    for size, allowed in _SHAKEN.items():
        with material.shaken(size):
            jumps = differences(run(name), found, allowed)
        if jumps:
            raise SystemExit(f"{name} rests on a near-tie:\n" + "\n".join(jumps[:10]))
    return found


def main(again: Iterable[str] = ()) -> None:
    """Record what is missing, what changed on purpose, and what is to be recorded again."""
    torch.set_num_threads(1)
    warnings.simplefilter("error", ffcp.FFCPWarning)
    again = set(CASES) if "all" in again else set(again)
    unknown = (again | set(CHANGED)) - set(CASES)
    if unknown:
        raise SystemExit(f"there are no cases {', '.join(sorted(unknown))}")
    first = {name: values for name, values in read(VALUES).items() if name in CASES}
    missing = [name for name in CASES if name not in first or name in again]
    for name in missing:
        if name in CHANGED:
            raise SystemExit(f"{name} is named in changed.py: its first values must stay")
        first[name] = steady(name)
    write(VALUES, first)
    if CHANGED:
        write(VALUES_CHANGED, {name: steady(name) for name in CHANGED})
    print(f"recorded {len(missing)} of {len(CASES)} cases, and {len(CHANGED)} changed on purpose")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", nargs="+", default=[], metavar="NAME")
    main(parser.parse_args(sys.argv[1:]).again)
