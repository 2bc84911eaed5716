from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _double_precision_and_seed():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)
