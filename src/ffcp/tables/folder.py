"""Writing of the folder of a fit: weights and calibration in safetensors, JSON, and a report.

``ffcp.json`` names the other files by their checksums and is written last, atomically: a fit
that is killed leaves the previous one, and readers get the old or the new fit completely. If two
write at once, one waits for the other. Nothing is pickled, and loading checks everything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock
from torch import nn

from ffcp import files
from ffcp.tables.errors import TableError

MANIFEST, REPORT = "ffcp.json", "report.html"
FORMAT = "ffcp-table-2"
_OURS = ("weights-", "calibration-")
_LOCK = ".lock"


def must_be_free(folder: str | Path, *, force: bool) -> None:
    """Raise TableError if the folder has foreign files, or a fit without ``force``."""
    folder = Path(folder)
    must_be_outside(folder)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise TableError(f"{folder} is a file: name a new folder")
    names = [file.name for file in folder.iterdir() if not file.name.startswith(".")]
    foreign = [
        name for name in names if name not in (MANIFEST, REPORT) and not name.startswith(_OURS)
    ]
    if foreign:
        raise TableError(f"{folder} has other files ({foreign[0]!r}): name another folder")
    if MANIFEST in names and not force:
        raise TableError(
            f"{folder} already has a fit: replace it by --force (in Python force=True), or "
            "name another folder by --out"
        )


def must_be_outside(path: str | Path) -> None:
    """Raise TableError for a path inside the folder of a fit, which has only its own files."""
    for folder in Path(path).resolve().parents:
        if (folder / MANIFEST).is_file():
            raise TableError(f"{folder} is the folder of a fit: write {path} elsewhere")


def must_be_writable(folder: str | Path) -> None:
    """Raise TableError if the folder cannot be written, by writing and removing a file.

    If it does not exist, its nearest existing parent is tested. The folder itself is not created
    and removed, as another fit may be writing to it.
    """
    folder = Path(folder)
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        probe = files.temporary(nearest / MANIFEST)
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = f"{folder} cannot be written ({error.strerror}: {nearest})"
        raise TableError(f"{reason}: name another folder by --out") from error


def save(fitted: Any, folder: str | Path, *, force: bool = False) -> Path:
    """Write a :class:`ffcp.tables.FittedTable` to a folder."""
    folder = Path(folder)
    must_be_free(folder, force=force)
    created = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / _LOCK):
            must_be_free(folder, force=force)  # another fit may have been written meanwhile
            _write(fitted, folder)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to raise
            _remove_others(folder)
            for new in created:
                (new / _LOCK).unlink(missing_ok=True)
                new.rmdir()  # unless it holds something
        raise
    return folder


def _write(fitted: Any, folder: Path) -> None:
    from safetensors.torch import save as as_bytes

    weights = nn.ModuleList(fitted.networks).state_dict()
    tensors = {name: tensor.contiguous().clone() for name, tensor in weights.items()}
    names = {"weights": _put(folder, "weights", as_bytes({**tensors, "seen": fitted.row_hashes}))}
    scratch = folder / f".calibration.{names['weights'][8:24]}"
    try:
        with files.naming(folder, scratch):
            fitted.predictor.save(scratch)
        names["calibration"] = _put(folder, "calibration", scratch.read_bytes())
    finally:
        scratch.unlink(missing_ok=True)
    # The networks of folds are wrapped.
    networks = [getattr(network, "network", network) for network in fitted.networks]
    content = {
        "about": asdict(fitted.about),
        "columns": [columns.to_json() for columns in fitted.columns],
        "shapes": [asdict(network.shape) for network in networks],
    }
    manifest = {"format": FORMAT, "files": names, "checksum": checksum(content), **content}
    files.put(folder / MANIFEST, json.dumps(manifest, allow_nan=False).encode())
    (folder / REPORT).unlink(missing_ok=True)  # the report of the previous fit
    _remove_others(folder)
    if fitted.report is not None:
        files.put(folder / REPORT, fitted.report.encode())


def _remove_others(folder: Path) -> None:
    """Remove files of replaced or incomplete fits."""
    manifest = folder / MANIFEST
    names = json.loads(manifest.read_bytes())["files"].values() if manifest.is_file() else ()
    for file in folder.iterdir():
        if file.name.startswith(_OURS) and file.name not in names:
            file.unlink(missing_ok=True)


def _put(folder: Path, kind: str, data: bytes) -> str:
    """Write a file of the fit, and return its name, which holds its checksum."""
    name = f"{kind}-{digest(data)[:32]}.safetensors"
    files.put(folder / name, data)
    return name


def checksum(content: Any) -> str:
    """Return the checksum of the content of the manifest."""
    return digest(json.dumps(content, allow_nan=False).encode())


def digest(data: bytes) -> str:
    """Return the checksum of a file."""
    return hashlib.sha256(data).hexdigest()
