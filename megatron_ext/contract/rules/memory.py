"""What saves memory: replicas that keep a share, what lies in the host's memory, and layers that are computed again."""

from __future__ import annotations

from typing import Callable, Iterator, Sequence

from megatron_ext.contract.keys import Get, shown
from megatron_ext.contract.parallel_config import (
    GATHERED,
    SCATTERED,
    Offload,
    Recompute,
    Shards,
    largest_zero,
    of_any_stage,
)
from megatron_ext.contract.plan_check import GRID, Faults, PlanFault, Rules, Values
from megatron_ext.contract.train_config import LAMB

NOT_SCATTERED = {
    "replicas": "replicas of unlike stages would wait for each other in every pass",
    "schedule_file": "replicas wait for each other in backward passes, and only named schedules are known to end then",
    "streams": "the gradients of all streams are added up first",
    "adapt": "whole gradients tell how large a batch should be",
    "elastic": "a GPU holds more when a node is lost",
}
"""Why a key of plan.json does not go with gradients of which a replica keeps a share."""
NOT_GATHERED = {
    "shares": "replicas gather the weights of a block together, in as many passes each",
    "hierarchical_stages": "weights are gathered over all replicas at once, and lie in another order then",
}
"""The same of weights."""
NOT_UNEQUAL = {
    "hierarchical_stages": "sums within nodes leave all ranks of a node as much",
    "streams": "each of them takes memory of its own",
    "adapt": "what passes leave of a GPU's memory changes with the batch",
    "elastic": "what a GPU has room for changes when a node is lost",
    "streaming": "each replica updates versions of its own",
}
"""Why a key of plan.json does not go with parts by memory."""
NOT_BY_STAGE = {
    "elastic": "the stages may be others when a node is lost",
    "schedule_file": "only the passes of named schedules are known stage by stage",
}
"""Why a key of plan.json does not go with what stages keep, or compute again, each in a way of its own."""
NOT_KEPT_BY_STAGE = {"adapt": "gradients are compared where all ranks keep the same of them", **NOT_BY_STAGE}


def broken_by_shares(get: Get, prefix: str, given: Callable[[str], str], by_stage: Sequence[str]) -> Iterator[str]:
    """Every rule broken by what replicas keep a share of, and by what differs by stage.

    Args:
        get: the value of a key of plan.json, or what it is to be where there is none.
        prefix: what stands before the keys in messages: `parallel.`, or nothing in plan.json.
        given: a key of plan.json with its value, as whoever gave it knows it.
        by_stage: the keys that have values by stage.
    """
    zero = f"{prefix}zero={get('zero', None)}"
    largest, unequal = largest_zero(get("zero", None)), get("shards", None)
    if unequal and not get("sharded_optimizer", False):
        yield (
            f"{given('shards')} needs {prefix}zero of at least 1: without it every replica keeps all; use "
            f"{prefix}zero=1, or {prefix}shards={Shards.equal}"
        )
    for applies, wrong, reasons, use in (
        (largest >= SCATTERED, zero, NOT_SCATTERED, f"{prefix}zero=1 or 0"),
        (largest >= GATHERED, zero, NOT_GATHERED, f"{prefix}zero={SCATTERED}"),
        (unequal, given("shards"), NOT_UNEQUAL, f"{prefix}shards={Shards.equal}"),
        *(
            (True, given(key), NOT_BY_STAGE if key == "recompute" else NOT_KEPT_BY_STAGE, "one value for all stages")
            for key in by_stage
        ),
    ):
        for key, why in reasons.items() if applies else ():
            if get(key, None):
                yield f"{wrong} cannot be combined with {given(key)}, for {why}; use {use}, or leave that out"
    if SCATTERED <= largest < GATHERED and get("chunks", 1) > 1 and get("shares", None) is not None:
        yield (
            f"{zero} cannot be combined with both {given('chunks')} and {given('shares')}, for replicas then pass "
            f"their chunks in unlike orders; use {prefix}zero=1, {prefix}chunks=1 or {prefix}shares=null"
        )


