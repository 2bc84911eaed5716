"""A cache that is damaged, full, or may not be written neither ends a run nor changes it."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from ffcp import FFCPWarning
from ffcp_paper.data import cache_files, result_cache

KEY = {"data": "bike", "seed": 0, "levels": (0.1, 0.9)}
RESULT = {"length": 0.25, "coverage": 0.9, "layers": [1, 2]}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_files, "_unwritten", {})
    return tmp_path / "cache"


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def test_results_and_networks_come_back() -> None:
    result_cache.keep("bands", KEY, RESULT)
    assert result_cache.known("bands", KEY) == RESULT
    result_cache.keep_network(KEY, network())
    again = result_cache.known_network(KEY, lambda: network(1))
    assert again is not None
    for one, other in zip(
        again.state_dict().values(), network().state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["result", "network"])
def test_no_damaged_entry_is_believed(kind: str) -> None:
    result_cache.keep("bands", KEY, RESULT)
    result_cache.keep_network(KEY, network())
    path = (
        result_cache.place("bands", {**KEY, **result_cache._VERSIONS}, ".json")
        if kind == "result"
        else result_cache.place("networks", KEY, ".safetensors")
    )
    data, dice = path.read_bytes(), random.Random(0)
    for _ in range(300):
        damaged = bytearray(data)
        damaged[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        if dice.random() < 0.2:
            damaged = damaged[: dice.randrange(len(data))]
        path.write_bytes(bytes(damaged))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if kind == "result":
                read = result_cache.known("bands", KEY)
                assert read in (None, RESULT)
            else:
                read = result_cache.known_network(KEY, network)
                if read is not None:
                    for name, value in read.state_dict().items():
                        assert torch.equal(value, network().state_dict()[name])
        assert bool(caught) == (read is None)
        assert all("damaged" in str(warning.message) for warning in caught)


def test_a_damaged_entry_is_computed_again_with_a_warning() -> None:
    result_cache.keep("bands", KEY, RESULT)
    path = result_cache.place("bands", {**KEY, **result_cache._VERSIONS}, ".json")
    path.write_bytes(path.read_bytes().replace(b"0.25", b"0.24"))  # plausible, and wrong
    with pytest.warns(FFCPWarning, match="cache"):
        assert result_cache.record("bands", KEY, lambda: RESULT) == RESULT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert result_cache.record("bands", KEY, lambda: 1 / 0) == RESULT


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_cache_that_cannot_be_written_is_done_without(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(cache_files, "put", refuse)
    with pytest.warns(FFCPWarning, match="cache"):
        assert result_cache.record("bands", KEY, lambda: RESULT) == RESULT
    result_cache.keep_network(KEY, network())  # said once, not for every result
    assert result_cache.known("bands", KEY) == RESULT  # this run needs it again
    assert result_cache.known_network(KEY, network) is not None


_FULL = """
import resource, signal, sys, warnings
from ffcp_paper.data import result_cache
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert result_cache.record("bands", {"seed": 1}, lambda: list(range(100))) == list(range(100))
assert "cache" in str(caught[0].message)
"""


@pytest.mark.heavy
def test_a_disk_that_is_full_while_a_file_is_written(cache: Path) -> None:
    result_cache.keep("bands", KEY, RESULT)
    before = sorted(cache.rglob("*"))
    subprocess.run([sys.executable, "-c", _FULL], check=True)
    assert sorted(cache.rglob("*")) == before  # nothing half written is left behind
    assert result_cache.known("bands", KEY) == RESULT


_PROGRAM = textwrap.dedent("""
    import sys
    from ffcp_paper import reproduce
    from ffcp_paper.experiments.tasks import Settings
    tiny = Settings(seeds=2, epochs=1, rows=300, only=("synthetic",), rounds=1)
    reproduce.run(["regression_bands", "untrained"], out=sys.argv[1], settings=tiny)
""")


def _start(out: Path, cache: Path) -> subprocess.Popen[bytes]:
    own = {**os.environ, "OMP_NUM_THREADS": "1", "FFCP_CACHE": str(cache)}
    return subprocess.Popen([sys.executable, "-c", _PROGRAM, str(out)], env=own)


def _tables(out: Path) -> dict[str, bytes]:
    """Return the tables; a run that is killed while it writes one leaves a file with a dot."""
    return {path.name: path.read_bytes() for path in (out / "tables").glob("[!.]*")}


_KILLED = """
import os, signal, sys
fsync = os.fsync
def killed(file):
    fsync(file)
    if "tables" in os.readlink(f"/proc/self/fd/{file}"):
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = killed
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs the names of open files")
def test_a_run_killed_while_it_writes_a_table_goes_on(tmp_path: Path) -> None:
    assert _start(tmp_path / "whole", tmp_path / "cache").wait() == 0
    own = {**os.environ, "OMP_NUM_THREADS": "1", "FFCP_CACHE": str(tmp_path / "cache")}
    begun = [sys.executable, "-c", _KILLED + _PROGRAM, str(tmp_path / "out")]
    assert subprocess.run(begun, env=own).returncode == -signal.SIGKILL
    assert [path.name[0] for path in (tmp_path / "out" / "tables").iterdir()] == ["."]
    assert _start(tmp_path / "out", tmp_path / "cache").wait() == 0
    assert _tables(tmp_path / "out") == _tables(tmp_path / "whole")


@pytest.mark.slow
def test_fifteen_kills_change_nothing(tmp_path: Path) -> None:
    start = time.monotonic()
    assert _start(tmp_path / "whole", tmp_path / "other").wait() == 0
    whole, dice = time.monotonic() - start, random.Random(0)
    expected = _tables(tmp_path / "whole")
    kills = rounds = 0
    while kills < 15:  # a reproduction that gets through is compared, and begun again
        out, cache = tmp_path / f"out{rounds}", tmp_path / f"cache{rounds}"
        process = _start(out, cache)
        try:
            assert process.wait(timeout=whole * dice.uniform(0.4, 0.9)) == 0
            assert _tables(out) == expected
            rounds += 1
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            kills += process.wait() == -signal.SIGKILL
    assert _start(out, cache).wait() == 0
    assert _tables(out) == expected
