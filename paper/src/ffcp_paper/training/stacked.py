"""Training of several of the paper's networks at once, with stacked weights.

The networks are tiny: one at a time, most of a step is the overhead of its many small calls. Here
the weights of all networks are stacked, so that one batched matrix product does a layer of every
network, the backward pass is written out, and one call of Adam updates everything.

Each network has its own rows, its own order of rows and its own dropout, drawn as
:func:`ffcp_paper.training.regression.train` draws them with the same seed, and the arithmetic is
done in the same order: stacked and single training give the same networks. What is left is
rounding in matrix products of some shapes: measured with one thread, weights were equal to the
last bit at the sizes of com and bio, and differed by 6e-8 after four epochs at the size of bike.
Such differences grow with the number of steps, as between any two processors.

``python -m benchmarks.stacked`` compares with training one by one. On two quiet cores, each way
with the number of threads that suits it, five seeds are 4.6 to 6.0 times faster together. With one
thread half of their time goes into drawing dropout, which must follow the same stream of random
numbers as in single training; with two, it is drawn while the other thread computes. Networks of
one seed share it: five seeds at five pairs of quantile levels, 25 networks, are 9 to 10 times
faster together than one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ffcp import pinball_loss
from ffcp_paper.networks.regression import mlp
from ffcp_paper.training.minibatches import Block, MinibatchSampler, Shape, prefetch

Levels = tuple[float, ...] | list[tuple[float, ...]]  # of all networks, or of each

_BETAS, _EPS = (0.9, 0.999), 1e-8  # the defaults of torch.optim.Adam


def train_stacked(
    models: Sequence[nn.Module],
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    *,
    epochs: int | Sequence[int],
    seeds: Sequence[int],
    levels: Levels | None = None,
    learning_rate: float = 5e-4,
    weight_decay: float = 1e-6,
    batch_size: int = 64,
    progress: Callable[[], None] = lambda: None,
    stop: Callable[[int, nn.Module], bool] | None = None,
    done: Callable[[int, nn.Module], None] = lambda number, model: None,
) -> list[nn.Module]:
    """Fit networks of one shape, each to its own data, in place and all at once.

    The same as calling :func:`ffcp_paper.training.regression.train` for each of them, but faster.

    Parameters
    ----------
    models
        Made by :func:`ffcp_paper.networks.regression.mlp` with the same arguments.
    xs, ys
        The rows and targets of each network, the same number of rows for all. Targets have shape
        (n,) or (n, 1).
    epochs
        How often each network sees its rows: one number for all, or one for each. A network that
        is done leaves the stack.
    seeds
        One for each network; its order of rows and its dropout depend on it alone. They are
        drawn once for networks of the same seed.
    levels
        Train with the pinball loss at these quantile levels, one for each output; with the squared
        error if not given. A list has the levels of each network.
    learning_rate, weight_decay, batch_size
        As in :func:`ffcp_paper.training.regression.train`.
    progress
        Called after every epoch, once for each network that took part.
    stop
        Called after every epoch with the position of each network that took part and the network
        itself in eval mode; returns whether to end its training.
    done
        Called with the position of a network and the network itself when its training has ended.

    Returns
    -------
    list of nn.Module
        The models, in eval mode.

    Examples
    --------
    >>> xs = [torch.rand(100, 3) for _ in range(2)]
    >>> ys = [x.sum(dim=1) for x in xs]
    >>> models = train_stacked([mlp(3), mlp(3)], xs, ys, epochs=[2, 1], seeds=[0, 1])
    >>> [tuple(model(x).shape) for model, x in zip(models, xs)]
    [(100, 1), (100, 1)]
    """
    each = _each(levels, len(models))
    shape, left = _check(models, xs, ys, epochs, seeds, each, batch_size)
    alive = [number for number, count in enumerate(left) if count > 0]
    if alive:
        stacked = None if each is None else torch.tensor([each[i] for i in alive])[:, None]
        stack = _Stack([models[i] for i in alive], shape, stacked, learning_rate, weight_decay)
        sampler = MinibatchSampler(alive, seeds, len(xs[0]), batch_size, shape, xs[0].dtype)
        targets = [y.reshape(len(y), 1) for y in ys]
        blocks = prefetch(sampler) if torch.get_num_threads() > 1 else iter(sampler, None)
    while alive:
        with torch.no_grad(), _one_thread():
            _epoch(stack, sampler, blocks, alive, xs, targets)
            stack.copy_to([models[i] for i in alive])
        ended = set()
        for number in alive:
            left[number] -= 1
            progress()
            if (stop is not None and stop(number, models[number].eval())) or not left[number]:
                ended.add(number)
                done(number, models[number].eval())
        if ended and ended < set(alive):
            stack.keep([at for at, number in enumerate(alive) if number not in ended])
        alive = sampler.alive = [number for number in alive if number not in ended]
    return [model.eval() for model in models]


def search_epochs_stacked(
    models: Sequence[nn.Module],
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    *,
    seeds: Sequence[int],
    epochs: int = 1000,
    patience: int = 100,
    levels: Levels | None = None,
    progress: Callable[[], None] = lambda: None,
    done: Callable[[int, int], None] = lambda number, best: None,
) -> list[int]:
    """Return the best number of epochs of each network, by training on 95 % of its rows.

    Parameters
    ----------
    models, xs, ys, seeds, levels, progress
        As for :func:`train_stacked`. The models are trained in the search and of no further use.
    epochs
        Largest number to try.
    patience
        After how many epochs without a smaller error the search of a network ends.
    done
        Called with the position of a network and its number of epochs when its search has ended.

    Examples
    --------
    >>> xs = [torch.rand(200, 2) for _ in range(2)]
    >>> ys = [x[:, 0] for x in xs]
    >>> search_epochs_stacked([mlp(2), mlp(2)], xs, ys, seeds=[0, 1], epochs=1)
    [1, 1]
    """
    each = _each(levels, len(models))
    held = [max(1, len(x) // 20) for x in xs]
    errors: list[list[float]] = [[] for _ in xs]

    def best(number: int) -> int:
        return errors[number].index(min(errors[number])) + 1

    def out_of_patience(number: int, model: nn.Module) -> bool:
        x, y = xs[number][: held[number]], ys[number][: held[number]]
        with torch.no_grad():
            error = (
                nn.functional.mse_loss(model(x), y[:, None])
                if each is None
                else pinball_loss(model(x), y, each[number])
            )
        errors[number].append(float(error))
        return len(errors[number]) - best(number) >= patience

    train_stacked(
        models,
        [x[rows:] for x, rows in zip(xs, held, strict=True)],
        [y[rows:] for y, rows in zip(ys, held, strict=True)],
        epochs=epochs,
        seeds=seeds,
        levels=levels,
        progress=progress,
        stop=out_of_patience,
        done=lambda number, model: done(number, best(number)),
    )
    return [best(number) for number in range(len(models))]


def pair(inputs: int, seed: int, outputs: int = 1) -> tuple[nn.Sequential, nn.Sequential]:
    """Build the network of a search and that of the training, as single training does.

    >>> [len(list(model.children())) for model in pair(3, seed=0)]
    [10, 10]
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return mlp(inputs, outputs=outputs), mlp(inputs, outputs=outputs)


