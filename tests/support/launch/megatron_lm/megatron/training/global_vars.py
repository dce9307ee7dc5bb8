"""In place of Megatron-LM's: what all of its modules share."""

from __future__ import annotations

from typing import Any

from megatron.core import Timers
from megatron.training.dist_signal_handler import DistributedSignalHandler

_GLOBAL: dict[str, Any] = {}


def set_global_variables(args: Any) -> None:
    _GLOBAL["args"] = args
    _GLOBAL["timers"] = Timers(args.timing_log_level, args.timing_log_option)
    if args.exit_signal_handler:
        _GLOBAL["signals"] = DistributedSignalHandler(args.exit_signal).__enter__()


def get_args() -> Any:
    return _GLOBAL["args"]


def get_timers() -> Any:
    return _GLOBAL["timers"]


def get_signal_handler() -> Any:
    return _GLOBAL.get("signals")
