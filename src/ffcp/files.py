"""Files: safetensors, written whole or not at all, read without unpickling, every part checked."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import types
import typing
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMAT = "ffcp-calibration-4"  # changes when the meaning of scores changes
_DIGITS = 64  # of a SHA-256, before the settings that it seals


class CalibrationFileError(ValueError):
    """A saved calibration cannot be used; the message names the file, the fault and the remedy.

    Raised by :func:`ffcp.load`, by ``predictor.load`` and by ``load_state_dict``. Predictor and
    model are as they were before.
    """


def pack(settings: Mapping[str, Any]) -> Tensor:
    """Write plain settings as JSON into a tensor of bytes.

    >>> unpack(pack({"norm": 2.0}))
    {'norm': 2.0}
    """
    return torch.frombuffer(bytearray(json.dumps(settings).encode()), dtype=torch.uint8)


def unpack(state: Tensor) -> dict[str, Any]:
    """Read settings written by :func:`pack`; anything else is a ValueError."""
    return _parsed(_bytes_of(state))


def _bytes_of(state: Tensor) -> bytes:
    if state.dtype != torch.uint8 or state.dim() != 1:
        raise ValueError("expected the settings to be a row of bytes")
    return bytes(state.cpu().numpy())


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the settings cannot be read ({error})") from error
    if not isinstance(settings, dict):
        raise ValueError("expected a dict of settings")
    return settings


def seal(settings: Mapping[str, Any], points: Mapping[str, Tensor]) -> Tensor:
    """Write settings as :func:`pack` does, with a checksum over them and over some tensors.

    >>> points = {"scores": torch.zeros(3, 1)}
    >>> unseal(seal({"norm": 2.0}, points), points)
    {'norm': 2.0}
    >>> unseal(seal({"norm": 2.0}, points), {"scores": torch.ones(3, 1)})
    Traceback (most recent call last):
    ValueError: the checksum differs: the file was damaged or changed
    """
    text = json.dumps(settings).encode()
    sealed = bytearray(_checksum(text, points).encode() + text)
    return torch.frombuffer(sealed, dtype=torch.uint8)


def unseal(state: Tensor, points: Mapping[str, Tensor]) -> dict[str, Any]:
    """Read settings written by :func:`seal`, if they and the tensors are those that were sealed."""
    sealed = _bytes_of(state)
    checksum, text = sealed[:_DIGITS], sealed[_DIGITS:]
    if checksum != _checksum(text, points).encode():
        raise ValueError("the checksum differs: the file was damaged or changed")
    return _parsed(text)


def _checksum(text: bytes, points: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text)
    hash_tensors(digest, points)
    return digest.hexdigest()


def hash_tensors(digest: Any, tensors: Mapping[str, Tensor]) -> None:
    """Add tensors to a hash: their names, types, shapes and numbers."""
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)


def rebuilt(kind: Any, saved: Any) -> Any:
    """Rebuild a value of some type from JSON; raise ValueError for another type.

    Knows plain values, ``X | None``, ``tuple[X, ...]``, mappings, and dataclasses of them.

    >>> rebuilt(tuple[float, ...], [1, 2.5])
    (1, 2.5)
    >>> rebuilt(int, True)
    Traceback (most recent call last):
    ValueError: expected int, got True
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if saved is None and type(None) in inner:
            return None
        (kind,) = (member for member in inner if member is not type(None))
        return rebuilt(kind, saved)
    if origin is tuple and isinstance(saved, list):
        return tuple(rebuilt(inner[0], value) for value in saved)
    if origin in (dict, Mapping) and isinstance(saved, dict):
        return {str(key): rebuilt(inner[1], value) for key, value in saved.items()}
    if is_dataclass(kind) and isinstance(saved, dict):
        hints = typing.get_type_hints(kind)
        # A field with a default may be missing: files can be older than it.
        must = {field.name for field in fields(kind) if field.default is MISSING}
        if must <= saved.keys() <= hints.keys():
            return kind(**{name: rebuilt(hints[name], value) for name, value in saved.items()})  # type: ignore[operator]
    plain: Any = {float: (int, float)}.get(kind, kind)
    if (
        origin
        or is_dataclass(kind)
        or not isinstance(saved, plain)
        or (type(saved) is bool) != (kind is bool)
    ):
        raise ValueError(f"expected {getattr(kind, '__name__', kind)}, got {saved!r}")
    return saved


