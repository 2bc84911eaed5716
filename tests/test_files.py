"""What was saved and is read again: bytes that cannot have been written are refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from ffcp import files


def row_of(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (torch.zeros(3), "bytes"),
        (torch.zeros(2, 2, dtype=torch.uint8), "bytes"),
        (row_of(b'{"norm": '), "settings"),
        (row_of(b"[" * 100_000), "settings"),
        (row_of(b"[1, 2]"), "settings"),
    ],
)
def test_settings_that_cannot_be_are_refused(state: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        files.unpack(state)


def test_a_seal_is_a_row_of_bytes_and_belongs_to_its_tensors() -> None:
    points = {"scores": torch.ones(2)}
    sealed = files.seal({"norm": 2.0}, points)
    assert files.unseal(sealed, points) == {"norm": 2.0}
    with pytest.raises(ValueError, match="bytes"):
        files.unseal(sealed.float(), points)
    with pytest.raises(ValueError, match="checksum"):
        files.unseal(sealed, {"scores": torch.zeros(2)})


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ([], "dict"),
        ({"x": [3]}, "layout"),
        ({"x": {"columns": ["a"]}}, "layout"),
        ({"x": {"row": [-1]}}, "-1"),
        ({"x": {"row": [2**63]}}, "integer"),
        ({"x": {"row": [1], "columns": [0.5]}}, "columns"),
    ],
)
def test_layouts_of_inputs_that_cannot_be_are_refused(layout: Any, message: str) -> None:
    assert files.checked_layout({"x": {"row": [4], "columns": ["a", 1]}})
    with pytest.raises(ValueError, match=message):
        files.checked_layout(layout)


def test_a_safetensors_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(save({"weight": torch.ones(2)}, {"format": "pt"}))
    with pytest.raises(files.CalibrationFileError, match="weights"):
        files.read(path)


def test_an_error_that_names_its_file_is_not_wrapped_again() -> None:
    first = files.CalibrationFileError("this one")
    with pytest.raises(files.CalibrationFileError) as found, files.refused("that one"):
        raise first
    assert found.value is first


_KILLED_WHILE_WRITING = """
import os, signal, sys
from ffcp import files
os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
files.put(sys.argv[1], b"half")
"""


@pytest.mark.skipif(os.name != "posix", reason="kills a process")
@pytest.mark.long
def test_a_killed_process_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "some file"
    files.put(path, b"old")
    ended = subprocess.run([sys.executable, "-c", _KILLED_WHILE_WRITING, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    files.put(path, b"new")
    assert path.read_bytes() == b"new"


def test_nobody_removes_what_another_is_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In containers of one host name and one volume, whose processes do not see each other."""
    path, written = tmp_path / "some file", []
    fsync = os.fsync

    def another_writes(handle: int) -> None:
        fsync(handle)
        if not written:
            written.append(True)
            monkeypatch.setattr(os, "getpid", lambda: 1)
            files.put(path, b"another's")

    monkeypatch.setattr(os, "fsync", another_writes)
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)  # no process here has this number
    files.put(path, b"this one's")
    assert path.read_bytes() == b"this one's"
    assert [one.name for one in tmp_path.iterdir()] == ["some file"]


def test_what_could_not_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    files.put(tmp_path / "some file", b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="space"):
        files.put(tmp_path / "some file", b"new")
    assert [one.name for one in tmp_path.iterdir()] == ["some file"]
    assert (tmp_path / "some file").read_bytes() == b"old"