def broken_by_offload(get: Get, of_train: Get, prefix: str) -> Iterator[str]:
    """Every rule broken by what a rank keeps in its host's memory; `of_train` gives keys of the training."""
    text = get("offload", None) or Offload.none
    offload = Offload.together(map(Offload, of_any_stage(text)))
    optimizer, sync_every = of_train("optimizer", None), of_train("sync_every", None)
    recompute = Recompute(get("recompute", Recompute.none))
    offloads = get("offloads", None) or [offload] * len(recompute.stages)
    pairs = zip(offloads, recompute.stages if len(recompute.stages) > 1 else [recompute] * len(offloads))
    if any(Offload(kept).takes_activations and way != Recompute.none for kept, way in pairs):
        yield (
            f"{prefix}offload={text} cannot be combined with {prefix}recompute={recompute}: what a layer keeps is "
            f"in the host's memory, or is computed again; use {prefix}recompute=none, or {prefix}offload="
            + ("optimizer" if offload.takes_optimizer else "none")
        )
    if offload.takes_activations and get("streams", None) is not None:
        yield (
            f"{prefix}offload={text} cannot be combined with {prefix}streams={shown(get('streams', None))}, whose "
            f"copies of the model pass beside each other; use {prefix}streams=null, or {prefix}offload=none"
        )
    if offload.takes_optimizer and sync_every is not None:
        yield (
            f"{prefix}offload={text} cannot be combined with train.sync_every={sync_every}, for islands step a copy "
            f"of all weights on the GPU; use {prefix}offload=none, or train.sync_every=null"
        )
    if offload.takes_optimizer and optimizer == LAMB:
        yield (
            f"{prefix}offload={text} cannot be combined with train.optimizer={LAMB}, whose updates need the norms "
            f"of whole weight matrices; use {prefix}offload=none, or another optimizer"
        )


def _shares(plan: Values) -> Faults:
    several = len(Recompute(plan["recompute"]).stages) > 1
    by_stage = [key for key in ("zeros", "offloads") if plan.get(key)] + ["recompute"] * several
    yield from map(PlanFault, broken_by_shares(plan.get, "", lambda key: f"{key}={plan.get(key)}", by_stage))
    if plan.get("zero") is not None and not plan["sharded_optimizer"]:
        yield "sharded_optimizer", plan["sharded_optimizer"], f"true with zero={plan['zero']}"


def _by_stage(plan: Values) -> Faults:
    zeros, offloads, recompute = plan.get("zeros"), plan.get("offloads"), Recompute(plan["recompute"]).stages
    for key, values in (("zeros", zeros), ("offloads", offloads), ("recompute", recompute[1:] and recompute)):
        if values and len(values) != plan["pipeline"]:
            yield key, values, f"of pipeline={plan['pipeline']} values"
    if zeros is not None:
        largest = max(zeros, default=0)
        if (plan.get("zero") or int(plan["sharded_optimizer"])) != largest:
            yield "zeros", zeros, f"at most zero={plan.get('zero')}, which one of them is"
    if offloads is not None and Offload.together(map(Offload, offloads)) != (plan.get("offload") or Offload.none):
        yield "offloads", offloads, f"together offload={plan.get('offload')}"
    shards, replicas = plan.get("shards"), plan.get("replicas") or [plan["data"]] * plan["pipeline"]
    if shards is not None and [len(of_stage) for of_stage in shards] != replicas:
        yield "shards", shards, "a list for each stage, with a number for each of its replicas"


def _offload(plan: Values) -> Faults:
    yield from map(PlanFault, broken_by_offload(plan.get, plan["train"].get, ""))


RULES: Rules = [
    (("sharded_optimizer", "recompute"), _shares),
    ((*GRID, "sharded_optimizer", "recompute"), _by_stage),
    (("train", "model"), _offload),
]