def count(saved: Any) -> int:
    """Return a count; raise ValueError for anything but an integer of at least 0.

    >>> count(3)
    3
    """
    number: int = rebuilt(int, saved)
    if not 0 <= number < 2**63:
        raise ValueError(f"expected an integer >= 0, got {number}")
    return number


def checked_layout(layout: Any) -> dict[str, Any]:
    """Raise a ValueError unless this describes the layout of inputs."""
    checked: dict[str, Any] = rebuilt(dict, layout)
    for entry in checked.values():
        if not isinstance(entry, dict) or not {"row"} <= entry.keys() <= {"row", "columns"}:
            raise ValueError(f"expected the layout of an input, got {entry!r}")
        for size in rebuilt(tuple[int, ...], entry["row"]):
            count(size)
        if not all(type(name) in (str, int) for name in rebuilt(list, entry.get("columns", []))):
            raise ValueError(f"expected names of columns, got {entry['columns']!r}")
    return checked


@contextmanager
def refused(what: Any) -> Iterator[None]:
    """Turn every error in the block into a CalibrationFileError that names the file."""
    try:
        yield
    except CalibrationFileError:
        raise
    except Exception as error:  # foreign data can fail in any way
        raise CalibrationFileError(
            f"{what} cannot be used: {error}. Nothing was changed; a file fits the same kind of "
            "predictor with the same model"
        ) from error


def write(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to ``path``: the file appears complete, or the old one stays."""
    from safetensors.torch import save  # imported only when saving

    put(path, save({name: t.contiguous() for name, t in tensors.items()}, {"format": FORMAT}))


def put(path: str | Path, data: bytes) -> None:
    """Write bytes to ``path``, making its folder: the file appears complete, or the old one stays.

    A process that is killed on the way, or another that writes the same file, does no harm. The
    killed one leaves a file behind whose name begins with a dot and that of ``path``.
    """
    place = temporary(path)
    try:
        with naming(path, place):
            with place.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(place, path)
    except BaseException:
        with suppress(OSError):  # a read-only disk refuses this, too
            place.unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: str | Path, place: Path) -> Iterator[None]:
    """Raise OSError with the name of the requested file, not of the temporary one.

    >>> with naming("intervals.csv", Path(".intervals.csv.4ba9de5f")):
    ...     raise OSError(30, "Read-only file system", ".intervals.csv.4ba9de5f")
    Traceback (most recent call last):
    OSError: [Errno 30] Read-only file system: 'intervals.csv'
    """
    try:
        yield
    except OSError as error:
        if str(error.filename) != str(place):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def temporary(path: str | Path) -> Path:
    """Return a name beside ``path`` to write to before it takes its place, making the folder.

    No other call returns it, in whatever process, container or machine.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # a file is in the folder's place
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path.parent)) from error
    # Not by tempfile, whose files only their owner may read.
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def read(path: str | Path) -> dict[str, Tensor]:
    """Read what :func:`write` wrote; a damaged or foreign file is a CalibrationFileError."""
    from safetensors.torch import load

    if Path(path).is_dir():
        raise IsADirectoryError(
            f"expected a file, got the folder {str(path)!r}: a fit that 'ffcp fit' wrote is loaded "
            "by ffcp.tables.load"
        )
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    data = Path(path).read_bytes()  # once: it cannot change between the check and the reading
    try:
        tensors: dict[str, Tensor] = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        kind = str(header.get("__metadata__", {}).get("format"))
    except Exception as error:  # foreign bytes can fail in any way
        raise CalibrationFileError(
            f"{path} is damaged or not a safetensors file ({error}): save the calibration again"
        ) from error
    if kind != FORMAT:
        ours = kind.startswith("ffcp-calibration-")
        raise CalibrationFileError(
            f"{path} was saved by another version of ffcp: calibrate again"
            if ours
            else f"{path} is not a calibration saved by ffcp: give a file that save wrote"
        )
    return tensors
