"""Small networks of the kinds that are exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn


def mlp(columns: int = 5, outputs: int = 1) -> nn.Module:
    """The paper's network, in small."""
    return nn.Sequential(
        nn.Linear(columns, 16), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, outputs),
    )  # fmt: skip


class Block(nn.Module):
    """Two convolutions around a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(x + self.branch(x))


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1), Block(6), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1),
    )  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        steps, _ = self.lstm(self.before(x))
        last: Tensor = self.head(steps[:, -1])
        return last


class Encoder(nn.Module):
    """A transformer of words, with a mask for where there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(8, 1)

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(self.words(tokens), src_key_padding_mask=attention_mask == 0)
        mask = attention_mask[..., None].to(hidden.dtype)
        mean: Tensor = self.head((hidden * mask).sum(dim=1) / mask.sum(dim=1))
        return mean


class Segmentation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.head = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.head(self.backbone(x))
        return maps


def words(rows: int) -> Any:
    """Draw rows of words of different lengths."""
    length = torch.randint(2, 6, (rows, 1))
    mask = (torch.arange(5) < length).long()
    return {"tokens": torch.randint(0, 30, (rows, 5)) * mask, "attention_mask": mask}


class Mean(nn.Module):
    """The mean of a TabM's members: one prediction for a row of a table."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.table(x).mean(dim=1)
        return mean


def tabular() -> nn.Module:
    """Make a TabM, if there is one."""
    tabm = pytest.importorskip("tabm")
    return Mean(tabm.TabM.make(n_num_features=4, d_out=1, n_blocks=2, d_block=8, k=3))
