"""How the options of a command become an ensemble: of a published method, or as they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import typer

from specens.cli import options
from specens.cli.config import save_config
from specens.cli.exits import errors
from specens.cli.progress import SILENT_SECONDS, loading, progress

if TYPE_CHECKING:
    from specens.files.workers import Workers
    from specens.generate import SpeculativeEnsemble


def load(
    context: typer.Context, models: list[str], placement: options.Placement, **settings: Any
) -> SpeculativeEnsemble:
    """The ensemble, once all is checked that needs no models; then --save-config is written.

    settings: as of `build`.
    """
    with loading(errors, f"loading {', '.join(models)}"):
        return build(models, placement, checked=partial(save_config, context), **settings)


def load_in_workers(
    context: typer.Context, models: list[str], placement: options.Placement, num_workers: int, **settings: Any
) -> Workers:
    """Workers that each have the ensemble; --save-config is written when one has loaded it. settings: as of `build`."""
    from specens.engines.ray import actors_with
    from specens.files.workers import Workers

    with progress(errors, f"loading {', '.join(models)} in {num_workers} workers", first=SILENT_SECONDS):
        placement.join()
        specs = options.specs_of(models, settings.get("drafter"))
        placement.check(specs)
        num_actors = options.num_in_actors(specs)  # beside each worker
        runs_models = num_actors < len(specs)
        share = placement.share_of_gpus(num_workers * (num_actors + runs_models))
        own: Any = share if runs_models else {}
        if placement.ray_options is None:
            placement = replace(placement, ray_options=share if num_actors else None)
        elif not num_actors:
            own = placement.ray_options
            actors_with(own, "--ray-options")
        workers = Workers(partial(build, models, placement, **settings), num_workers, options=own)
        workers.ask(bool)
        save_config(context)
        return workers


def build(
    models: list[str],
    placement: options.Placement,
    *,
    preset: str | None = None,
    draft_lens: str | None = None,
    drafter: str | None = None,
    checked: Callable[[], None] = lambda: None,
    **settings: Any,
) -> SpeculativeEnsemble:
    """The ensemble that options name. checked: called when all is checked that needs no models.

    settings: arguments of SpeculativeEnsemble, those that are None left out.
    """
    from specens import SpeculativeEnsemble

    specs = options.specs_of(models, drafter)
    placement.check(specs)
    if placement.ray_options is None and (num_actors := options.num_in_actors(specs)):
        placement = replace(placement, ray_options=placement.share_of_gpus(num_actors))
    settings["draft_lens"] = None if draft_lens is None else options.parse_draft_lens(draft_lens)
    placement, of_drafters = placement.split(models)
    settings["drafter"] = None if drafter is None else options.parse_drafter(drafter, of_drafters)
    given = {name: value for name, value in settings.items() if value is not None}
    make: Any = SpeculativeEnsemble
    if preset is not None:
        texts = {name: text for name, text in (("drafter", drafter), ("draft_lens", draft_lens)) if text is not None}
        check_beside_preset(preset, len(models), given, texts)
        make = partial(SpeculativeEnsemble.from_preset, preset)
    checked()
    return make(models, **given, **placement.apply(models))


def check_beside_preset(
    name: str, num_members: int, given: Mapping[str, Any], texts: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise ValueError where there is no such method, or it is for other members, or an option contradicts it.

    given: what options say, as arguments of SpeculativeEnsemble; texts: some in their own words. Draft lengths that are
    numbers may take the place of the method's numbers, a schedule that of its own, and what it leaves open is theirs to
    say: weights, who drafts.
    """
    from specens.presets import preset
    from specens_kernels import Mixture

    method = preset(name)
    method.check_members(name, num_members)
    chosen = {"rule": "token", "tree": None} | method.settings_under(given.get("schedule"), num_members)
    words = {"drafter": method.drafter, "tree": method.topology, "rule": method.acceptance}
    for argument, value in given.items():
        own, option = chosen.get(argument), _option(argument, value)
        is_tuning = argument == "schedule" or (argument == "draft_lens" and _are_numbers(own) and _are_numbers(value))
        is_open = argument not in chosen and (argument != "ensemble" or isinstance(value, Mixture))
        fits = is_tuning or is_open or _is_same(own, value)
        if argument == method.needs:
            fits = isinstance(value, method.needs_one_of or object)
        if not fits:
            what, got = words.get(argument) or own or method.target, texts.get(argument, value)
            raise ValueError(f"{option}: expected none that contradicts --preset {name} ({what}), got {got}")
    if method.needs is not None and method.needs not in given:
        option = _option(method.needs, None)
        raise ValueError(
            f"{option}: expected one beside --preset {name} ({words[method.needs]}), got none; what no option makes is "
            f"given in Python: SpeculativeEnsemble.from_preset({name!r}, members, {method.needs}=...)"
        )


def _option(argument: str, value: Any) -> str:
    if argument == "ensemble":
        return {"LogitMixture": "--logit-weights", "Contrastive": "--contrast"}.get(type(value).__name__, "--weights")
    if argument == "tree" and getattr(value, "nodes", None) is not None:
        return "--tree-nodes"
    return "--" + argument.replace("_", "-")


def _are_numbers(lens: Any) -> bool:
    return all(isinstance(one, int) for one in (lens if isinstance(lens, list | tuple) else [lens]))


def _is_same(own: Any, value: Any) -> bool:
    return own == value or (type(own) is type(value) and hasattr(own, "__dict__") and vars(own) == vars(value))
