"""Every benchmark of ``make bench`` runs, in small: what it measures may be renamed or removed."""

from __future__ import annotations

import contextlib
import importlib
import queue
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import timing
from torch import nn

MAKEFILE = Path(__file__).parents[1] / "Makefile"
RAY = ["--timed", "20000", "--rows", "20000", "--workers", "1", "--repeats", "1"]


def untrained(model: nn.Module, *_: Any, **__: Any) -> nn.Module:
    return model.eval()


# What each of them is given instead of its sizes, and of what takes long for another reason.
SMALL: dict[str, dict[str, Any]] = {
    "core": {"ROWS": 3000, "SIZES": (1000,), "IMAGES": 8, "STREAMED": 4000, "BATCH": 400},
    "levels": {"ROWS": 500, "ROUNDS": 1},
    "latency": {"_first": lambda: 0.0},
    "stored": {},
    "outputs": {"ROWS": 50, "OUTPUTS": 12, "WIDTH": 8},
    "bounds": {"ROWS": 20, "REPEATS": 1},
    "fcp": {"COLUMNS": 5, "CALIBRATE": 400, "TEST": 50, "MANY": 21_000},
    "localized": {"POINTS": 600, "ROWS": 40, "WIDTH": 4, "MANY_POINTS": 700, "DRAWS": 3},
    "sets": {"ROWS": 200, "CLASSES": 20, "CALIBRATION": 600, "PEER_ROWS": 100},
    "rows": {"CHANNELS": 4, "CLASSES": 2, "HEIGHT": 8, "WIDTH": 8, "COUNTED": 4,
             "train": untrained},
    "stacked": {"SIZES": {"com": (70, 5, 1)}, "THREADS": (1,)},
    "export": {},
    "scale": {
        "WORKERS": 3, "POINTS": 10**5, "STREAMED": (10**4,), "SORTED": 10**4, "DIVIDED": (2**12,),
        "PROCESSES": (1,), "SHARED": 10**6, "WIDTH": 8,
    },
    "ray_rows": {},
}  # fmt: skip
ARGUMENTS = {"stacked": ["--rounds", "1"], "ray_rows": RAY, "latency": ["--compiled"]}


def benched() -> list[str]:
    """Read from the Makefile what ``make bench`` runs."""
    (rule,) = re.findall(r"^bench:.*\n((?:\t.*\n)+)", MAKEFILE.read_text(), flags=re.M)
    return re.findall(r"-m benchmarks\.(\w+)", rule)


class AtHand:
    """A context of processes that does the work here and now, where small sizes are known."""

    Queue = queue.SimpleQueue

    class Process:
        def __init__(self, target: Callable[..., object], args: tuple[object, ...]) -> None:
            self.start, self.join = partial(target, *args), lambda: None

    @staticmethod
    @contextlib.contextmanager
    def Pool(processes: int) -> Iterator[Any]:
        yield SimpleNamespace(apply=lambda work, arguments: work(*arguments))


def shrink(module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for what, small in SMALL[name].items():
        monkeypatch.setattr(module, what, small)  # which raises for what is not there
    if hasattr(module, "best_of"):
        once = lambda contestants, rounds, *clock: timing.best_of(contestants, 1, *clock)  # noqa: E731
        monkeypatch.setattr(module, "best_of", once)
    if hasattr(module, "multiprocessing"):
        here = SimpleNamespace(get_context=lambda kind: AtHand)
        monkeypatch.setattr(module, "multiprocessing", here)
    if name == "bounds":
        monkeypatch.setattr(module, "_disc", partial(module._disc, points=21))


@pytest.fixture
def _nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile nothing, and leave threads and modules to other tests as they were."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "compile", lambda run: run)
    stand_in = "torchsort"  # by benchmarks.sets, for TorchCP
    before = sys.modules.get(stand_in)
    yield
    torch.set_num_threads(threads)
    if before is None:
        sys.modules.pop(stand_in, None)


def test_all_of_make_bench_is_run_in_small() -> None:
    assert benched() == list(SMALL)


def test_the_index_lists_every_module_once_and_marks_what_make_bench_runs() -> None:
    folder = MAKEFILE.parent / "benchmarks"
    files = (path.relative_to(MAKEFILE.parent).with_suffix("") for path in folder.rglob("*.py"))
    modules = {".".join(file.parts).removesuffix(".__main__") for file in files}
    index = (folder / "README.md").read_text()
    listed = re.findall(r"^\| `([\w.]+)` (\*?)", index, flags=re.M)
    assert sorted(name for name, _ in listed) == sorted(m for m in modules if "__init__" not in m)
    assert [name.split(".")[1] for name, star in listed if star] == benched()


@pytest.mark.heavy
@pytest.mark.usefixtures("_nothing_stays")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "ray_rows")) for n in SMALL]
)
def test_benchmark_runs(
    name: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name == "export":
        request.getfixturevalue("torch_that_exports")
    module = importlib.import_module(f"benchmarks.{name}")
    shrink(module, name, monkeypatch)
    monkeypatch.setattr(sys, "argv", [name, *ARGUMENTS.get(name, [])])
    try:
        module.main()
    finally:
        if name == "ray_rows":
            module.ray.shutdown()
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(("name", "works"), [("latency", "one_row"), ("curvature", "compare")])
@pytest.mark.parametrize(("option", "code"), [("--help", 0), ("--unknown", 2)])
def test_help_and_unknown_options_run_nothing(
    name: str, works: str, option: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(module, works, lambda *_: pytest.fail("it ran"))
    monkeypatch.setattr(sys, "argv", [name, option])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == code
