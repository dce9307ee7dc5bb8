"""The state of an optimizer in a checkpoint of megatron.core: what its loader and Megatron-LM's continue from, and what
they leave."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from megatron_ext.checkpoints.foreign.torch_dist import COMMON, folder_of, read_common, weights_alone
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.run_files import WEIGHTS
from megatron_ext.contract.train_config import ADAM, ADAMW, KINDS

RESHARDABLE = "fully_reshardable"
"""megatron.core's word for a state by parameters, which any layout loads."""
FORMAT = {"distrib_optim_sharding_type": RESHARDABLE, "chained_optim_avoid_prefix": True}
STATE = "optimizer.state."
KEPT_AS: Mapping[str, Mapping[str, Sequence[str]]] = {
    optimizer: {
        # of an optimizer of 16 bits, of one that is sharded, and the model's own
        WEIGHTS: (f"{STATE}fp32_param.", f"{STATE}param.", ""),
        KINDS[optimizer][0]: (f"{STATE}exp_avg.",),
        KINDS[optimizer][1]: (f"{STATE}exp_avg_sq.",),
    }
    for optimizer in (ADAMW, ADAM)
}
"""For each optimizer, how the names of its tensors of a kind begin."""


class Reached(NamedTuple):
    """How far a checkpoint's run has come, as its meta.json says."""

    iteration: int
    consumed_samples: int
    updates: int
    scaler: Optional[Dict[str, float]]
    optimizer: str = ADAMW


class Training(NamedTuple):
    """What a checkpoint has besides weights."""

    iteration: int
    kinds: Sequence[Tuple[str, str]]
    """Kinds of tensors, and how their names begin."""
    common: Dict[str, Any]
    """What all ranks share."""


def training_of(plan: Plan, reached: Reached) -> Optional[Training]:
    """Return what Megatron-Core continues from; None where it has no such optimizer, or none was run yet."""
    if plan.train.optimizer not in KEPT_AS or not reached.updates:
        return None
    kinds = [(kind, one) for kind, prefixes in KEPT_AS[plan.train.optimizer].items() for one in prefixes if one]
    optimizer: Dict[Any, Any] = _optimizer(plan, reached, expert=False)
    if (plan.expert or 1) > 1:  # then megatron.core has an optimizer for experts
        optimizer = {0: optimizer, 1: _optimizer(plan, reached, expert=True)}
    common = {
        "checkpoint_version": 3.0,
        "iteration": reached.iteration,
        "content_metadata": FORMAT,
        "optimizer": optimizer,
        "opt_param_scheduler": _scheduler(plan, reached),
    }
    return Training(reached.iteration, kinds, common)


def _optimizer(plan: Plan, reached: Reached, expert: bool) -> Dict[str, Any]:
    """In the forms of its optimizers: that of fp32, and those of 16 bits, which have one within."""
    import torch

    own = {
        "param_groups": _groups(plan, reached.updates, expert),
        "state": {"common_step": torch.tensor(float(reached.updates))},
    }
    scaler = reached.scaler
    scaled = (
        {}
        if scaler is None
        else {
            "grad_scaler": {
                "scale": torch.tensor([scaler["scale"]]),
                "growth_tracker": int(scaler["good"]),
                "hysteresis_tracker": int(scaler["patience"]),
            }
        }
    )
    return {**own, "optimizer": own, "param_state_sharding_type": RESHARDABLE, **scaled}


def _groups(plan: Plan, updates: int, expert: bool) -> List[Dict[str, Any]]:
    """Its groups of parameters: vectors, which do not decay, and matrices."""
    train = plan.train
    vectors = not expert or plan.model.add_bias_linear
    return [
        {
            "lr": train.lr,
            "betas": (train.adam_beta1, train.adam_beta2),
            "eps": train.adam_eps,
            "weight_decay": decay * train.weight_decay,
            "bias_correction": True,
            "step": updates,
            "wd_mult": decay,
            "lr_mult": 1.0,
            "max_lr": train.lr,
            "min_lr": train.min_lr,
            "is_expert_parallel": expert,
            "is_decoupled_lr": False,
            "default_config": True,
        }
        for decay in ((1.0, 0.0) if vectors else (1.0,))
    ]


