"""Calibration and prediction of Ray datasets, on one or many machines.

Needs ``pip install 'ffcp[ray]'``; docs/scale_ray.md shows its use and its cost.
"""

from ffcp.extras import needed

needed("ray.data", "ray", "ffcp.ray")

from ffcp.ray.engine import calibrate, predict  # noqa: E402 - after saying what is missing

__all__ = ["calibrate", "predict"]
