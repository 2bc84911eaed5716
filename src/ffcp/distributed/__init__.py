"""Calibration in all processes of a torch.distributed job: see :func:`calibrate`."""

from ffcp.distributed.calibrate_ranks import calibrate

__all__ = ["calibrate"]
