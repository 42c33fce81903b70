"""What a SpeculativeEnsemble was given: checked, completed and loaded."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specens.decoding.draft_lens import ByAcceptance, ByConfidence, DraftLen
from specens.decoding.request import Ensemble, Task
from specens.drafters import Drafter, PromptLookup, TreePlan
from specens.drafters.tree_plan import as_tree_plan
from specens.engines.checks import check_engine
from specens.engines.loading import Device, Loader, RayOptions, devices_of, options_of_actors
from specens.engines.protocol import Engine
from specens.engines.transformers.causal_lm import CausalLM
from specens.engines.transformers.load import check_unused, is_spec
from specens.schedules import SCHEDULES, Plan
from specens.schedules.plan import Rule
from specens.targets import DenseTarget
from specens_kernels import (
    Contrastive,
    DecisionTree,
    Mixture,
    Processing,
    Replacement,
    Sampling,
    Threshold,
    Typical,
)

RULES = ("token", "block", "traversal", "k_seq", "gumbel", "typical")
EVERY_SCHEDULE = ("token", "gumbel")  # rules that a schedule without chains knows too
OF_TREES = (*EVERY_SCHEDULE, "traversal", "k_seq", "typical")
WITH_TREES = ("fixed", "alternate")  # schedules
TREE = "tree"  # another name for the schedule "fixed" with draft trees

LOOKUP_LEN = 8  # a lookup costs nothing, and forwards of some more tokens little


def check_members(members: Any) -> None:
    """Raise ValueError where there is no list of members, or one of them is no model."""
    if isinstance(members, (str, os.PathLike)) or not isinstance(members, Sequence) or not members:
        raise ValueError(f"members: expected a list with at least one model, got {_shown(members)}")
    for index, member in enumerate(members):
        is_model = isinstance(member, torch.nn.Module) and hasattr(member, "config")
        if not (is_spec(member) or isinstance(member, Engine) or is_model):
            raise ValueError(
                f"members: expected models of transformers, specs or engines, got {_shown(member)} as member {index}"
            )
        if isinstance(member, Engine):
            check_engine(member, "members")


def choose_schedule(
    num_members: int, schedule: str | None, drafter: int | Drafter | None, tree: Any, draft_lens: Any
) -> tuple[str, int | Drafter | None, TreePlan | None]:
    """The schedule, its drafter and its trees. Raises ValueError for what the schedule has no use for."""
    if schedule is None and drafter is None and num_members == 1:
        drafter = PromptLookup()
    if schedule == TREE:
        schedule, tree = "fixed", TreePlan() if tree is None else tree
    chosen = schedule
    if chosen is None:
        is_number = drafter is None or isinstance(drafter, int)
        chosen = "alternate" if is_number and tree is None else "fixed"
    if not isinstance(chosen, str) or chosen not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {', '.join([*SCHEDULES, TREE])}; got {chosen!r}")
    if tree is not None and chosen not in WITH_TREES:
        raise ValueError(f"tree: expected none under schedule {chosen!r}, which drafts no trees; got {tree!r}")
    if drafter is not None and chosen == "standard":
        raise ValueError(f"drafter: expected none under schedule 'standard', which drafts nothing; got {drafter!r}")
    if draft_lens is not None and (chosen == "standard" or tree is not None):
        what = "with draft trees" if tree is not None else f"under schedule {chosen!r}"
        warnings.warn(f"draft_lens: {draft_lens} means nothing {what}", stacklevel=3)
    return chosen, drafter, as_tree_plan(tree)


def make_plan(
    members: Sequence[Any],
    draft_lens: DraftLen | Sequence[DraftLen] | None,
    named: int | Drafter | None,
    tree: TreePlan | None,
    rule: Rule,
) -> Plan:
    """The settings of the schedule, one draft length a member. Raises ValueError naming the wrong argument.

    named: the drafter, or None where none was.
    """
    drafter = 0 if named is None else named
    if draft_lens is None:
        draft_lens = LOOKUP_LEN if isinstance(drafter, PromptLookup) else 1
    lens = list(draft_lens) if isinstance(draft_lens, Sequence) else [draft_lens] * len(members)
    if len(lens) != len(members) or not all(_is_draft_len(length) for length in lens):
        raise ValueError(
            f"draft_lens: expected an integer >= 1, or one for each member ({len(members)}); got {draft_lens!r}"
        )
    _check_drafter(drafter, len(members), draft_lens)
    if rule not in RULES and not isinstance(rule, Typical | Threshold | Replacement | DecisionTree):
        expected = f"{', '.join(RULES)}, or a Typical, Threshold, Replacement or DecisionTree"
        raise ValueError(f"rule: expected {expected}; got {rule!r}")
    first = named if isinstance(named, int) else None
    return Plan(len(members), tuple(lens), drafter, tree, rule=rule, proposes_first=first)


def _check_drafter(drafter: Any, num_members: int, draft_lens: Any) -> None:
    if isinstance(drafter, Drafter) and not isinstance(drafter, type):
        if isinstance(draft_lens, Sequence):
            raise ValueError(f"draft_lens: expected one for a drafter that is no member, got {draft_lens}")
    elif not _is_count(drafter) or not 0 <= drafter < num_members:
        other = "" if _is_count(drafter) else ", or a Drafter, such as DraftModel(model)"
        expected = f"the index of a member, 0 to {num_members - 1}{other}"
        raise ValueError(f"drafter: expected {expected}; got {_shown(drafter)}")


def _is_draft_len(length: Any) -> bool:
    return isinstance(length, ByConfidence | ByAcceptance) or (_is_count(length) and length >= 1)


def complete_ensemble(ensemble: Ensemble | None, num_members: int) -> Ensemble | None:
    """The ensemble, by default the equal-weight Mixture of several members. Raises ValueError on a wrong number."""
    if ensemble is None:
        return Mixture((1 / num_members,) * num_members) if num_members > 1 else None
    if not isinstance(ensemble, Ensemble):
        expected_kinds = "Mixture, LogitMixture, Contrastive, or one of specens.targets"
        raise ValueError(f"ensemble: expected a {expected_kinds}; got {_shown(ensemble)}")
    if isinstance(ensemble, DenseTarget):
        expected = ensemble.num_members or num_members
    elif isinstance(ensemble, Contrastive):
        expected = 2
    else:
        expected = ensemble.weights.shape[1] if isinstance(ensemble.weights, torch.Tensor) else len(ensemble.weights)
    if expected != num_members:
        raise ValueError(f"ensemble: expected weights for the {num_members} members, got {expected} in {ensemble}")
    return ensemble


def with_weight_of_drafter(plan: Plan, ensemble: Ensemble | None) -> Plan:
    """The plan, knowing whether the drafter has a weight in the ensemble other than 0."""
    weights = getattr(ensemble, "weights", None)
    if not isinstance(plan.drafter, int):
        return replace(plan, drafter_counts=False)
    if weights is None:
        return plan
    counts = bool((torch.as_tensor(weights)[..., plan.drafter] != 0).any())
    return replace(plan, drafter_counts=counts)


def check_rule(plan: Plan, schedule: str) -> None:
    """Raise ValueError where a schedule cannot accept by the rule of its plan."""
    if plan.tree is None and plan.rule == "traversal":
        raise ValueError("rule: expected draft trees, tree=, beside 'traversal', which is 'block' of chains; got none")
    if plan.rule == "k_seq" and (plan.tree is None or plan.tree.children != "independent"):
        raise ValueError(
            "rule: expected trees of independent children, TreePlan(..., children='independent'), beside 'k_seq'; "
            f"got {'none' if plan.tree is None else plan.tree}"
        )
    if plan.rule not in EVERY_SCHEDULE and schedule != "fixed":
        raise ValueError(
            f"rule: expected {' or '.join(map(repr, EVERY_SCHEDULE))} under schedule {schedule!r}, got {plan.rule!r}; "
            "use schedule='fixed'"
        )
    of_trees = plan.rule in OF_TREES or isinstance(plan.rule, Typical)
    if plan.tree is not None and not of_trees:
        raise ValueError(
            f"rule: expected one of {', '.join(OF_TREES)} or a Typical with draft trees; got {plan.rule!r}"
        )
    own = plan.drafter
    if not isinstance(own, int):
        own.check_topology(plan.tree)
    adapts = not isinstance(plan.draft_lens[own if isinstance(own, int) else 0], int)
    if plan.replaces and (adapts or not (isinstance(own, int) or own.has_probabilities)):
        raise ValueError(
            f"rule: expected a drafter whose tokens have a probability, and a number as draft_lens, under "
            f"{type(plan.rule).__name__}"
        )
    if not isinstance(own, int) and own.estimates and not plan.replaces:
        raise ValueError(
            f"rule: expected Replacement or DecisionTree with a drafter that estimates probabilities, got {plan.rule!r}"
        )
    if plan.replaces and plan.drafter_counts:
        raise ValueError(
            f"rule: expected a drafter that is no part of the ensemble under {type(plan.rule).__name__}, such as "
            f"Mixture((0, 1)) with drafter=0; got one with a weight"
        )


def load_members(
    members: Sequence[Any],
    tokenizer: Any | None,
    dtype: str | torch.dtype | None,
    device: Device | Sequence[Device],
    revision: str | None,
    ray_options: RayOptions,
    model_kwargs: Mapping[str, Any] | None,
) -> tuple[list[Engine], Any | None]:
    """Load the members that are given as specs, and the tokenizer; a spec that comes twice on a device is loaded once.

    Raises ValueError where a spec cannot be loaded, or where its tokenizer differs from the ensemble's.
    """
    has_specs = any(map(is_spec, members))
    if not has_specs:
        given = {"dtype": dtype, "device": device, "revision": revision, "model_kwargs": model_kwargs}
        check_unused(**given, ray_options=ray_options)
    devices = devices_of(device, members)  # before Ray is started
    options = options_of_actors([member for member in members if is_spec(member)], ray_options, device)
    loaders = {str(own): Loader(dtype, own, revision, options, model_kwargs) for own in devices}
    tokenizer = _as_tokenizer(tokenizer, loaders[str(devices[0])])
    models: list[Engine] = []
    for index, (member, own_device) in enumerate(zip(members, devices, strict=True)):
        loader = loaders[str(own_device)]
        if isinstance(member, Engine) or not is_spec(member):
            models.append(member if isinstance(member, Engine) else CausalLM(member))
            own = models[-1].tokenizer
        else:
            own = loader.tokenizer(member)
        tokenizer = own if tokenizer is None else tokenizer
        if own is not None and own.get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"members: the tokenizer of member {index}, {member}, differs from that of the ensemble")
        if is_spec(member):
            models.append(loader.engine(member))
    if has_specs:
        Loader.check(*loaders.values())
    return models, tokenizer


def _as_tokenizer(tokenizer: Any, loader: Loader) -> Any:
    """A tokenizer, loaded where it is the spec of one."""
    if is_spec(tokenizer):
        return loader.tokenizer(tokenizer)
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise ValueError(f"tokenizer: expected one of transformers or a model spec, got {_shown(tokenizer)}")
    return tokenizer


def group_by_weights(models: Sequence[Engine]) -> list[list[int]]:
    """The indices of the members, those that compute with the same weights together."""
    groups: list[list[int]] = []
    for index, model in enumerate(models):
        own = next((group for group in groups if models[group[0]].is_same_as(model)), None)
        if own is None:
            groups.append([index])
        else:
            own.append(index)
    return groups


def indices_read_together(
    schedule: str, groups: list[list[int]], drafter: int | None, trees: bool = False
) -> list[list[int]]:
    """The indices that the same forwards score. groups: those of members that share weights; drafter: if it is one."""
    alone = [[index] for index in sorted(itertools.chain(*groups))]
    if trees:
        return alone
    if schedule in ("fixed", "parallel") and drafter is not None:  # it is fed before the others, or beside them
        rest = [[index for index in group if index != drafter] for group in groups]
        return sorted([[drafter], *filter(None, rest)])
    return groups if len(groups) > 1 or schedule in ("standard", "fixed") else alone


def check_weights_of_drafter(models: Sequence[Engine], drafter: int | Drafter) -> None:
    """Raise ValueError where a drafter that is read beside the members has the weights of one of them."""
    model = models[drafter] if isinstance(drafter, int) else drafter.model
    for index, member in enumerate(models):
        if model is not None and index != drafter and member.is_same_as(model):
            raise ValueError(
                f"drafter: expected one with weights of its own under schedule 'parallel', got those of member {index}"
            )


def as_stop_tokens(stop_tokens: Sequence[int]) -> frozenset[int]:
    """Token ids as a set. Raises ValueError where they are something else."""
    if not isinstance(stop_tokens, (Sequence, set, frozenset)) or not all(_is_count(token) for token in stop_tokens):
        raise ValueError(f"stop_tokens: expected a list of token ids, got {stop_tokens!r}")
    return frozenset(stop_tokens)


def as_stop_strings(stop_strings: Sequence[str], tokenizer: Any | None) -> tuple[str, ...]:
    """Stop strings as a tuple. Raises ValueError where they are something else, or there is no tokenizer for them."""
    listed = isinstance(stop_strings, Sequence | Set)
    strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings) if listed else ()
    if not listed or not all(isinstance(stop, str) and stop for stop in strings):
        raise ValueError(f"stop_strings: expected a list of texts that are not empty, got {stop_strings!r}")
    if strings and tokenizer is None:
        raise ValueError("stop_strings: text needs a tokenizer; pass tokenizer= to SpeculativeEnsemble")
    return strings


def with_numbers(task: Task) -> Task:
    """The task with numbers in the place of tensors [1] and [1, members], so that tasks can be compared.

    Raises ValueError where a tensor is for more requests than one.
    """
    sampling = _one_of(replace(task.sampling, **_numbers("sampling", task.sampling)))
    weights = getattr(task.ensemble, "weights", None)
    ensemble: Any = task.ensemble
    if isinstance(weights, Tensor):
        if weights.shape[0] != 1:
            raise ValueError(f"ensemble: expected the weights of one request, got those of {weights.shape[0]}")
        ensemble = replace(ensemble, weights=tuple(weights[0].tolist()))
    return replace(task, sampling=sampling, ensemble=ensemble)


@lru_cache
def _one_of(sampling: Sampling) -> Sampling:
    """One object for those that are equal, which are told to be so fast."""
    return sampling


def _numbers(name: str, settings: Any) -> dict[str, Any]:
    """The fields of a dataclass that are tensors [1], as numbers."""
    tensors = {f.name: value for f in fields(settings) if isinstance(value := getattr(settings, f.name), Tensor)}
    for field, value in tensors.items():
        if value.numel() != 1:
            raise ValueError(f"{name}: expected one number as {field}, got {list(value.shape)}")
    return {field: value.item() for field, value in tensors.items()}


def check_task(task: Task) -> None:
    """Raise ValueError where a setting of a generation is out of range."""
    if not isinstance(task.sampling, Sampling):
        raise ValueError(f"sampling: expected specens_kernels.Sampling, got {type(task.sampling).__name__}")
    check_seed(task.seed)
    for name in ("max_new_tokens", "min_new_tokens", "top_logprobs"):
        value = getattr(task, name)
        if not _is_count(value) or value < 0:
            raise ValueError(f"{name}: expected an integer >= 0, got {value!r}")
    if task.min_new_tokens > task.max_new_tokens:
        most = f"max_new_tokens, {task.max_new_tokens}"
        raise ValueError(f"min_new_tokens: expected at most {most}; got {task.min_new_tokens}")
    own = task.processing
    if own is not None and not isinstance(own, Processing):
        raise ValueError(f"processing: expected specens_kernels.Processing, got {type(own).__name__}")
    tables = ("end_tokens", "prompt_tokens", "output_tokens")
    given = [name for name in tables if own is not None and getattr(own, name) is not None]
    if given:
        raise ValueError(
            f"processing: expected no {given[0]}, which the driver keeps (min_new_tokens= holds ends back)"
        )


def check_lengths(models: Sequence[Engine], prompts: Sequence[list[int]], max_new_tokens: int) -> None:
    """Raise ValueError where a member cannot read its prompt, or was not built for so long a text."""
    for index, (model, prompt) in enumerate(zip(models, prompts, strict=True)):
        if max(prompt) >= model.vocab_size:
            raise ValueError(f"prompt: expected ids < {model.vocab_size} for member {index}, got {max(prompt)}")
        if model.max_length is not None and len(prompt) > model.max_length:
            raise ValueError(
                f"prompt: expected at most the {model.max_length} tokens that member {index} was built for, "
                f"got {len(prompt)}"
            )
        if model.max_length is not None and len(prompt) + max_new_tokens > model.max_length:
            raise ValueError(
                f"max_new_tokens: expected at most {model.max_length - len(prompt)} after the prompt of "
                f"{len(prompt)} tokens of member {index}, got {max_new_tokens}"
            )


def check_drafter(drafter: int | Drafter, prompts: Sequence[list[int]], max_new_tokens: int, num_nodes: int) -> None:
    """Raise ValueError where the model of a drafter was not built for so long a text, or its cache is too small."""
    for own in () if isinstance(drafter, int) else drafter.parts:
        if own.model is None:
            continue
        length, most = len(prompts[own.prompt_of]) + max_new_tokens, own.model.max_length
        if most is not None and length > most:
            raise ValueError(
                f"drafter: expected prompt and new tokens within the {most} positions of its model, got {length}"
            )
        own.model.check_length(length + num_nodes)


def check_trees(models: Sequence[Engine], tree: TreePlan) -> None:
    """Raise ValueError where a tree is too wide for a model."""
    for model in models:
        if not tree.is_grown and tree.most_children > model.vocab_size:
            raise ValueError(f"tree: expected at most {model.vocab_size} children, one a token; got {tree}")


def check_caches(models: Sequence[Engine], prompts: Sequence[list[int]], max_new_tokens: int, num_nodes: int) -> None:
    """Raise ValueError where a model's cache is too small for the text, and the nodes of a draft tree after it."""
    for model, prompt in zip(models, prompts, strict=True):
        model.check_length(len(prompt) + max_new_tokens + num_nodes)


def check_callbacks(**given: Any) -> None:
    """Raise ValueError naming the first argument that is neither None nor a function."""
    for name, value in given.items():
        if value is not None and not callable(value):
            raise ValueError(f"{name}: expected a function, got {_shown(value)}")


def is_seed(value: Any) -> bool:
    """Whether a value can be a seed."""
    return _is_count(value) and -(2**63) <= value < 2**63


def check_seed(value: Any) -> None:
    """Raise ValueError where a value is no seed."""
    if not is_seed(value):
        raise ValueError(f"seed: expected an integer of 64 bits, got {value!r}")


def as_switch(name: str, value: Any, default: bool) -> bool:
    """True or False, None being the default. Raises ValueError where it is something else."""
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name}: expected True or False, got {value!r}")
    return default if value is None else value


def _shown(value: Any) -> str:
    """A value in an error; of a module, whose words fill pages, its kind."""
    return type(value).__name__ if isinstance(value, torch.nn.Module) else repr(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
