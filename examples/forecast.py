"""Intervals for the next 24 hours at once, day by day, around an LSTM: goes with docs/forecasts.md.

Needs metro_traffic.csv and tetuan_power.csv, see `ffcp-paper data`; the error says where from.
"""

import torch
from torch import Tensor, nn

import ffcp
from ffcp_paper.data import hourly_series

DAYS, HOURS, ALPHA = 14, 24, 0.1


class Forecaster(nn.Module):
    """Reads the last 14 days, a step each; corrects the mean of yesterday and a week ago."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(HOURS + 2, 64, batch_first=True), nn.Linear(64, HOURS)

    def forward(self, x: Tensor) -> Tensor:
        usual = (x[:, -1, :HOURS] + x[:, -7, :HOURS]) / 2
        return usual + self.head(self.lstm(x)[0][:, -1])


def windows(name: str) -> tuple[Tensor, Tensor, list[Tensor], float]:
    """Return past and future of every hour, the rows of three spans, and the unit of the values."""
    values, clock, known = hourly_series.load(name)
    train, cal = int(0.55 * len(values)), int(0.75 * len(values))  # the rest comes day by day
    values = values / (spread := values[:train].std())
    parts = values.unfold(0, (DAYS + 1) * HOURS, 1)  # a row for every hour that may be "now"
    now = DAYS * HOURS + torch.arange(len(parts))
    angle = (2 * torch.pi * clock[now] / 168)[:, None, None].expand(-1, DAYS, 1)
    x = torch.cat([parts[:, :-HOURS].unflatten(1, (DAYS, HOURS)), angle.sin(), angle.cos()], dim=2)
    whole = known.unfold(0, HOURS, 1)[DAYS * HOURS :].all(dim=1)
    midnight = whole & (clock[now] % HOURS == 0)
    spans = (now + HOURS <= train) & whole, (now >= train) & (now + HOURS <= cal), now >= cal
    rows = [spans[0], spans[1] & midnight, spans[2] & midnight]
    return x, parts[:, -HOURS:], [one.nonzero()[:, 0] for one in rows], float(spread)


def trained(x: Tensor, y: Tensor) -> Forecaster:
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for rows in torch.cat([torch.randperm(len(x)) for _ in range(20)]).split(128):
        optimizer.zero_grad()
        nn.functional.l1_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model


def main(name: str, unit: str) -> None:
    torch.manual_seed(0)
    x, y, (train, cal, stream), spread = windows(name)
    model = trained(x[train], y[train])
    each = ffcp.CP(model, support=(0, None)).calibrate(x[cal], y[cal])
    joint = ffcp.CP(model, joint=True, support=(0, None)).fit_output_scales(x[train], y[train])
    online = ffcp.Online(joint.calibrate(x[cal], y[cal]), "aci", ALPHA, gamma=0.05)
    results: dict[str, list[list[float]]] = {"each hour": [], "joint": [], "joint, online": []}
    for row in stream.split(1):
        for kept, predictor in zip(results.values(), (each, joint, online), strict=True):
            interval = predictor.predict_interval(x[row])  # at midnight: the day is not known
            hit, width = interval.contains(y[row]), spread * interval.width.median()
            kept.append([float(hit.double().mean()), float(hit.all()), float(width)])
        online.update(x[row], y[row])  # 24 hours later, before the next forecast
    print(f"{name}: {len(stream)} days, asked for {1 - ALPHA:.0%}")
    for label, kept in results.items():
        hours, days, width = torch.tensor(kept).T
        said = f"hours covered {hours.mean():.1%}, whole days covered {days.mean():.1%}"
        print(f"  {label:14}  {said}, median width {width.median():,.0f} {unit}")


if __name__ == "__main__":
    main("metro_traffic", "vehicles")
    main("tetuan_power", "kW")