def _each(levels: Levels | None, count: int) -> list[tuple[float, ...]] | None:
    """Return the quantile levels of each network."""
    return [levels] * count if isinstance(levels, tuple) else levels


# -- checks ------------------------------------------------------------------------------------


def _shape_of(model: nn.Module) -> Shape:
    layers = list(model.children()) if isinstance(model, nn.Sequential) else []
    kinds = [type(layer) for layer in layers]
    blocks = (len(kinds) - 1) // 3
    if not layers or kinds != [nn.Linear, nn.ReLU, nn.Dropout] * blocks + [nn.Linear]:
        raise ValueError(
            "only networks of Linear, ReLU, Dropout, ..., Linear can be stacked, as "
            "ffcp_paper.networks.regression.mlp makes them; train others one by one with "
            f"ffcp_paper.training.regression.train. Got {model}"
        )
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    rates = {layer.p for layer in layers if isinstance(layer, nn.Dropout)} or {0.0}
    if len(rates) > 1 or max(rates) >= 1 or any(layer.bias is None for layer in linear):
        raise ValueError(
            "networks are stacked if every Linear has a bias and every Dropout the same rate "
            f"below 1; got {model}"
        )
    sizes = (linear[0].in_features, *(layer.out_features for layer in linear))
    return Shape(sizes, rates.pop())


