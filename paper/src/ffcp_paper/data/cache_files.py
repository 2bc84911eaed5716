"""Cache files with checksums, written atomically.

A cache must not make a run wrong or end it: damaged entries are found by their checksum and
computed anew; entries that cannot be written (disk full, read-only folder) stay in memory until the
process ends.
"""

from __future__ import annotations

import hashlib
import json
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ffcp import FFCPWarning
from ffcp_paper.ffcp_internals import put

_CHECKSUM = "sha256"
_unwritten: dict[Path, bytes] = {}
_lock = threading.Lock()


def keep(path: Path, data: bytes) -> None:
    """Write a file atomically; if that fails, warn once and keep the content in memory."""
    try:
        put(path, data)
    except OSError as error:
        with _lock:
            is_first = not _unwritten
            _unwritten[path] = data
        if is_first:
            warnings.warn(
                f"cannot write to the cache ({error}): results are kept in memory only. Free some "
                "space, or set FFCP_CACHE to another folder",
                FFCPWarning,
                stacklevel=3,
            )


def look_up(path: Path) -> bytes | None:
    """Return the content of a cache file, or ``None`` if there is none."""
    if path in _unwritten:
        return _unwritten[path]
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def warn_damaged(path: Path, error: object) -> None:
    """Warn that a cache entry is damaged and will be computed anew."""
    warnings.warn(
        f"cache entry {path} is damaged ({error}) and will be computed again",
        FFCPWarning,
        stacklevel=3,
    )


def checksum(text: str) -> str:
    """Return the SHA-256 checksum of a text.

    >>> checksum("7")[:8]
    '7902699b'
    """
    return hashlib.sha256(text.encode()).hexdigest()


def pack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Write tensors as safetensors, with a checksum over them and the metadata.

    >>> import torch
    >>> data = pack({"weight": torch.ones(2)}, {"epoch": "3"})
    >>> unpack(data)[1]["epoch"]
    '3'
    >>> unpack(data[:-1] + b"x")
    Traceback (most recent call last):
    ValueError: checksum mismatch
    """
    from safetensors.torch import save

    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    known = dict(metadata or {})
    return save(plain, {**known, _CHECKSUM: _digest(plain, known)})


def unpack(data: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what :func:`pack` wrote; anything else is a ValueError."""
    from safetensors.torch import load

    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = dict(header.get("__metadata__", {}))
    except Exception as error:  # foreign bytes can raise anything
        raise ValueError(str(error)) from error
    if metadata.pop(_CHECKSUM, None) != _digest(tensors, metadata):
        raise ValueError("checksum mismatch")
    return tensors, metadata


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).numpy().data)
    return digest.hexdigest()
