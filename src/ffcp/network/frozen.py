"""A private frozen twin of the user's model, so that the model itself is never touched.

All work is done on twins: deep copies in eval mode whose parameters share the storage of the
originals and need no gradients. Hooks are put on a twin that one call alone uses, so any number of
threads can ask at once, and the model can be run or trained elsewhere meanwhile. Buffers are
copied, because a forward pass may write to them.

Where no twin is possible (modules that cannot be copied, compiled and scripted ones, a forward that
reaches around its module to the original), the model itself is used, one call at a time, and left
as it was found: then nothing else may run it meanwhile.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as hooks_of_all
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ffcp.locks import lock
from ffcp.network.hidden_weights import function_of, unlisted
from ffcp.network.model_output import Picking, whole

Stamp = tuple[Any, ...]
Hook = tuple[str, str, int]  # the name of a module, which of its hooks, and the hook's number
_OUTPUT, _INPUT = "_forward_hooks", "_forward_pre_hooks"
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


def stamp(model: nn.Module) -> Stamp:
    """Say where the tensors of a model lie and how often they were written to.

    Equal stamps mean the same layers and weights, unless something wrote to them behind the back
    of torch's version counters, as fused optimisers, ``.data`` and numpy do.
    """
    return stamped(model)[0]


def stamped(model: nn.Module) -> tuple[Stamp, list[Tensor]]:
    """Take the stamp of a model, and give the tensors that it speaks of."""
    # Taken in every call, so written out: model.modules() takes three times as long.
    marks: list[Any] = []
    tensors: list[Any] = []
    modules, known = [model], {id(model)}
    for module in modules:
        if module._forward_hooks:
            marks += module._forward_hooks
        if module._forward_pre_hooks:
            marks += module._forward_pre_hooks
        if module._parameters:
            tensors += module._parameters.values()
        if module._buffers:
            tensors += module._buffers.values()
        children: Any = module._modules.values()
        if found := unlisted(module):
            tensors += [thing for _, thing in found if isinstance(thing, Tensor)]
            children = [*children, *(one for _, one in found if isinstance(one, nn.Module))]
        for child in children:
            if child is not None and id(child) not in known:
                known.add(id(child))
                inner = function_of(child)
                if inner is child or id(inner) not in known:
                    known.add(id(inner))
                    modules.append(inner)
        marks.append(-len(tensors))  # which are this module's, and which the next one's
    tensors = [tensor for tensor in tensors if tensor is not None]
    places = [tensor.data_ptr() for tensor in tensors]
    return (*marks, *map(id, modules), *map(id, tensors), *places, *_versions(tensors)), tensors


def were_written(tensors: list[Tensor], since: Stamp) -> bool:
    """Say whether the tensors of a stamp were written to after it was taken.

    Layers that were exchanged do not count: a twin that runs has those of the stamp.

    >>> model = nn.Linear(2, 1)
    >>> now, tensors = stamped(model)
    >>> _ = nn.init.zeros_(model.bias)
    >>> were_written(tensors, now)
    True
    """
    return tuple(_versions(tensors)) != since[len(since) - len(tensors) :]


def _versions(tensors: list[Tensor]) -> list[int]:
    """Return how often tensors were written to; the hash of those for which torch does not count.

    It does not for tensors made in inference mode.
    """
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [_hash(tensor) if tensor.is_inference() else tensor._version for tensor in tensors]


def _hash(tensor: Tensor) -> int:
    return hash(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def frozen_copy(model: nn.Module, without: frozenset[Hook] | None = None) -> nn.Module | None:
    """Copy a model, parameters and some hooks apart; ``None`` where it cannot be copied.

    Left out are, if nothing else is said, hooks that are known to only look. Hooks on backward
    passes are never copied: they watch or change how a model is trained, and are no part of the
    function whose gradient is taken.

    >>> model = nn.Linear(2, 1)
    >>> frozen = frozen_copy(model)
    >>> frozen.weight.data_ptr() == model.weight.data_ptr(), frozen.weight.requires_grad
    (True, False)
    """
    if any(map(_is_opaque, model.modules())):
        return None
    try:
        # By .data and not by detach(), which shares the version counter: a weight that is trained
        # meanwhile would raise in our backward pass.
        memo: dict[int, Any] = {
            id(p): nn.Parameter(p.data, requires_grad=False) for p in model.parameters()
        }
        # A predictor that is a part of its model has no part in the function.
        memo.update({id(p): nn.Module() for p in model.modules() if function_of(p) is not p})
        frozen = copy.deepcopy(model, memo)
    except Exception:  # whatever a user's module does when it is copied
        return None
    for module in frozen.modules():
        module.training = False  # one by one: an overridden train() may do more than switch
        for kind in _BACKWARD:
            getattr(module, kind).clear()
        module._is_full_backward_hook = None
    for name, kind, number in _pool(model).unwanted(model) if without is None else without:
        getattr(frozen.get_submodule(name), kind).pop(number, None)
    frozen.__dict__[_MARK] = weakref.ref(model)
    return frozen


def refuse_unusable(model: nn.Module) -> None:
    """Refuse models whose weights are not all here: not made yet, or divided over processes.

    >>> refuse_unusable(nn.LazyLinear(3))
    Traceback (most recent call last):
    ValueError: the model has layers without weights yet (LazyLinear): run it once on some rows
    """
    for module in model.modules():
        kind: Any = type(module)
        if _is_sharded(kind):
            raise ValueError(
                "the weights of the model are divided over processes (FSDP), so that no process "
                "can run or compare it alone: gather them into a plain model, and give that"
            )
        own = [*module._parameters.values(), *module._buffers.values()]
        if any(isinstance(tensor, UninitializedParameter | UninitializedBuffer) for tensor in own):
            raise ValueError(
                f"the model has layers without weights yet ({type(module).__name__}): run it once "
                "on some rows"
            )
        if (rows := _exported_for(module)) is not None:
            raise ValueError(
                f"the model was exported for exactly {rows} rows at a time: export it for any "
                "number of them, with torch.export.Dim('rows') for dimension 0 in dynamic_shapes, "
                "or give the original module"
            )


@functools.cache
def _is_sharded(kind: type) -> bool:
    """Say, by names: the parts of torch that define them are slow to import, and may be missing."""
    kinds = {one.__name__ for one in kind.__mro__}
    return not kinds.isdisjoint({"FullyShardedDataParallel", "FSDPModule"})


def _exported_for(module: nn.Module) -> int | None:
    """Say how many rows an exported model takes, if that is one number."""
    if isinstance(module, fx.GraphModule) and hasattr(module, "range_constraints"):
        for node in module.graph.nodes:
            value = node.meta.get("val") if node.op == "placeholder" else None
            if isinstance(value, Tensor) and value.dim() and isinstance(value.shape[0], int):
                return value.shape[0]
    return None


_MARK = "_ffcp_twin_of"  # an attribute of twins alone, which are nobody else's


def _is_opaque(module: nn.Module) -> bool:
    """Say whether a module is scripted, or compiled: a copy would be compiled all over again."""
    module = whole(module)
    return isinstance(module, torch.jit.ScriptModule) or "_orig_mod" in module._modules


def uncompiled(model: nn.Module) -> nn.Module:
    """Give the module that was compiled; any other as it is.

    Features are cut on the original, so that nothing is compiled anew for the sake of a layer.
    """
    if isinstance(model, Picking) or "_orig_mod" not in model._modules:
        return model
    return model.get_submodule("_orig_mod")


def is_frozen_copy(model: nn.Module) -> bool:
    """Say whether a module is a twin as a whole, or as good as one."""
    return is_private(model) or gives_back(model)


def is_private(model: nn.Module) -> bool:
    """Say whether a module is a twin, which one call alone uses."""
    return _MARK in model.__dict__


def gives_back(model: nn.Module) -> bool:
    """Say whether a module has nothing to compute, see :class:`ffcp.Stored`.

    Not if it has hooks or a forward of its own, which may.
    """
    if getattr(type(model), "computes", True):
        return False
    hooks = model._forward_hooks or model._forward_pre_hooks or has_hooks_of_all()
    return not (hooks or "forward" in model.__dict__)


def has_hooks_of_all() -> bool:
    """Say whether there are hooks on whatever module is run."""
    return bool(hooks_of_all._global_forward_hooks or hooks_of_all._global_forward_pre_hooks)


def original(model: nn.Module) -> nn.Module:
    """Give the model that a twin was made of; any other module is its own original."""
    made_of: weakref.ref[nn.Module] | None = model.__dict__.get(_MARK)
    return (made_of() if made_of is not None else None) or model


class _Pool:
    """The twins of one model that nobody uses at the moment; what was found out about it."""

    def __init__(self) -> None:
        self._lock = lock()
        self._alone = lock(again=True)  # held by the one call that uses the model itself
        self._stamp: Stamp | None = None
        self._waiting: list[nn.Module] = []
        self._watched: dict[int, tuple[set[Hook], frozenset[Hook]]] = {}  # twins that find out
        self.has_twins = True
        self.runs_itself = False  # whether a call had to use the model itself
        self.hooks: frozenset[Hook] | None = None  # that were there when it was seen what they do
        self.changing: frozenset[Hook] = frozenset()  # those of them that are part of the function

    def unwanted(self, model: nn.Module) -> frozenset[Hook]:
        """Give the hooks that twins do without: those that look, and those that came later."""
        return frozenset() if self.hooks is None else hooks_of(model) - self.changing

    def take(self, model: nn.Module, now: Stamp) -> nn.Module:
        """Give a twin of the model as it is at a stamp."""
        with self._lock:
            if self._stamp != now:  # moved, exchanged or trained: the twins there are are stale
                self._stamp, self._waiting = now, []
            if self._waiting:
                return self._waiting.pop()
            # At one moment: a twin that finds out what hooks do must have all of them.
            unwanted, finds_out = self.unwanted(model), self.hooks is None
        frozen = frozen_copy(model, unwanted) if self.has_twins else None
        self.runs_itself = frozen is None
        if frozen is None:
            self._alone.acquire()
        elif finds_out:  # the first pass finds out what they do
            self._watched[id(frozen)] = _watched(frozen), hooks_of(model)
        return frozen or model

    def give_back(self, frozen: nn.Module, made_of: Stamp, is_model: bool) -> None:
        """Take a twin back, if it is still one."""
        if is_model:
            self._alone.release()
            return
        with self._lock:
            if id(frozen) in self._watched:
                looking, hooks = self._watched.pop(id(frozen))
                self.hooks, self.changing = hooks, hooks - looking
            elif self._stamp == made_of and self.has_twins:
                self._waiting.append(frozen)

    def forget(self, hooks: bool = False) -> None:
        """Make new twins from now on, and find out again what hooks do."""
        with self._lock:
            self._stamp, self._waiting = None, []
            if hooks:  # which of them change something stays as it was until that is known
                self.has_twins, self.hooks = True, None


_POOLS: WeakKeyDictionary[nn.Module, _Pool] = WeakKeyDictionary()
_POOLS_LOCK = lock()


def _pool(model: nn.Module) -> _Pool:
    pool = _POOLS.get(model)
    if pool is None:
        with _POOLS_LOCK:
            pool = _POOLS.setdefault(model, _Pool())
    return pool


def runs_itself(model: nn.Module) -> bool:
    """Say whether calls use the model itself, because it has no twins."""
    pool = _POOLS.get(model)
    return pool is not None and pool.runs_itself


class borrowed:  # noqa: N801 - reads as a function; one made by contextmanager takes its time
    """Give a twin of the model that nobody else uses until the block ends.

    ``now`` is the model's stamp, if it is known.

    >>> model = nn.Sequential(nn.Linear(2, 1), nn.Dropout())
    >>> with borrowed(model) as frozen:
    ...     frozen.training, frozen[0].weight.requires_grad
    (False, False)
    >>> model.training, model[0].weight.requires_grad
    (True, True)
    """

    __slots__ = ("_made_of", "_model", "_pool", "_twin")

    def __init__(self, model: nn.Module, now: Stamp | None = None) -> None:
        self._model, self._made_of = model, now

    def __enter__(self) -> nn.Module:
        if is_frozen_copy(self._model):
            self._pool = None
            return self._model
        self._pool = _pool(self._model)
        if self._made_of is None:
            self._made_of = stamp(self._model)
        self._twin = self._pool.take(self._model, self._made_of)
        return self._twin

    def __exit__(self, *error: object) -> None:
        if self._pool is not None and self._made_of is not None:
            self._pool.give_back(self._twin, self._made_of, self._twin is self._model)


def renew(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> None:
    """Forget the twins there are, and find out by a pass whether the model can have any.

    A forward that is a closure over the original model runs that one, with its dropout and its
    trainable weights, whatever copy it is called on: the output then has a gradient though
    nothing in the twin needs one.

    Hooks of the user's that only look, at what goes in or comes out, are called by this pass, and
    by no other.
    """
    if is_frozen_copy(model):
        return
    pool = _pool(model)
    pool.forget(hooks=True)
    with borrowed(model) as frozen, torch.inference_mode(False), torch.enable_grad():
        if frozen is model:
            return
        reaches_around = run(frozen).requires_grad
    pool.has_twins = not reaches_around
    pool.forget()


def hooks_of(model: nn.Module) -> frozenset[Hook]:
    """Name the hooks of the user's on what goes into modules and comes out of them."""
    return frozenset(
        (name, kind, number)
        for name, module in model.named_modules()
        for kind in (_OUTPUT, _INPUT)
        for number in getattr(module, kind)
    )


