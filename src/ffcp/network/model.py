"""The frozen copy of a model that work is done on, and whether the model still has its weights.

All work is done on deep copies in eval mode whose parameters share the storage of the originals
and need no gradients. Hooks are put on a copy that one call alone uses, so any number of threads
can ask at once, and the model can be run or trained elsewhere meanwhile. Buffers are copied,
because a forward pass may write to them.

Forward hooks of the user's that only look are not on the copies. Where no copy computes what the
model does (modules that cannot be copied, compiled and scripted ones, hooks that change something,
a forward that reaches around its module to the original), the model itself is used, one call at a
time, and left as it was found: then nothing else may run it meanwhile.
"""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from ffcp import files
from ffcp.locks import lock
from ffcp.network.hidden_weights import may_hold_more, unlisted
from ffcp.network.model_output import Picking

Stamp = tuple[Any, ...]
Hook = tuple[str, str, int]  # the name of a module, which of its hooks, and the hook's number
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
_DICTS = ("_modules", "_parameters", "_buffers", *_FORWARD)
OWN_HOOK = "_ffcp_hook"  # an attribute of hooks that are not the user's
_MARK = "_ffcp_copy_of"  # an attribute of frozen copies alone, which are nobody else's


class _Known:
    """What is known of one model: where its weights are, and copies that nobody uses now."""

    def __init__(self) -> None:
        self.lock = lock()
        self.alone = lock(again=True)  # held by the one call that uses the model itself
        self.parts: _Parts | None = None
        self.stamp: Stamp | None = None
        self.waiting: list[nn.Module] = []  # copies of the model as it was at the stamp
        self.has_copies: bool | None = None  # whether these compute what the model does
        self.hooks: frozenset[Hook] = frozenset()  # those of the model, if they change something


_KNOWN: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()
_KNOWN_LOCK = lock()


def _known(model: nn.Module) -> _Known:
    known = _KNOWN.get(model)
    if known is None:
        with _KNOWN_LOCK:
            known = _KNOWN.setdefault(model, _Known())
    return known


class _Parts:
    """The modules and tensors of a model: looked for once, and compared in every call."""

    def __init__(self, model: nn.Module) -> None:
        modules, known, hidden = [model], {id(model)}, list[Tensor]()
        self.is_plain = True  # whether torch lists all there is
        for module in modules:  # which grows
            inner = [child for child in module._modules.values() if child is not None]
            if may_hold_more(module) or any(_function_of(child) is not child for child in inner):
                self.is_plain = False
                more = [thing for _, thing in unlisted(module)]
                hidden += [thing for thing in more if isinstance(thing, Tensor)]
                inner += [thing for thing in more if isinstance(thing, nn.Module)]
            for child in map(_function_of, inner):
                if id(child) not in known:
                    known.add(id(child))
                    modules.append(child)
        listed = chain(
            *(m._parameters.values() for m in modules), *(m._buffers.values() for m in modules)
        )
        self.tensors = [*(tensor for tensor in listed if tensor is not None), *hidden]
        self._attributes = [module.__dict__ for module in modules]
        self._dicts = [getattr(module, name) for module in modules for name in _DICTS]
        self.found = self.marks()

    def marks(self) -> Stamp:
        """Return what is where: the types of attributes, and all modules, tensors and hooks."""
        attributes = map(type, chain.from_iterable(map(dict.values, self._attributes)))
        return (*attributes, *[id(thing) for own in self._dicts for thing in own.values()])


def _function_of(module: nn.Module) -> nn.Module:
    """Return the module, or the model that it wraps if it is one of this library's predictors.

    A model may have its own predictor as an attribute: scores are no part of what it computes.
    """
    return module.model if getattr(type(module), "is_predictor", False) else module  # type: ignore[return-value]


