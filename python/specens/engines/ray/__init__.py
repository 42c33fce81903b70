"""Members in other processes and on other machines: Ray actors that each hold a model, its caches and its texts."""

from specens.engines.ray.engine import (
    LIVES,
    PLACEMENT_TIMEOUT,
    RayEngine,
    actors_with,
    options_unless_given,
    share_of_gpus,
    shown,
    start_ray,
)

__all__ = [
    "LIVES",
    "PLACEMENT_TIMEOUT",
    "RayEngine",
    "actors_with",
    "options_unless_given",
    "share_of_gpus",
    "shown",
    "start_ray",
]