def _check(
    models: Sequence[nn.Module],
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    epochs: int | Sequence[int],
    seeds: Sequence[int],
    levels: list[tuple[float, ...]] | None,
    batch_size: int,
) -> tuple[Shape, list[int]]:
    """Return the common shape and each network's epochs; raise on what cannot be stacked."""
    left = [epochs] * len(models) if isinstance(epochs, int) else list(epochs)
    counts = {"xs": len(xs), "ys": len(ys), "seeds": len(seeds), "epochs": len(left)}
    counts |= {} if levels is None else {"levels": len(levels)}
    for name, count in counts.items():
        if count != len(models):
            raise ValueError(f"{len(models)} models but {count} {name}: give one for each")
    if not models:
        raise ValueError("no models to train: give at least one")
    shapes = [_shape_of(model) for model in models]
    if len(set(shapes)) > 1:
        raise ValueError(f"the networks must have one shape, got {sorted(set(map(str, shapes)))}")
    rows = [len(x) for x in xs]
    if len(set(rows)) > 1 or not rows[0]:
        raise ValueError(
            f"every network needs the same number of rows, at least one, got {rows}: stack those "
            "of equal number, or leave rows out"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    inputs, outputs = shapes[0].sizes[0], shapes[0].sizes[-1]
    _check_data(xs, ys, inputs)
    for own in [(0.5,)] if levels is None else levels:
        if len(own) != outputs:
            raise ValueError(f"{len(own)} targets or levels but {outputs} outputs")
        if not all(0 < level < 1 for level in own):
            raise ValueError(f"quantile levels must lie strictly between 0 and 1, got {own}")
    return shapes[0], left


def _check_data(xs: Sequence[Tensor], ys: Sequence[Tensor], inputs: int) -> None:
    for number, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if x.shape[1:] != (inputs,):
            raise ValueError(
                f"xs[{number}] has shape {tuple(x.shape)}, the network {inputs} inputs"
            )
        if y.shape not in ((len(x),), (len(x), 1)):
            raise ValueError(
                f"ys[{number}] has shape {tuple(y.shape)}, xs[{number}] {tuple(x.shape)}: a target "
                "has shape (n,) or (n, 1)"
            )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: products this small lose more to waiting than they gain from two.

    The other thread draws dropout in the meantime.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# -- steps -------------------------------------------------------------------------------------


def _epoch(
    stack: _Stack,
    sampler: MinibatchSampler,
    blocks: Iterator[Block],
    alive: list[int],
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
) -> None:
    """Take each network once through its rows, in its order."""
    size, hidden = sampler.batch_size, sampler.shape.hidden
    stop = 0
    while stop < sampler.rows:
        block = next(blocks).only(alive)
        if block.orders:
            x, y = (
                torch.stack([of[i][order] for i, order in zip(alive, block.orders, strict=True)])
                for of in (xs, ys)
            )
        at, stop = 0, block.stop
        for start in range(block.start, stop, size):
            rows = min(size, stop - start)
            masks: list[Tensor] = []
            if sampler.shape.dropout:
                noise = block.masks[:, at : at + rows * sum(hidden)]
                parts = noise.split([rows * width for width in hidden], dim=1)
                masks = [part.unflatten(1, (rows, -1)) for part in parts]
                at += rows * sum(hidden)
            stack.step(x[:, start : start + rows], y[:, start : start + rows], masks)


def _squared_slope(guess: Tensor, y: Tensor, out: Tensor) -> None:
    """Write the derivative of each network's mean squared error into ``out``."""
    torch.sub(guess, y, out=out).mul_(2 / guess[0].numel())


def _pinball_slope(guess: Tensor, y: Tensor, out: Tensor, levels: Tensor) -> None:
    """Write the derivative of each network's mean pinball loss at its levels into ``out``."""
    level = levels.to(guess)
    share = torch.tensor(1 / guess[0].numel(), dtype=guess.dtype)
    rise, fall = (1 - level) * share, -level * share
    side = torch.where(guess > y, rise, fall)
    # At a tie, autograd goes half of both ways.
    out.copy_(torch.where(guess == y, (rise + fall) / 2, side))


class _Stack:
    """The weights of several networks, and Adam's state of each."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        shape: Shape,
        levels: Tensor | None,
        learning_rate: float,
        weight_decay: float,
    ) -> None:
        self._shape, self._levels = shape, levels  # levels (networks, 1, outputs)
        self._learning_rate, self._weight_decay = learning_rate, weight_decay
        each = zip(*(model.parameters() for model in models), strict=True)
        weights = [torch.stack([w.detach() for w in same]) for same in each]
        memory = [[torch.zeros_like(w) for w in weights] for _ in range(2)]
        self._steps = torch.tensor(0.0)
        self._place([weights, *memory])

    def _place(self, states: list[list[Tensor]]) -> None:
        """Store weights, gradients and Adam's two moments as one long tensor each."""
        shapes = [w.shape for w in states[0]]
        self._count = shapes[0][0]
        flat = [torch.cat([w.flatten() for w in state]) for state in states]
        flat.insert(1, torch.zeros_like(flat[0]))
        sizes = [shape.numel() for shape in shapes]
        views = [
            [part.view(shape) for part, shape in zip(line.split(sizes), shapes, strict=True)]
            for line in flat
        ]
        self._states = [views[0], *views[2:]]
        self._weights, self._biases = views[0][::2], [b[:, None] for b in views[0][1::2]]
        self._weight_slopes, self._bias_slopes = views[1][::2], views[1][1::2]
        # The fused kernel takes eight numbers at a time and rounds the rest differently. The last
        # biases, the only short tensors, go on their own as they do in single training.
        short = self._count * self._shape.sizes[-1]
        self._adam = [[line[:-short], *line[-short:].split(self._shape.sizes[-1])] for line in flat]
        self._buffers: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def keep(self, positions: list[int]) -> None:
        """Continue with some of the networks only."""
        self._place([[w[positions] for w in state] for state in self._states])
        if self._levels is not None:
            self._levels = self._levels[positions]

    def copy_to(self, models: Sequence[nn.Module]) -> None:
        """Copy the weights into the networks."""
        for at, model in enumerate(models):
            for own, same in zip(model.parameters(), self._states[0], strict=True):
                own.copy_(same[at])

    def step(self, x: Tensor, y: Tensor, masks: list[Tensor]) -> None:
        """Take one step on a batch of each network: x (networks, rows, inputs)."""
        values, below = self._activation_buffers(x.shape[1], x.dtype)
        self._forward(x, values, masks)
        if self._levels is None:
            _squared_slope(values[-1], y, below[-1])
        else:
            _pinball_slope(values[-1], y, below[-1], self._levels)
        self._backward(x, values, below, masks)
        self._steps.add_(1)
        # What torch.optim.Adam(fused=True) calls; its own step() takes longer than this.
        weights, slopes, means, squares = self._adam
        torch._fused_adam_(
            weights,
            slopes,
            means,
            squares,
            [],
            [self._steps] * len(weights),
            lr=self._learning_rate,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            weight_decay=self._weight_decay,
            eps=_EPS,
            amsgrad=False,
            maximize=False,
        )

    def _activation_buffers(
        self, rows: int, dtype: torch.dtype
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return buffers for the activations of all layers and for their gradients."""
        if rows not in self._buffers:
            values, slopes = (
                [
                    torch.empty(self._count, rows, size, dtype=dtype)
                    for size in self._shape.sizes[1:]
                ]
                for _ in range(2)
            )
            self._buffers[rows] = values, slopes
        return self._buffers[rows]

    def _forward(self, x: Tensor, values: list[Tensor], masks: list[Tensor]) -> None:
        last = len(values) - 1
        for layer, value in enumerate(values):
            weight, bias = self._weights[layer], self._biases[layer]
            if value.shape[2] == 1:
                # The other way round, which for one output rounds as nn.Linear does.
                torch.baddbmm(bias, weight, x.transpose(1, 2), out=value.view(self._count, 1, -1))
            else:
                torch.baddbmm(bias, x, weight.transpose(1, 2), out=value)
            if layer < last:
                value.relu_()
                if masks:
                    value.mul_(masks[layer])
            x = value

    def _backward(
        self, x: Tensor, values: list[Tensor], slopes: list[Tensor], masks: list[Tensor]
    ) -> None:
        for layer in reversed(range(len(values))):
            slope, before = slopes[layer], values[layer - 1] if layer else x
            torch.bmm(slope.transpose(1, 2), before, out=self._weight_slopes[layer])
            torch.sum(slope, dim=1, out=self._bias_slopes[layer])
            if layer:
                below = slopes[layer - 1]
                torch.bmm(slope, self._weights[layer], out=below)
                if masks:
                    below.mul_(masks[layer - 1])
                # The backward pass of ReLU, in one call.
                torch.ops.aten.threshold_backward.grad_input(below, before, 0, grad_input=below)
