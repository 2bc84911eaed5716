"""A LightningModule is a model like any other, and may hold the predictor that wraps it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ffcp

lightning = pytest.importorskip("lightning")

X = torch.rand(900, 3, generator=torch.Generator().manual_seed(0))
Y = X[:, 0] + 0.3 * X[:, 1] * torch.randn(900, generator=torch.Generator().manual_seed(1))


class Regression(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Trains, and calibrates a predictor of its own when it is tested."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
        self.predictor = ffcp.FFCP(self, feature="net.0")
        self.rows: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[:, 0]  # type: ignore[no-any-return]

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def test_step(self, batch: Any, index: int) -> None:
        self.rows.append(batch)

    def on_test_epoch_end(self) -> None:
        self.predictor.calibrate(iter(self.rows))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), 1e-2)


def trainer(path: Any) -> Any:
    return lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path,
    )


def loader(rows: slice) -> Any:
    return DataLoader(TensorDataset(X[rows], Y[rows]), batch_size=50)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
def test_a_module_calibrates_its_own_predictor_in_a_test_step(tmp_path: Any) -> None:
    module, run = Regression(), trainer(tmp_path)
    run.fit(module, loader(slice(0, 300)))
    run.test(module, loader(slice(300, 600)), verbose=False)
    interval = module.predictor.predict_interval(X[600:], alpha=0.1)
    assert len(module.predictor.calibration) == 300
    # The scores of an independent predictor of the same network.
    outside = ffcp.FFCP(module.net, feature="0").calibrate(X[300:600], Y[300:600, None])
    assert torch.allclose(interval.lower, outside.predict_interval(X[600:]).lower[:, 0])
    assert bool(interval.contains(Y[600:]).float().mean() > 0.82)  # below once in 1,000 times
    module.predictor.save(tmp_path / "calibration.safetensors")
    again = ffcp.load(tmp_path / "calibration.safetensors", module)
    assert torch.equal(again.predict_interval(X[600:]).upper, interval.upper)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
def test_a_trained_module_is_wrapped_from_outside(tmp_path: Any) -> None:
    module = Regression()
    trainer(tmp_path).fit(module, loader(slice(0, 300)))
    predictor = ffcp.CP(module).calibrate(loader(slice(300, 600)))
    both = predictor.predict_interval(X[600:])
    alone = torch.cat([predictor.predict_interval(row[None]).lower for row in X[600:610]])
    assert torch.allclose(both.lower[:10], alone)
