"""Calibrate in all processes of a job that torchrun has started: see :func:`calibrate`."""

from ffcp.distributed.calibrate_ranks import calibrate

__all__ = ["calibrate"]
