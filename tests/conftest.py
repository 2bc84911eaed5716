from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from torch import nn

# The same examples on every run: a failure must mean a changed program.
torch.set_num_threads(1)  # tests run side by side, on small tensors
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def torch_that_exports() -> None:
    from ffcp.export.writing import must_be_new_enough  # a slow import, for few tests

    try:
        must_be_new_enough(torch.__version__)
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture
def mlp() -> nn.Sequential:
    """A small network of the paper's shape: Linear layers at 0, 3 and 6, ReLU and dropout."""
    return small_mlp()


def small_mlp(inputs: int = 4, outputs: int = 1, width: int = 8) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(width, outputs),
    )


def normal(*shape: int, seed: int) -> torch.Tensor:
    """Return normal numbers that are the same on every run, also at import time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
