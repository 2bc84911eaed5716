"""Cache of results and trained networks, so that an interrupted run resumes.

Entries are stored under a hash of everything they depend on and are written atomically; two runs at
once write the same bytes to the same name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ffcp
from ffcp_paper.data import cache_files
from ffcp_paper.data.files import cache_dir

_VERSIONS = {"ffcp": ffcp.__version__, "torch": str(torch.__version__)}  # of results


def place(kind: str, key: Mapping[str, Any], suffix: str) -> Path:
    """Return the cache path of a result of this kind that depends on ``key``.

    >>> place("networks", {"data": "bike", "seed": 0}, ".safetensors").name
    '64749f3f40c2725d.safetensors'
    """
    text = json.dumps(key, sort_keys=True)
    return cache_dir() / kind / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}{suffix}"


def known(kind: str, key: Mapping[str, Any]) -> Any:
    """Return a cached result made of plain values; ``None`` if it is absent or damaged.

    Results of other versions of ffcp and torch are absent.
    """
    key = {**key, **_VERSIONS}
    path = place(kind, key, ".json")
    data = cache_files.look_up(path)
    if data is None:
        return None
    try:
        saved = json.loads(data)
        if saved["sha256"] != cache_files.checksum(json.dumps([saved["key"], saved["result"]])):
            raise ValueError("checksum mismatch")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        cache_files.warn_damaged(path, error)
        return None
    # Compared as JSON, in which tuples are lists.
    return saved["result"] if saved["key"] == json.loads(json.dumps(key)) else None


def keep(kind: str, key: Mapping[str, Any], result: Any) -> None:
    """Store a result made of plain values."""
    key = {**key, **_VERSIONS}
    checksum = cache_files.checksum(json.dumps([key, result]))
    entry = {"sha256": checksum, "key": key, "result": result}
    cache_files.keep(place(kind, key, ".json"), json.dumps(entry).encode())


def record(kind: str, key: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
    """Return a cached result made of plain values; compute and store it if it is absent."""
    result = known(kind, key)
    if result is None:
        result = compute()
        keep(kind, key, result)
    return result


def known_network(key: Mapping[str, Any], build: Callable[[], nn.Module]) -> nn.Module | None:
    """Return ``build()`` with its cached weights, or ``None`` if there are none."""
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
    """Store the weights of a trained network."""
    cache_files.keep(place("networks", key, ".safetensors"), cache_files.pack(model.state_dict()))


def network(
    key: Mapping[str, Any], build: Callable[[], nn.Module], train: Callable[[], nn.Module]
) -> nn.Module:
    """Return ``build()`` with its cached weights; train and store it if there are none."""
    model = known_network(key, build)
    if model is None:
        model = train()
        keep_network(key, model)
    return model