def _parts(model: nn.Module) -> _Parts:
    known = _known(model)
    parts = known.parts
    if parts is None or parts.marks() != parts.found:
        parts = _Parts(model)
        # What hooks and attributes hold may change unseen, and may hold the model itself.
        known.parts = parts if parts.is_plain else None
    return parts


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Return the weights of a model: parameters, then buffers, then what torch does not list."""
    return _parts(model).tensors


def stamp(model: nn.Module) -> Stamp:
    """Return where the tensors of a model lie and how often they were written to.

    Equal stamps mean the same layers and weights, unless something wrote to them behind the back
    of torch's version counters, as fused optimisers, ``.data`` and numpy do.

    >>> model = nn.Linear(2, 1)
    >>> before = stamp(model)
    >>> _ = nn.init.zeros_(model.bias)
    >>> stamp(model) == before
    False
    """
    parts = _parts(model)
    tensors = parts.tensors
    try:
        versions = [tensor._version for tensor in tensors]
    except RuntimeError:  # torch does not count for tensors made in inference mode
        versions = [_hash(one) if one.is_inference() else one._version for one in tensors]
    return (*parts.found, *[tensor.data_ptr() for tensor in tensors], *map(id, tensors), *versions)


def _hash(tensor: Tensor) -> int:
    return hash(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def frozen_copy(model: nn.Module, with_hooks: bool = False) -> nn.Module | None:
    """Copy a model, parameters and hooks apart; ``None`` where no copy computes what it does.

    Hooks on backward passes are never copied: they watch or change how a model is trained, and
    are no part of the function whose gradient is taken.

    >>> model = nn.Linear(2, 1)
    >>> frozen = frozen_copy(model)
    >>> frozen.weight.data_ptr() == model.weight.data_ptr(), frozen.weight.requires_grad
    (True, False)
    """
    modules = [*model.modules(), model.whole if isinstance(model, Picking) else model]
    # Scripted, or compiled: a copy would be compiled all over again.
    if any(isinstance(m, torch.jit.ScriptModule) or "_orig_mod" in m._modules for m in modules):
        return None
    has_copies = _known(model).has_copies
    if not with_hooks and not (not hooks_of(model) if has_copies is None else has_copies):
        return None
    try:
        # By .data and not by detach(), which shares the version counter: a weight that is trained
        # meanwhile would raise in our backward pass.
        memo: dict[int, Any] = {
            id(p): nn.Parameter(p.data, requires_grad=False) for p in model.parameters()
        }
        # A predictor that is a part of its model has no part in the function.
        memo.update({id(p): nn.Module() for p in modules if _function_of(p) is not p})
        frozen = copy.deepcopy(model, memo)
    except Exception:  # whatever a user's module does when it is copied
        return None
    for module in frozen.modules():
        module.training = False  # one by one: an overridden train() may do more than switch
        is_bare = not with_hooks and not isinstance(module, fx.GraphModule)
        for kind in (*_BACKWARD, *(_FORWARD if is_bare else ())):
            getattr(module, kind).clear()
        module._is_full_backward_hook = None
    frozen.__dict__[_MARK] = weakref.ref(model)
    return frozen


@contextmanager
def borrowed(model: nn.Module, now: Stamp | None = None) -> Iterator[nn.Module]:
    """Lend a frozen copy of the model that nobody else uses until the block ends.

    ``now`` is the model's stamp, if it is known.

    >>> with borrowed(nn.Linear(2, 1)) as frozen:
    ...     frozen.training, frozen.weight.requires_grad
    (False, False)
    """
    if is_frozen_copy(model):
        yield model
        return
    known, now = _known(model), stamp(model) if now is None else now
    with known.lock:
        if known.stamp != now:  # moved, exchanged or trained: the copies there are are stale
            known.stamp, known.waiting = now, []
        frozen = known.waiting.pop() if known.waiting else None
    frozen = frozen_copy(model) if frozen is None else frozen
    if frozen is None:
        with known.alone:
            yield model
        return
    yield frozen
    with known.lock:
        if known.stamp == now and known.has_copies is not False:
            known.waiting.append(frozen)


def renew(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> None:
    """Find out by a pass whether copies of the model compute what it does.

    A forward that is a closure over the original model runs that one, with its dropout and its
    trainable weights, whatever copy it is called on: the output then has a gradient though
    nothing in the copy needs one. Hooks of the user's are called by this pass; if they only look,
    by no other.
    """
    if is_frozen_copy(model):
        return
    known, changes = _known(model), dict[Hook, bool]()
    with known.alone:  # while no call that uses the model itself has hooks on it
        hooks, frozen = hooks_of(model), frozen_copy(model, with_hooks=True)
    has_copies = frozen is not None
    if frozen is not None:
        for name, kind, number in hooks:
            own = getattr(frozen.get_submodule(name), kind)
            own[number] = _watched(own[number], (name, kind, number), changes)
        with torch.inference_mode(False), torch.enable_grad():
            reaches_around = run(frozen).requires_grad
        only_look = len(changes) == len(hooks) and not any(changes.values())
        has_copies = only_look and not reaches_around
    with known.lock:
        known.has_copies, known.waiting = has_copies, []
        known.hooks = frozenset() if has_copies else hooks


def _watched(
    hook: Callable[..., Any], place: Hook, changes: dict[Hook, bool]
) -> Callable[..., Any]:
    """Return a hook that calls another and notes whether that left what it saw as it was.

    That is what goes into the module or comes out of it, and the module itself: hooks of old
    ``weight_norm`` make its weight.
    """

    def watch(module: nn.Module, *seen: Any) -> Any:
        shown = [seen[-1]]
        if place[1] == "_forward_pre_hooks":
            shown = [*seen[0], *(one for named in seen[1:] for one in named.values())]

        def marks() -> list[Any]:
            own = {**module._parameters, **module._buffers, **module.__dict__}
            tensors = [one for one in (*shown, *own.values()) if isinstance(one, Tensor)]
            return [*own, *map(id, own.values()), *(one._version for one in tensors)]

        before = marks()
        returned = hook(module, *seen)
        # Of what is no tensor nobody knows whether it was changed.
        are_tensors = all(isinstance(one, Tensor) for one in shown)
        changed = returned is not None or not are_tensors or marks() != before
        changes[place] = changes.get(place, False) or changed
        return returned

    return watch


def hooks_of(model: nn.Module) -> frozenset[Hook]:
    """Name the hooks of the user's on what goes into modules and comes out of them.

    Those of exported models are torch's own, and stay on copies.
    """
    return frozenset(
        (name, kind, number)
        for name, module in model.named_modules()
        if not isinstance(module, fx.GraphModule)
        for kind in _FORWARD
        for number, hook in getattr(module, kind).items()
        if not hasattr(hook, OWN_HOOK)
    )


def is_frozen_copy(model: nn.Module) -> bool:
    """Whether a module is a frozen copy, which one call alone uses."""
    return _MARK in model.__dict__


def original(model: nn.Module) -> nn.Module:
    """Return the model that a frozen copy was made of; any other module is its own original."""
    made_of: weakref.ref[nn.Module] | None = model.__dict__.get(_MARK)
    return (made_of() if made_of is not None else None) or model


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that was compiled, whose layers can be cut at; any other as it is."""
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
    for name, part in _named_parts(model):
        plain = ".".join(one for one in name.split(".") if one != "_orig_mod")
        if isinstance(part, Tensor):
            tensors[plain] = part
            continue
        if "_orig_mod" not in part._modules:
            digest.update(f"{plain} {type(part).__name__} {part.extra_repr()};".encode())
        for own, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                tensors[f"{plain}.{own}" if plain else own] = tensor
    files.hash_tensors(digest, tensors)
    return digest.hexdigest()