def _scheduler(plan: Plan, reached: Reached) -> Dict[str, Any]:
    """Megatron-LM's scheduler, which counts samples."""
    train, batch = plan.train, plan.global_batch_size
    return {
        "max_lr": train.lr,
        "min_lr": train.min_lr,
        "lr_warmup_steps": train.lr_warmup_iterations * batch,
        "lr_decay_steps": train.lr_decay_iterations * batch,
        "lr_decay_style": str(train.lr_policy),
        "num_steps": reached.consumed_samples,
        "start_wd": train.weight_decay,
        "end_wd": train.weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": 0,
    }


def reached_in(path: Path) -> Optional[Reached]:
    """How far the training has come that saved a folder of megatron.core's; None where it saved no optimizer's state.
    Raises EngineError: what says so is missing or damaged, or the state is not there by parameters."""
    common, folder = read_common(path), folder_of(path)
    saved = common.get("optimizer")
    if not saved:
        return None
    way_out = weights_alone(path)
    try:
        several = [saved[number] for number in sorted(saved)] if 0 in saved else [saved]
        forms = {one.get("param_state_sharding_type", RESHARDABLE) for one in several}
        if forms != {RESHARDABLE}:
            raise EngineError(
                f"{folder}: the optimizer's state has the form {', '.join(sorted(forms))}, which follows from the "
                "layout that saved it; have Megatron-LM load it in that layout and save it with "
                f"--dist-ckpt-optim-fully-reshardable (engine.arguments; Megatron-Core 0.15 or newer), or {way_out}"
            )
        args = getattr(common.get("args"), "__dict__", {})
        optimizer = args.get("optimizer", "adam")
        if optimizer != "adam":
            raise EngineError(f"{folder}: it has the state of --optimizer {optimizer}, not of adam; {way_out}")
        consumed = args.get("consumed_train_samples", common.get("opt_param_scheduler", {}).get("num_steps"))
        return Reached(
            _count(common["iteration"]),
            _count(consumed),
            _updates(several),
            next(filter(None, map(_scaler, several)), None),
            ADAMW if args.get("decoupled_weight_decay", True) else ADAM,
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        told = f"{error} is missing" if isinstance(error, KeyError) else error
        raise EngineError(
            f"{folder / COMMON}: does not say how far the training has come, as Megatron-LM's does: {told}; {way_out}"
        ) from error


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise ValueError(f"expected a number of samples or iterations, found {value!r:.80}")
    return int(value)


def _updates(several: Sequence[Dict[str, Any]]) -> int:
    """Updates that optimizers made: torch's counts by parameter, Transformer Engine's and Apex's by group."""
    inner = [saved.get("optimizer", saved) for saved in several]
    steps = [group.get("step") for one in inner for group in one["param_groups"]]
    steps += [one.get("state", {}).get("common_step") for one in inner]
    if not any(step is not None for step in steps):
        raise ValueError("neither a step in param_groups nor a common_step counts the optimizer's updates")
    return max(_count(step) for step in steps if step is not None)


def _scaler(saved: Dict[str, Any]) -> Optional[Dict[str, float]]:
    """The state of fp16's loss scale; None without one that adapts."""
    found = saved.get("grad_scaler") or {}
    if "growth_tracker" not in found:
        return None
    # which counts down as long as gradients overflow
    patience, scale = int(found["hysteresis_tracker"]), float(found["scale"])
    if not 0 < scale < math.inf:
        raise ValueError(f"expected a loss scale above 0, found {scale}")
    return {"scale": scale, "good": _count(found["growth_tracker"]), "patience": patience}
