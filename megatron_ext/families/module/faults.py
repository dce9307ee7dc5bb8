"""What may be wrong with a user's model, whatever it is made of: messages of those who look at it before the start."""

from __future__ import annotations

import re
from typing import Any, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.contract.errors import EngineError
from megatron_ext.families.module.code import UserCode
from megatron_ext.tasks.task import LOGGED

META, CPU = "meta", "cpu"
_METRIC = re.compile(r"\w[\w /.@-]*")


class Fault(EngineError):
    """Of the model, whatever it is looked at with."""


def require_gradients(code: UserCode, without: Sequence[str]) -> None:
    """Raises EngineError for parameters that the loss does not depend on."""
    if without:
        shown = ", ".join(without[:5]) + (f" and {len(without) - 5} more" if len(without) > 5 else "")
        raise Fault(
            f"model.code={code.spec}: the loss does not depend on the parameter{'s' * (len(without) > 1)} {shown}, so "
            "there is no gradient; use what has parameters, remove it, or freeze it with requires_grad_(False)"
        )


def require_loss(code: UserCode, what: str, loss: Any) -> None:
    """Raises EngineError unless it is one number with a gradient."""
    if not (is_number(loss) and loss.is_floating_point()):
        raise Fault(f"model.code={code.spec}: {what} returns {_named(loss)}, but must return one number")
    if not loss.requires_grad:
        raise Fault(
            f"model.code={code.spec}: the loss depends on no parameter: nothing could be trained; loss must compute "
            "with the tensors that it is given, and parameters must have requires_grad"
        )


def require_metrics(code: UserCode, what: str, metrics: Any) -> None:
    """Raises EngineError unless they are numbers with names that a log line has not."""
    if not isinstance(metrics, dict):
        raise Fault(f"model.code={code.spec}: {what} returns {_named(metrics)}, but must return a dict of numbers")
    for name, value in metrics.items():
        if not isinstance(name, str) or name in LOGGED or not _METRIC.fullmatch(name):
            raise Fault(
                f"model.code={code.spec}: {what} names a metric {name!r}; its name must be words of letters and "
                "digits, and none that a log line has already"
            )
        if not is_number(value):
            raise Fault(f"model.code={code.spec}: {what} gives {name} as {_named(value)}, but it must be one number")


def is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _named(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


class Randomness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whether random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.any = True
        return func(*args, **(kwargs or {}))
