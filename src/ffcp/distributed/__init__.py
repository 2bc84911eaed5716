"""Calibrate in all processes of a job that torchrun has started: see :func:`calibrate`."""

from ffcp.distributed.together import calibrate

__all__ = ["calibrate"]