def changing_hooks(model: nn.Module) -> frozenset[Hook]:
    """Give the hooks that are a part of the model's function, as far as that is known."""
    pool = _POOLS.get(model)
    return frozenset() if pool is None else pool.changing


def _watched(frozen: nn.Module) -> set[Hook]:
    """Watch the user's hooks; those that only look are in the set once the twin has run."""
    looking: set[Hook] = set()
    for name, module in frozen.named_modules():
        for kind in (_OUTPUT, _INPUT):
            hooks = getattr(module, kind)
            for number, hook in hooks.items():
                hooks[number] = _Watch(hook, looking, (name, kind, number))
    return looking


class _Watch:
    """A hook that calls another and notes whether it left what it saw as it was.

    That is what goes into the module or comes out of it, and the module itself: hooks of old
    ``weight_norm`` make its weight.
    """

    def __init__(self, hook: Callable[..., Any], looking: set[Hook], place: Hook) -> None:
        self._hook, self._looking, self._place, self._changed = hook, looking, place, False

    def __call__(self, module: nn.Module, *seen: Any) -> Any:
        _, kind, _ = self._place
        shown = (
            [seen[-1]]
            if kind == _OUTPUT
            else [*seen[0], *(seen[1] if len(seen) > 1 else {}).values()]
        )
        before = _marks(module, shown)
        returned = self._hook(module, *seen)
        # Of what is no tensor nobody knows: such a hook stays.
        known = all(isinstance(one, Tensor) for one in shown)
        self._changed |= returned is not None or not known or _marks(module, shown) != before
        (self._looking.discard if self._changed else self._looking.add)(self._place)
        return returned


def _marks(module: nn.Module, shown: list[Any]) -> list[Any]:
    """Say where the tensors lie that a hook sees, and what the module holds."""
    own = {**module._parameters, **module._buffers, **module.__dict__}
    tensors = [one for one in [*shown, *own.values()] if isinstance(one, Tensor)]
    versions = [0 if one.is_inference() else one._version for one in tensors]
    return [list(own), [id(one) for one in own.values()], [id(one) for one in tensors], versions]