_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def _named_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """Yield all modules of a model by name, then what torch does not list: modules and weights.

    A module with several names is yielded under each of those that torch lists.
    """
    modules = [*_listed(model, "", ())]
    yield from modules
    if _parts(model).is_plain:
        return
    known = {id(one) for _, module in modules for one in (module, *_own_tensors(module))}
    for name, module in modules:  # which grows
        for path, thing in unlisted(module):
            full = f"{name}.{path}" if name else path
            inner = [(full, thing)]
            if isinstance(thing, nn.Module):
                inner = [*_listed(_function_of(thing), full, ())]
            for part, one in inner:
                if id(one) in known:
                    continue
                known.add(id(one))
                yield part, one
                if isinstance(one, nn.Module):
                    modules.append((part, one))
                    known.update(map(id, _own_tensors(one)))


def _own_tensors(module: nn.Module) -> list[Tensor | None]:
    return [*module._parameters.values(), *module._buffers.values()]


def _listed(
    module: nn.Module, name: str, above: tuple[nn.Module, ...]
) -> Iterator[tuple[str, nn.Module]]:
    yield name, module
    for own, child in module._modules.items():
        inner = None if child is None else _function_of(child)
        if inner is not None and not any(inner is one for one in (*above, module)):
            yield from _listed(inner, f"{name}.{own}" if name else own, (*above, module))


