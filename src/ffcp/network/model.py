"""Frozen copies of a model to work on, and checks that the model still has the same weights.

All work is done on deep copies in eval mode whose parameters share the storage of the originals
and need no gradients. Hooks are put on a copy that only one call uses, so any number of threads
can predict at once, and the model can be run or trained elsewhere meanwhile. Buffers are copied,
because a forward pass may write to them.

Where a copy may not compute what the model does (modules that cannot be copied, compiled and
scripted ones, forward hooks of the user's, a forward that is a closure over the original), the
model itself is used, one call at a time, and restored afterwards: nothing else may run it
meanwhile.
"""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from ffcp import files
from ffcp.locks import lock
from ffcp.network.hidden_weights import holders, own_names, unlisted
from ffcp.network.model_output import Picking

Stamp = tuple[Any, ...]
Hook = tuple[str, str, int]  # the name of a module, which of its hooks, and the hook's number
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
_DICTS = ("_modules", "_parameters", "_buffers", *_FORWARD)
OWN_HOOK = "_ffcp_hook"  # an attribute of hooks that are not the user's
_MARK = "_ffcp_copy_of"  # an attribute of frozen copies


class _Cache:
    """What is kept of one model: where its weights are, and copies that are not in use."""

    def __init__(self) -> None:
        self.model_lock: Any = None  # held by the call that uses the model itself
        self.inventory: _Inventory | None = None
        self.stamp: Stamp | None = None
        self.copies: list[nn.Module] = []  # of the model as it was at the stamp
        self.has_copies = True  # unless a pass showed that these do not compute what the model does


_CACHES: WeakKeyDictionary[nn.Module, _Cache] = WeakKeyDictionary()
_LOCK = lock()  # of the caches


def _cache_of(model: nn.Module) -> _Cache:
    cache = _CACHES.get(model)
    if cache is None:
        with _LOCK:
            cache = _CACHES.setdefault(model, _Cache())
    return cache


class _Inventory:
    """The modules and tensors of a model: collected once, compared in every call."""

    def __init__(self, model: nn.Module) -> None:
        modules, visited, hidden = [model], {id(model)}, list[Tensor]()
        self.is_plain = True  # whether torch lists all there is
        for module in modules:  # which grows
            children = [child for child in module._modules.values() if child is not None]
            hooks = module._forward_hooks or module._forward_pre_hooks
            is_wrapped = any(_function_of(child) is not child for child in children)
            if hooks or holders(module) or is_wrapped:
                self.is_plain = False
                for _, weight in unlisted(module):
                    if isinstance(weight, Tensor):
                        hidden.append(weight)
                    else:
                        children.append(weight)
            for child in map(_function_of, children):
                if id(child) not in visited:
                    visited.add(id(child))
                    modules.append(child)
        listed = chain(
            *(m._parameters.values() for m in modules), *(m._buffers.values() for m in modules)
        )
        self.tensors = [*(tensor for tensor in listed if tensor is not None), *hidden]
        self._named = [(module.__dict__, name) for module in modules for name in own_names(module)]
        self._attributes = [module.__dict__ for module in modules]
        dicts = [getattr(module, name) for module in modules for name in _DICTS]
        self._empty = [members for members in dicts if not members]
        # Views, which show later changes.
        self._members = [members.values() for members in dicts if members]
        self.first_marks = (*self.marks(), *map(id, hidden))

    def marks(self) -> Stamp:
        """Return the types of attributes and the ids of all modules, tensors and hooks."""
        types = [type(attributes.get(name)) for attributes, name in self._named]
        ids = map(id, chain.from_iterable(self._members))
        return (any(self._empty), *map(len, self._attributes), *types, *ids)


def _function_of(module: nn.Module) -> nn.Module:
    """Return the module, or the model that it wraps if it is one of this library's predictors.

    A model may have its own predictor as an attribute: scores are no part of what it computes.
    """
    return module.model if getattr(type(module), "is_predictor", False) else module  # type: ignore[return-value]


