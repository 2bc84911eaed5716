"""Results that are kept as they are found, so that a killed run goes on where it was.

Everything is stored in the cache under a hash of what it depends on, whole or not at all; two
runs at once write the same bytes to the same name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ffcp_paper.data import cache_files
from ffcp_paper.data.files import cache_dir


def place(kind: str, key: Mapping[str, Any], suffix: str) -> Path:
    """Say where a result of this kind, depending on ``key``, is kept.

    >>> place("networks", {"data": "bike", "seed": 0}, ".safetensors").name
    '64749f3f40c2725d.safetensors'
    """
    text = json.dumps(key, sort_keys=True)
    return cache_dir() / kind / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}{suffix}"


def known(kind: str, key: Mapping[str, Any]) -> Any:
    """Look up a result made of plain values; ``None`` if it is not there, or damaged."""
    path = place(kind, key, ".json")
    data = cache_files.look_up(path)
    if data is None:
        return None
    try:
        saved = json.loads(data)
        if saved["sha256"] != cache_files.sealed(json.dumps([saved["key"], saved["result"]])):
            raise ValueError("its checksum is not that of its content")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        cache_files.warn_damaged(path, error)
        return None
    # As JSON gives it back: tuples are lists there.
    return saved["result"] if saved["key"] == json.loads(json.dumps(key)) else None


def keep(kind: str, key: Mapping[str, Any], result: Any) -> None:
    """Keep a result made of plain values."""
    checksum = cache_files.sealed(json.dumps([key, result]))
    entry = {"sha256": checksum, "key": key, "result": result}
    cache_files.keep(place(kind, key, ".json"), json.dumps(entry).encode())


def record(kind: str, key: Mapping[str, Any], find: Callable[[], Any]) -> Any:
    """Look up a result made of plain values, or find it and keep it."""
    result = known(kind, key)
    if result is None:
        result = find()
        keep(kind, key, result)
    return result


def known_network(key: Mapping[str, Any], build: Callable[[], nn.Module]) -> nn.Module | None:
    """Give a trained network, ``build`` with the weights that were kept, if there are any."""
    path = place("networks", key, ".safetensors")
    data = cache_files.look_up(path)
    if data is None:
        return None
    model = build()
    try:
        model.load_state_dict(cache_files.unpack(data)[0])
    except (ValueError, RuntimeError) as error:  # damaged, or weights of another network
        cache_files.warn_damaged(path, error)
        return None
    return model.eval()


def keep_network(key: Mapping[str, Any], model: nn.Module) -> None:
    """Keep the weights of a trained network."""
    cache_files.keep(place("networks", key, ".safetensors"), cache_files.pack(model.state_dict()))


def network(
    key: Mapping[str, Any], build: Callable[[], nn.Module], train: Callable[[], nn.Module]
) -> nn.Module:
    """Give a trained network: ``build`` with the weights that were kept, or ``train``."""
    model = known_network(key, build)
    if model is None:
        model = train()
        keep_network(key, model)
    return model
