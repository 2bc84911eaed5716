"""Run an exported file where there is neither torch nor ffcp."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

import ffcp

_ALONE = """
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "ffcp"):
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Nothing())
for name in ("torch", "ffcp"):
    try:
        __import__(name)
    except ImportError:
        pass
    else:
        raise SystemExit(f"{name} can be imported")

import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1])
names = [output.name for output in session.get_outputs()]
for given in sys.argv[2:]:
    values = session.run(None, dict(np.load(given)))
    np.savez(given.replace(".npz", ".out.npz"), **dict(zip(names, values)))
"""


def run_alone(path: Path, *feeds: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Run a file on several inputs, in one process without torch and ffcp."""
    given = []
    for number, feed in enumerate(feeds):
        given.append(path.with_name(f"{path.stem}.{number}.npz"))
        np.savez(given[-1], **{name: np.asarray(value) for name, value in feed.items()})
    done = subprocess.run(
        [sys.executable, "-c", _ALONE, str(path), *map(str, given)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    results = []
    for one in given:
        with np.load(str(one).replace(".npz", ".out.npz")) as out:
            results.append({name: torch.from_numpy(out[name]) for name in out.files})
    return results


def run_here(path: Path, feed: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Run a file in this process."""
    session = onnxruntime.InferenceSession(path)
    values = session.run(None, {name: np.asarray(value) for name, value in feed.items()})
    names = (output.name for output in session.get_outputs())
    return dict(zip(names, map(torch.from_numpy, values), strict=True))


def holds(
    made: dict[str, torch.Tensor],
    band: ffcp.Interval,
    suffix: str = "",
    off: float = 0.0,
    units: int = 100,
) -> None:
    """Hold a file's band to the library's: it contains it, and is wider only by rounding.

    ``off`` is the share of rows at which more than rounding may be added, ``units`` how many
    roundings of the largest number that is.
    """
    lower, upper = made[f"lower{suffix}"], made[f"upper{suffix}"]
    assert lower.dtype == band.lower.dtype
    assert lower.shape == band.lower.shape
    assert bool((lower <= band.lower).all())
    assert bool((upper >= band.upper).all())
    size = torch.stack([*band]).nan_to_num(0, 0, 0).abs().amax()
    wider = torch.maximum(band.lower - lower, upper - band.upper).nan_to_num(0)
    allowed = units * torch.finfo(lower.dtype).eps * size
    assert float((wider > allowed).double().mean()) <= off
    torch.testing.assert_close(made["prediction"], band.prediction, rtol=1e-4, atol=allowed)