_DEVICES = tuple(
    device
    for device in ("cpu", "cuda", "hpu", "mps", "mtia", "xpu")
    if torch.amp.is_autocast_available(device)
)


def autocast(model: nn.Module) -> str:
    """Return in which types autocast lets a model compute in this thread; empty where it is off.

    Autocast of devices that the model is not on changes nothing.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     autocast(nn.Linear(1, 1))
    'cpu bfloat16'
    >>> autocast(nn.Linear(1, 1))
    ''
    """
    on = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    if not on or not type(model).__dict__.get("computes", True):  # see ffcp.Stored
        return ""
    used = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} or {*on}
    kinds = {device: str(torch.get_autocast_dtype(device)).removeprefix("torch.") for device in on}
    return ", ".join(f"{device} {kinds[device]}" for device in on if device in used)


def checked_autocast(kind: str) -> str:
    """Refuse, by ValueError, what :func:`autocast` cannot have returned."""
    for part in kind.split(", ") if kind else ():
        device, _, name = part.partition(" ")
        if not device.isalnum() or not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"expected a device and a type for autocast, got {part!r}")
    return kind


class Identity:
    """The layers and weights of a model at some moment: their hash, and cheap signs of change.

    Asking again compares stamps, which costs next to nothing; a difference means hashing again.
    What no stamp sees only the hash does, taken when saving, merging and updating. Autocast, which
    lets the same weights compute in another type, is part of the identity.

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
        self.autocast = autocast  # see autocast
        self._stamp = known  # of a model that was seen to have this fingerprint
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
                f"calibrated with autocast {self.autocast or 'off'}, and the model would now run "
                f"with autocast {now or 'off'}: do both inside or both outside torch.autocast "
                "(each thread has its own)"
            )

    def is_that_of(self, model: nn.Module, now: Stamp | None = None) -> bool:
        """Whether a model has these weights, by its stamp ``now`` if that is known."""
        known = _known(model)
        if self._hooks is not None and known.hooks != self._hooks:
            return False
        now = stamp(model) if now is None else now
        if now != self._stamp:
            if fingerprint(model) != self.fingerprint:
                return False
            if self._hooks is not None and not known.has_copies and self._hooks != hooks_of(model):
                return False
            self._stamp = now
        return True

    def must_be_that_of(
        self, model: nn.Module, loaded: Mapping[str, Tensor] | None = None, assign: bool = False
    ) -> None:
        """Refuse a model with other weights, or one that has others once these are loaded.

        Loading is tried on a copy; models that cannot be copied are looked at when they predict.
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
        self._hooks = _known(model).hooks

    def __getstate__(self) -> dict[str, Any]:
        # In another process, or of another copy, pointers and the numbers of hooks are others.
        return {**self.__dict__, "_stamp": None, "_hooks": None}
