"""Members in other processes and on other machines: Ray actors that each hold a model, its caches and its texts."""

from specens.engines.ray.engine import LIVES, RayEngine, start_ray

__all__ = ["LIVES", "RayEngine", "start_ray"]
