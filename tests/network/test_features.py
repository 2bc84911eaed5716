"""Which layers can be a feature."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ffcp.network.forward import candidates
from tests.conftest import small_mlp


def test_candidates_follow_the_forward_pass_without_repeats() -> None:
    # Dropout in eval mode returns its input: not another feature. 6 is the output itself.
    assert candidates(small_mlp(), torch.randn(9, 4)) == ["input", "0", "1", "3", "4"]


def test_at_most_eight_candidates_spread_over_the_depth() -> None:
    deep = nn.Sequential(*(nn.Linear(3, 3) for _ in range(40)), nn.Linear(3, 1))
    names = candidates(deep, torch.randn(5, 3))
    assert len(names) == 8
    assert names[0] == "input"
    assert names[-1] == "39"


class Awkward(nn.Module):
    """Shared, unused, detached and integer parts: none of them can be a feature."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.unused = nn.Embedding(4, 3), nn.Linear(3, 3)
        self.shared, self.stopped = nn.Linear(3, 3), nn.Linear(3, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        v = self.shared(self.shared(self.embed(tokens)))
        v = v + self.stopped(v).detach()
        with torch.no_grad():
            self.unused(v)
        return self.head(torch.tanh(v))


def test_candidates_leave_out_what_no_gradient_can_reach() -> None:
    assert candidates(Awkward(), torch.randint(0, 4, (5,))) == ["embed"]
