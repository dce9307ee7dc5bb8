"""Which engine trains where a configuration leaves it to tdpp (`engine=auto`)."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from conf.errors import ConfigError
from conf.schema.engine import EngineKind

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from conf.schema.experiment import Experiment

Made = tuple["Experiment", str | None]
"""An experiment, and in words what was chosen of it."""
TRIED = (EngineKind.tdpp, EngineKind.megatron_core)
CORE = "megatron.core"
LAYERS = "transformer_engine"
"""Without its kernels, Megatron-Core's layers are no faster than tdpp's."""


def with_engine(cfg: DictConfig, make: Callable[[DictConfig], Made]) -> Made:
    """Makes an experiment, with `engine=auto` by the engine that can run it, and says which and why. Raises
    ConfigError: a rule is broken with every engine, or the only one that can is not installed."""
    from omegaconf import OmegaConf

    if OmegaConf.select(cfg, "engine.kind", default=None) != EngineKind.auto:
        return make(cfg)
    made: dict[EngineKind, Made] = {}
    refused: dict[EngineKind, ConfigError] = {}
    for kind in TRIED:
        one = cfg.copy()
        one.engine.kind = kind
        try:
            made[kind] = make(one)
        except ConfigError as error:
            refused[kind] = error
    kind, why = _choice(made, refused)
    experiment, chosen = made[kind]
    return experiment, "; ".join(filter(None, [f"engine=auto takes {kind}: {why}", chosen]))


def _choice(made: dict[EngineKind, Made], refused: dict[EngineKind, ConfigError]) -> tuple[EngineKind, str]:
    own, core = TRIED
    if not made:
        if len({*map(str, refused.values())}) == 1:
            raise refused[own]
        raise ConfigError(
            "engine=auto: no engine can run this: "
            + "; ".join(f"engine={kind}: {why}" for kind, why in refused.items())
        )
    if core not in made:
        return own, str(refused[core])
    from conf.schema.containers import ContainerKind  # loaded with any experiment

    experiment = made[core][0]
    here = experiment.container.kind is ContainerKind.none
    if own not in made:
        if here and not _installed(CORE):
            raise ConfigError(
                f"engine=auto: {refused[own]}; but megatron-core is not installed here: install tdpp[megatron], or "
                "take a container that has it"
            )
        return core, str(refused[own])
    family = experiment.model.family
    if not experiment.model.traits.megatron_lm:
        return own, f"both can run this plan, and Megatron-Core has no faster layers of model.family={family}"
    cpu = all(experiment.cluster.gpus[group.gpu].is_cpu for group in experiment.cluster.groups.values())
    if cpu:
        return own, "both can run this plan, and Megatron-Core is slower on CPUs"
    if not here:
        return own, "both can run this plan, and what the container has is not known; engine=megatron_core takes it"
    if not (_installed(CORE) and _installed(LAYERS)):
        return own, "both can run this plan, and megatron-core with Transformer Engine is not installed here"
    return core, "both can run this plan, and megatron-core with Transformer Engine is installed here"


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False
