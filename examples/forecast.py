"""Bands for a forecast that must live on: rentals of the next six hours (goes with docs/shift.md).

Needs the file bike_train.csv, see `ffcp-paper data`; without it the error says where it is from.
"""

import numpy as np
import torch
from torch import Tensor, nn

import ffcp
from ffcp_paper import datasets

PAST, AHEAD, ALPHA = 24, 6, 0.1


def windows() -> tuple[Tensor, Tensor]:
    """Cut the series into a day and the hours after it, in the order of time."""
    table = datasets.load("bike")
    y, hour = torch.from_numpy(table.y).log1p(), table.x[:, table.names.index("hour")]
    gap = np.concatenate([[1], (np.diff(hour) % 24) != 1]).cumsum()  # months end on the 19th
    starts = [s for s in range(len(y) - PAST - AHEAD) if gap[s] == gap[s + PAST + AHEAD - 1]]
    angle = 2 * torch.pi * torch.from_numpy(hour[np.array(starts) + PAST])[:, None] / 24
    past = torch.stack([y[s : s + PAST] for s in starts])
    future = torch.stack([y[s + PAST : s + PAST + AHEAD] for s in starts])
    return torch.cat([past, angle.sin(), angle.cos()], dim=1).float(), future.float()


def main() -> None:
    torch.manual_seed(0)
    x, y = windows()
    train, cal = slice(0, 3000), slice(3000, 4000)  # the rest comes in as a stream
    model = nn.Sequential(nn.Linear(PAST + 2, 64), nn.ReLU(), nn.Linear(64, AHEAD))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(30):
        for rows in torch.randperm(3000).split(64):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[train][rows]), y[train][rows]).backward()
            optimizer.step()

    fixed = ffcp.CP(model).calibrate(x[cal], y[cal])
    online = ffcp.Online(fixed, "aci", ALPHA)
    hits: dict[str, list[Tensor]] = {"CP, calibrated once": [], "Online(CP, aci)": []}
    came = torch.arange(0)
    for rows in torch.arange(4000, len(x)).split(AHEAD):
        for name, source in zip(hits, (fixed, online), strict=True):
            hits[name].append(source.predict_interval(x[rows]).contains(y[rows]))
        if len(came):  # by now the truths of the six hours before are in, and of no later ones
            online.update(x[came], y[came])
        came = rows

    print(
        f"covered, asked for {1 - ALPHA:.0%}:   " + "  ".join(f"+{h + 1} h " for h in range(AHEAD))
    )
    for name, parts in hits.items():
        share = torch.cat(parts).double().mean(dim=0)
        print(f"{name:22}  " + "  ".join(f"{one:.1%}" for one in share))


if __name__ == "__main__":
    main()
