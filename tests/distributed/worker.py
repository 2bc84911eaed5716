"""One of several processes: ``python -m tests.distributed.worker folder rank size [what]``."""

from __future__ import annotations

import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import ffcp
from tests.distributed import scenes


def killed(rank: int) -> None:
    """Rank 1 is gone in the middle, without a word."""

    def loader():  # type: ignore[no-untyped-def]
        for number in range(3):
            if rank == 1 and number == 2:
                os._exit(9)
            start = 250 * rank + 50 * number
            yield scenes.X[start : start + 50], scenes.Y[start : start + 50]

    ffcp.distributed.calibrate(ffcp.CP(scenes.small_mlp()), loader())


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ffcp.FFCPWarning)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
        found = scenes.calibrated(dist.get_rank(), "CP")
        found.save(Path(sys.argv[1]) / f"{dist.get_rank()}")
        dist.destroy_process_group()
        return
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    meet = f"file://{folder / 'meet'}"
    wait = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=size, timeout=wait)
    if sys.argv[4:] == ["killed"]:
        killed(rank)
    else:
        scenes.play(rank, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
