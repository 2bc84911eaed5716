from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# The same examples on every run: a red build must mean a changed program.
torch.set_num_threads(1)  # tests run side by side, on small tensors
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
