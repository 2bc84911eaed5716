"""Which weights a calibration belongs to, and whether the model still has them."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ffcp import files
from ffcp.network.frozen import Hook, Stamp, changing_hooks, gives_back, hooks_of, stamp
from ffcp.network.hidden_weights import named_parts, weights
from ffcp.network.modes import autocast


def fingerprint(model: nn.Module) -> str:
    """Hash the layers of a model, their settings, and all parameters and buffers.

    Modules and weights that torch does not list count, see :mod:`ffcp.network.hidden_weights`.
    Wrappers (``torch.compile``, ``DataParallel``, ``DistributedDataParallel``) change nothing.

    >>> one = nn.Sequential(nn.LeakyReLU(0.1))
    >>> fingerprint(one) == fingerprint(nn.DataParallel(one))
    True
    >>> fingerprint(one) == fingerprint(nn.Sequential(nn.LeakyReLU(0.2)))
    False
    """
    if gives_back(model):
        return _hash_of_one(type(model).__name__, model.extra_repr())
    digest = hashlib.sha256()
    while isinstance(model, _WRAPPERS) or "_orig_mod" in model._modules:
        model = next(iter(model._modules.values()))  # type: ignore[assignment]
    tensors: dict[str, Tensor] = {}
    for name, part in named_parts(model):
        if isinstance(part, Tensor):
            tensors[_plain(name)] = part
            continue
        if "_orig_mod" not in part._modules:
            digest.update(_said(_plain(name), type(part).__name__, part.extra_repr()))
        for own, tensor in weights(part):
            tensors[_plain(f"{name}.{own}" if name else own)] = tensor
    for name, tensor in sorted(tensors.items()):
        files.hash_tensor(digest, name, tensor)
    return digest.hexdigest()


@functools.lru_cache(maxsize=16)  # predictions that are there already come in one such module
def _hash_of_one(kind: str, settings: str) -> str:
    """Hash a module without layers and weights."""
    return hashlib.sha256(_said("", kind, settings)).hexdigest()


def _said(name: str, kind: str, settings: str) -> bytes:
    return f"{name} {kind} {settings};".encode()


_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def _plain(name: str) -> str:
    """Give the name of a part as it is without compilation."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


class Identity:
    """The layers and weights of a model at some moment: their hash, and cheap signs of change.

    Asking again compares pointers and version counters, which costs next to nothing; a difference
    means hashing again. Weights that fused optimisers, ``.data`` or numpy wrote to move no counter:
    only the hash, taken when saving, merging and updating, sees them.

    Autocast, which lets the same weights compute in another type, is part of the identity.

    >>> model = nn.Linear(2, 1)
    >>> identity = Identity.of(model)
    >>> identity.is_that_of(model)
    True
    >>> _ = nn.init.zeros_(model.weight)
    >>> identity.is_that_of(model)
    False
    """

    def __init__(self, fingerprint: str, autocast: str = "", known: Stamp | None = None) -> None:
        self.fingerprint = fingerprint
        self.autocast = autocast  # see modes.autocast
        self._known = known  # the stamp of a model that was seen to have this fingerprint
        self._hooks: frozenset[Hook] | None = None  # a part of its function; None: not known

    @classmethod
    def of(cls, model: nn.Module) -> Identity:
        """Take the identity of a model as it is now."""
        now = stamp(model)
        return cls(fingerprint(model), autocast(model), now)

    def check(self, model: nn.Module, now: Stamp | None = None) -> None:
        """Refuse a model that computes otherwise: under another autocast, or with other weights."""
        self.must_be_run_alike(autocast(model))
        if not self.is_that_of(model, now):
            raise RuntimeError(
                "the model's weights are no longer those of the calibration, so bands would not "
                "cover: calibrate again, or load those weights"
            )

    def must_be_run_alike(self, now: str) -> None:
        """Refuse another autocast than that of the calibration."""
        if now != self.autocast:
            raise RuntimeError(
                f"the calibration was made {_under(self.autocast)}, and the model would now run "
                f"{_under(now)}, which gives other predictions: do both inside or both outside "
                "torch.autocast (each thread has its own)"
            )

    def is_that_of(self, model: nn.Module, now: Stamp | None = None) -> bool:
        """Say whether a model has these weights, by its stamp ``now`` if that is known."""
        if self._hooks is not None and changing_hooks(model) != self._hooks:
            return False
        now = stamp(model) if now is None else now
        if now != self._known:
            if fingerprint(model) != self.fingerprint:
                return False
            if self._hooks and not self._hooks <= hooks_of(model):
                return False
            self._known = now
        return True

    def must_be_that_of(
        self, model: nn.Module, loaded: Mapping[str, Tensor] | None = None, assign: bool = False
    ) -> None:
        """Refuse a model with other weights, or one that has others once these are loaded.

        Loading is tried on a copy. Some models cannot be copied; those are looked at again when
        bands are asked for, as all are.
        """
        if loaded is None:
            same = self.is_that_of(model)
        else:
            try:
                tried = copy.deepcopy(model)
            except Exception:
                return
            tried.load_state_dict(loaded, strict=False, assign=assign)
            same = fingerprint(tried) == self.fingerprint  # no stamp of what is gone at once
        if not same:
            raise ValueError(
                "it was calibrated with other weights than this model has, and would not cover: "
                "load those weights, or calibrate again"
            )

    def note_hooks(self, model: nn.Module) -> None:
        """Note which hooks are a part of the function, once a pass has seen what they do."""
        self._hooks = changing_hooks(model)

    def __getstate__(self) -> dict[str, Any]:
        # In another process, or of another copy, pointers and the numbers of hooks are others.
        return {**self.__dict__, "_known": None, "_hooks": None}


def _under(kind: str) -> str:
    return f"under autocast ({kind})" if kind else "without autocast"
