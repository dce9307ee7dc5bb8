"""The state of an optimizer in a checkpoint of megatron.core: what its loader and Megatron-LM's continue from."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from megatron_ext.contract.plan import Plan
from megatron_ext.contract.run_files import WEIGHTS
from megatron_ext.contract.train_config import ADAM, ADAMW, KINDS

RESHARDABLE = "fully_reshardable"
"""megatron.core's word for a state by parameters, which any layout loads."""
FORMAT = {"distrib_optim_sharding_type": RESHARDABLE, "chained_optim_avoid_prefix": True}


class Reached(NamedTuple):
    """How far a checkpoint's run has come, as its meta.json says."""

    iteration: int
    consumed_samples: int
    updates: int
    scaler: Optional[Dict[str, float]]


class Training(NamedTuple):
    """What a checkpoint has besides weights."""

    iteration: int
    kinds: Sequence[Tuple[str, str]]
    """Kinds of tensors, and how their names begin."""
    common: Dict[str, Any]
    """What all ranks share."""


def training_of(plan: Plan, reached: Reached) -> Optional[Training]:
    """Return what Megatron-Core continues from; None where it has no such optimizer, or none was run yet."""
    if plan.train.optimizer not in (ADAM, ADAMW) or not reached.updates:
        return None
    moments = zip(KINDS[plan.train.optimizer], ("exp_avg", "exp_avg_sq"))
    weights = [(WEIGHTS, "fp32_param"), (WEIGHTS, "param")]  # of an optimizer of 16 bits, and of one that is sharded
    kinds = [(kind, f"optimizer.state.{name}.") for kind, name in (*weights, *moments)]
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
