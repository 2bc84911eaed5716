"""Files: safetensors, written whole or not at all, read without unpickling."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_FORMAT = "ffcp-calibration-2"


def pack(settings: Mapping[str, Any]) -> Tensor:
    """Write plain settings as JSON into a tensor of bytes.

    >>> unpack(pack({"norm": 2.0}))
    {'norm': 2.0}
    """
    return torch.from_numpy(np.frombuffer(json.dumps(settings).encode(), dtype=np.uint8).copy())


def unpack(state: Tensor) -> dict[str, Any]:
    """Read settings written by :func:`pack`."""
    settings: dict[str, Any] = json.loads(bytes(state.cpu().numpy()))
    return settings


def fingerprint(model: nn.Module) -> str:
    """Hash the layers of a model, their settings, and all parameters and buffers.

    Wrappers (``torch.compile``, ``DataParallel``, ``DistributedDataParallel``) change nothing.

    >>> one = nn.Sequential(nn.LeakyReLU(0.1))
    >>> fingerprint(one) == fingerprint(nn.DataParallel(one))
    True
    >>> fingerprint(one) == fingerprint(nn.Sequential(nn.LeakyReLU(0.2)))
    False
    """
    digest = hashlib.sha256()
    while isinstance(model, _WRAPPERS) or "_orig_mod" in model._modules:
        model = next(iter(model._modules.values()))  # type: ignore[assignment]
    for name, module in model.named_modules(remove_duplicate=False):
        if "_orig_mod" not in module._modules:
            digest.update(f"{_plain(name)} {type(module).__name__} {module.extra_repr()};".encode())
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    for name, tensor in sorted(tensors.items(), key=lambda item: _plain(item[0])):
        digest.update(f"{_plain(name)} {tensor.dtype} {tuple(tensor.shape)};".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def _plain(name: str) -> str:
    """Give the name of a part as it is without compilation."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def write(path: str | Path, tensors: Mapping[str, Tensor], *, fingerprint: str) -> None:
    """Write tensors to ``path``: the file appears complete, or the old one stays."""
    from safetensors.torch import save  # only who saves pays for the import

    metadata = {"format": _FORMAT, "fingerprint": fingerprint}
    put(path, save({name: t.contiguous() for name, t in tensors.items()}, metadata))


def put(path: str | Path, data: bytes) -> None:
    """Write bytes to ``path``, making its folder: the file appears complete, or the old one stays.

    A process that is killed on the way, or another that writes the same file, does no harm.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Opened plainly and not by tempfile, whose files only their owner may read.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(path: str | Path) -> tuple[dict[str, Tensor], str]:
    """Read what :func:`write` wrote; a damaged or foreign file is a ValueError."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file ({error})") from error
    kind = metadata.get("format", "")
    if kind.startswith("ffcp-calibration-") and kind != _FORMAT:
        raise ValueError(
            f"{path} was saved by another version of ffcp, in a format that this one does not "
            "read: calibrate again"
        )
    if kind != _FORMAT:
        raise ValueError(f"{path} is not a calibration saved by ffcp")
    return tensors, metadata["fingerprint"]