class Weights(NamedTuple):
    """The weights of a model at one moment: parameters, buffers, and what torch does not list.

    ``stamp`` holds their addresses and version counters. Equal stamps mean the same layers and
    weights, unless something wrote to them without moving torch's version counters, as fused
    optimisers, ``.data`` and numpy do.
    """

    tensors: list[Tensor]
    stamp: Stamp
    is_plain: bool  # whether torch lists all of them


def weights_of(model: nn.Module) -> Weights:
    """Return the weights of a model as they are now.

    >>> model = nn.Linear(2, 1)
    >>> before = weights_of(model).stamp
    >>> _ = nn.init.zeros_(model.bias)
    >>> weights_of(model).stamp == before
    False
    """
    cache = _cache_of(model)
    inventory = cache.inventory
    if inventory is None or inventory.marks() != inventory.first_marks:
        inventory = _Inventory(model)
        # What hooks and attributes hold may change unnoticed, and may hold the model itself.
        cache.inventory = inventory if inventory.is_plain else None
    tensors = inventory.tensors
    try:
        versions = [tensor._version for tensor in tensors]
    except RuntimeError:  # torch does not count for tensors made in inference mode
        versions = [_hash(t) if t.is_inference() else t._version for t in tensors]
    addresses = [tensor.data_ptr() for tensor in tensors]
    stamp = (inventory.first_marks, *addresses, *versions)
    return Weights(tensors, stamp, inventory.is_plain)


