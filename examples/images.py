"""Prediction sets for photographs: CIFAR-10 and a ResNet-20 (goes with docs/classification.md).

Needs the images and the weights of `ffcp-paper labels`; without them the error says where from.
"""

import torch

import ffcp
from ffcp_paper.networks import pretrained

ALPHA, CALIBRATE, TEST = 0.05, 1500, 1500
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def main() -> None:
    network = pretrained.NETWORKS["cifar10_resnet20"]
    model, inputs = network.load(), network.inputs()
    x = inputs.batch(0, CALIBRATE + TEST)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], inputs.labels[: len(x)][order]
    cal, test = slice(0, CALIBRATE), slice(CALIBRATE, None)

    # The network runs once; what follows needs its logits only.
    logits = torch.cat([model(part).detach() for part in x.split(250)])
    right = (logits[test].argmax(dim=1) == y[test]).double().mean()
    print(f"the first label is right for {right:.1%} of {TEST} images")
    print(f"{'':26}  coverage                mean size  worst class")
    stand_in = ffcp.Stored()
    for name, predictor in {
        "LAC": ffcp.LAC(stand_in),
        "RAPS": ffcp.RAPS(stand_in, lam=0.01, kreg=2, seed=0),
        "LAC, class by class": ffcp.LAC(stand_in, class_conditional=True),
    }.items():
        predictor.calibrate(logits[cal], y[cal])
        found = predictor.predict_set(logits[test], ALPHA)
        worst = ffcp.metrics.class_coverage(found, y[test]).worst
        size = found.sizes.double().mean()
        print(f"{name:26}  {found.coverage(y[test])!s:22}  {size:9.2f}  {worst:.1%}")

    found = ffcp.LAC(stand_in).calibrate(logits[cal], y[cal]).predict_set(logits[test], ALPHA)
    print("\nthe five hardest of the first 200 images:")
    for row in found.sizes[:200].argsort(descending=True)[:5].tolist():
        labels = " or ".join(NAMES[label] for label in found.labels[row])
        print(f"  {NAMES[y[test][row]]:10}  {labels}")


if __name__ == "__main__":
    main()
