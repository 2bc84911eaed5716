"""Prediction intervals for a table: bike rentals by the hour (goes with docs/regression.md).

Needs the file bike_train.csv, see `ffcp-paper data`; without it the error says where it is from.
"""

import torch
from torch import nn

import ffcp
from ffcp_paper.data import datasets

ALPHA = 0.1


def main() -> None:
    torch.manual_seed(0)
    table = datasets.load("bike")
    order = torch.randperm(len(table.y))
    x = torch.from_numpy(table.x)[order]
    y = torch.from_numpy(table.y)[order, None] / 100  # hundreds of rentals in an hour
    train, cal, test = slice(0, 4000), slice(4000, 8000), slice(8000, None)
    x = x[:, x[train].std(dim=0) > 0]  # a column that never changes teaches nothing
    x = (x - x[train].mean(dim=0)) / x[train].std(dim=0)

    # The network is yours: any that predicts numbers will do.
    model = nn.Sequential(
        nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(40):
        for rows in torch.randperm(4000).split(64):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[train][rows]), y[train][rows]).backward()
            optimizer.step()

    print(f"{'':10}  coverage                length  interval score  worst third of y")
    for name, predictor in {
        "CP": ffcp.CP(model),
        "LCP": ffcp.LCP(model, seed=0),
        "Auto": ffcp.Auto(model, seed=0, support=(0, None)),
    }.items():
        if isinstance(predictor, ffcp.Auto):
            predictor.fit(x[train], y[train])
        predictor.calibrate(x[cal], y[cal])
        interval = predictor.predict_interval(x[test], ALPHA)
        coverage = ffcp.metrics.coverage(interval, y[test])
        groups = ffcp.metrics.group_coverage(interval, y[test], ffcp.metrics.tertiles(y[test]))
        length = ffcp.metrics.mean_length(interval)
        score = ffcp.metrics.interval_score(interval, y[test])
        print(f"{name:10}  {coverage!s:22}  {length:6.3f}  {score:14.3f}  {groups.worst:.1%}")
    print(predictor.choice)


if __name__ == "__main__":
    main()