def _hash(tensor: Tensor) -> int:
    return hash(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def frozen_copy(model: nn.Module, with_hooks: bool = False) -> nn.Module | None:
    """Copy a model but for its parameters; ``None`` where a copy may compute something else.

    Hooks on backward passes are never copied: they watch or change how a model is trained, and
    are no part of the function whose gradient is taken.

    >>> model = nn.Linear(2, 1)
    >>> frozen = frozen_copy(model)
    >>> frozen.weight.data_ptr() == model.weight.data_ptr(), frozen.weight.requires_grad
    (True, False)
    """
    modules = [*model.modules(), model.whole if isinstance(model, Picking) else model]
    # Scripted, or compiled: a copy would be compiled again.
    if any(isinstance(m, torch.jit.ScriptModule) or "_orig_mod" in m._modules for m in modules):
        return None
    if not with_hooks and (hooks_of(model) or not _cache_of(model).has_copies):
        return None
    try:
        # By .data and not by detach(), which shares the version counter: a weight that is trained
        # meanwhile would raise in our backward pass.
        memo: dict[int, Any] = {
            id(p): nn.Parameter(p.data, requires_grad=False) for p in model.parameters()
        }
        # A predictor that is a part of its model is no part of the function.
        memo.update({id(p): nn.Module() for p in modules if _function_of(p) is not p})
        frozen = copy.deepcopy(model, memo)
    except Exception:  # whatever a user's module does when it is copied
        return None
    for module in frozen.modules():
        module.training = False  # one by one: an overridden train() may do more than switch
        is_bare = not with_hooks and not isinstance(module, fx.GraphModule)
        for hooks in (*_BACKWARD, *(_FORWARD if is_bare else ())):  # ours, of another thread's call
            getattr(module, hooks).clear()
        module._is_full_backward_hook = None
    frozen.__dict__[_MARK] = weakref.ref(model)
    return frozen


@contextmanager
def borrowed(model: nn.Module, now: Weights | None = None) -> Iterator[nn.Module]:
    """Yield a frozen copy of the model that nothing else uses until the block ends.

    ``now`` are the model's weights, if they were just read.

    >>> with borrowed(nn.Linear(2, 1)) as frozen:
    ...     frozen.training, frozen.weight.requires_grad
    (False, False)
    """
    if _MARK in model.__dict__:
        yield model
        return
    cache, stamp = _cache_of(model), (now or weights_of(model)).stamp
    with _LOCK:
        if cache.stamp != stamp:  # moved, exchanged or trained: the copies are stale
            cache.stamp, cache.copies = stamp, []
        frozen = cache.copies.pop() if cache.copies else None
    frozen = frozen_copy(model) if frozen is None else frozen
    if frozen is None:
        if cache.model_lock is None:
            model_lock = lock(reentrant=True)  # outside _LOCK, as it may wait for a fork
            with _LOCK:
                cache.model_lock = cache.model_lock or model_lock
        with cache.model_lock:
            yield model
        return
    yield frozen
    with _LOCK:
        if cache.stamp == stamp and cache.has_copies:
            cache.copies.append(frozen)


def without_copies(model: nn.Module) -> None:
    """Record that copies of a model compute something else."""
    cache = _cache_of(model)
    with _LOCK:
        cache.has_copies, cache.copies = False, []


def hooks_of(model: nn.Module) -> frozenset[Hook]:
    """Return the names of the user's forward hooks.

    Those of exported models are torch's own, and stay on copies.
    """
    return frozenset(
        (name, hooks, number)
        for name, module in model.named_modules()
        if not isinstance(module, fx.GraphModule)
        for hooks in _FORWARD
        for number, hook in getattr(module, hooks).items()
        if not hasattr(hook, OWN_HOOK)
    )


def is_frozen_copy(model: nn.Module) -> bool:
    """Whether a module is a frozen copy, which only one call uses."""
    return _MARK in model.__dict__


def original(model: nn.Module) -> nn.Module:
    """Return the model that a frozen copy was made of; any other module is its own original."""
    copied: weakref.ref[nn.Module] | None = model.__dict__.get(_MARK)
    return (copied() if copied is not None else None) or model


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside a compiled one, whose layers can be cut at; any other as it is."""
    if isinstance(model, Picking) or "_orig_mod" not in model._modules:
        return model
    return model.get_submodule("_orig_mod")


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
    digest = hashlib.sha256()
    while isinstance(model, _WRAPPERS) or "_orig_mod" in model._modules:
        model = next(iter(model._modules.values()))  # type: ignore[assignment]
    tensors: dict[str, Tensor] = {}
    for path, part in _named_parts(model):
        name = ".".join(step for step in path.split(".") if step != "_orig_mod")
        if isinstance(part, Tensor):
            tensors[name] = part
            continue
        if "_orig_mod" not in part._modules:
            digest.update(f"{name} {type(part).__name__} {part.extra_repr()};".encode())
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                tensors[f"{name}.{key}" if name else key] = tensor
    files.hash_tensors(digest, tensors)
    return digest.hexdigest()


_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def _named_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """Yield all modules of a model by name, then what torch does not list: modules and weights.

    A module with several names is yielded under each of those that torch lists.
    """
    modules = [*_listed(model, "", ())]
    yield from modules
    if weights_of(model).is_plain:
        return
    visited = {id(part) for _, module in modules for part in (module, *_own_tensors(module))}
    for name, module in modules:  # which grows
        for key, hidden in unlisted(module):
            path = f"{name}.{key}" if name else key
            parts = [(path, hidden)]
            if isinstance(hidden, nn.Module):
                parts = [*_listed(_function_of(hidden), path, ())]
            for part_name, part in parts:
                if id(part) in visited:
                    continue
                visited.add(id(part))
                yield part_name, part
                if isinstance(part, nn.Module):
                    modules.append((part_name, part))
                    visited.update(map(id, _own_tensors(part)))


def _own_tensors(module: nn.Module) -> list[Tensor | None]:
    return [*module._parameters.values(), *module._buffers.values()]


def _listed(
    module: nn.Module, name: str, above: tuple[nn.Module, ...]
) -> Iterator[tuple[str, nn.Module]]:
    yield name, module
    above = (*above, module)
    for key, child in module._modules.items():
        function = None if child is None else _function_of(child)
        if function is not None and not any(function is ancestor for ancestor in above):
            yield from _listed(function, f"{name}.{key}" if name else key, above)


_DEVICES = tuple(
    device
    for device in ("cpu", "cuda", "hpu", "mps", "mtia", "xpu")
    if torch.amp.is_autocast_available(device)
)


def autocast(model: nn.Module) -> str:
    """Return the devices and types of autocast in this thread; empty where it is off.

    Autocast of devices that the model is not on changes nothing.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     autocast(nn.Linear(1, 1))
    'cpu bfloat16'
    >>> autocast(nn.Linear(1, 1))
    ''
    """
    enabled = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    if not enabled or not type(model).__dict__.get("computes", True):  # see ffcp.Stored
        return ""
    used = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    return ", ".join(
        f"{device} {str(torch.get_autocast_dtype(device)).removeprefix('torch.')}"
        for device in enabled
        if device in used or not used
    )


def checked_autocast(state: str) -> str:
    """Return what :func:`autocast` returned; raise ValueError for anything else."""
    for entry in state.split(", ") if state else ():
        device, _, name = entry.partition(" ")
        if not device.isalnum() or not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"expected a device and a type for autocast, got {entry!r}")
    return state


@dataclass
class Identity:
    """The layers and weights of a model at some moment: their hash, and cheap signs of change.

    A check compares stamps, which is cheap; a difference means hashing again. Changes that no
    stamp shows are found by the hash, taken when saving, merging and updating. Autocast, which
    computes with the same weights in another type, is part of the identity; so are forward hooks,
    which no file holds.

    >>> model = nn.Linear(2, 1)
    >>> identity = Identity.of(model)
    >>> identity.is_that_of(model)
    True
    >>> _ = nn.init.zeros_(model.weight)
    >>> identity.is_that_of(model)
    False
    """

    fingerprint: str
    autocast: str = ""  # see autocast
    hooks: frozenset[Hook] | None = None  # ``None``: not known
    stamp: Stamp | None = field(default=None, repr=False)  # when the fingerprint was last confirmed

    @classmethod
    def of(cls, model: nn.Module) -> Identity:
        """Return the identity of a model as it is now."""
        now = weights_of(model)
        return cls(fingerprint(model), autocast(model), hooks_of(model), now.stamp)

    def check(self, model: nn.Module, now: Weights | None = None) -> None:
        """Raise RuntimeError if the weights, the hooks or autocast differ."""
        current = autocast(model)
        if current != self.autocast:
            self.must_be_run_alike(current)
        if not self.is_that_of(model, now):
            raise RuntimeError(
                "the model's weights or hooks have changed since the calibration, "
                "so intervals would not be valid: calibrate again, or restore them"
            )

    def must_be_run_alike(self, now: str) -> None:
        """Raise RuntimeError if autocast differs from that of the calibration."""
        if now != self.autocast:
            raise RuntimeError(
                f"calibrated with autocast {self.autocast or 'off'}, and the model would now run "
                f"with autocast {now or 'off'}: do both inside or both outside torch.autocast "
                "(each thread has its own)"
            )

    def is_that_of(self, model: nn.Module, now: Weights | None = None) -> bool:
        """Whether a model has these weights and hooks; ``now`` if they were just read."""
        stamp = (now or weights_of(model)).stamp
        if stamp != self.stamp:
            if fingerprint(model) != self.fingerprint:
                return False
            if self.hooks is not None and self.hooks != hooks_of(model):
                return False
            self.stamp = stamp
        return True

    def must_be_that_of(
        self, model: nn.Module, loaded: Mapping[str, Tensor] | None = None, assign: bool = False
    ) -> None:
        """Raise ValueError if a model has other weights, or would once these are loaded.

        Loading is tried on a copy; models that cannot be copied are checked when they predict.
        """
        if loaded is None:
            same = self.is_that_of(model)
        else:
            try:
                trial = copy.deepcopy(model)
            except Exception:
                return
            trial.load_state_dict(loaded, strict=False, assign=assign)
            same = fingerprint(trial) == self.fingerprint  # without a stamp: the trial is discarded
        if not same:
            raise ValueError(
                "it was calibrated with other weights than this model has: "
                "load those weights, or calibrate again"
            )

    def __getstate__(self) -> dict[str, Any]:
        # Pointers and the numbers of hooks differ in another process or copy.
        return {**self.__dict__, "stamp": None, "hooks": None}
