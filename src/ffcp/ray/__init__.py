"""More than one machine, by Ray Data: calibrate on datasets, and give their rows bands.

Needs ``pip install 'ffcp[ray]'``; docs/scale_ray.md shows how it is used, and what it costs.
"""

from ffcp.extras import needed

needed("ray.data", "ray", "ffcp.ray")

from ffcp.ray.engine import calibrate, predict  # noqa: E402 - after saying what is missing

__all__ = ["calibrate", "predict"]
