"""Members in other processes and on other machines: Ray actors that each hold a model, its caches and its texts."""

from specens.engines.ray.engine import LIVES, RayEngine, actors_with, share_of_gpus, start_ray

__all__ = ["LIVES", "RayEngine", "actors_with", "share_of_gpus", "start_ray"]
