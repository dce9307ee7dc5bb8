"""Layer costs of a GPU: how long the parts of a model take on it (fasop/profiles/*.yaml)."""

from __future__ import annotations

from pathlib import Path

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.errors import ConfigError
from conf.schema import config

FOLDER = Path(__file__).parents[1] / "fasop" / "profiles"


@config
class Cost:
    """Milliseconds of one micro-batch."""

    forward: float = MISSING
    backward: float = MISSING

    def __post_init__(self) -> None:
        for name, value in (("forward", self.forward), ("backward", self.backward)):
            if not 0 <= value < 60_000:
                raise ConfigError(f"a profile's {name}={value} must be between 0 and 60000 milliseconds")


@config
class ModelCosts:
    """Costs of a model's parts for one tensor size and micro-batch."""

    model: str = MISSING
    tensor: int = MISSING
    micro_batch_size: int = MISSING
    embedding: Cost = MISSING
    layer: Cost = MISSING
    head: Cost = MISSING
    """Final norm, logits and loss."""


@config
class LayerProfile:
    gpu: str = MISSING
    costs: list[ModelCosts] = MISSING
    optimizer_ns_per_parameter: float | None = None
    """Nanoseconds a parameter of a rank takes in the whole optimizer step; null: what the GPU's memory allows."""

    def __post_init__(self) -> None:
        value = self.optimizer_ns_per_parameter
        if value is not None and not 0 <= value < 1000:
            raise ConfigError(f"a profile's optimizer_ns_per_parameter={value} must be between 0 and 1000 nanoseconds")

    def of(self, model: str, tensor: int, micro_batch_size: int) -> ModelCosts:
        """The costs for exactly these sizes: nothing is guessed from others.

        Raises:
            ConfigError: the profile has none.
        """
        for costs in self.costs:
            if (costs.model, costs.tensor, costs.micro_batch_size) == (model, tensor, micro_batch_size):
                return costs
        known = "; ".join(
            f"model={c.model} parallel.tensor={c.tensor} parallel.micro_batch_size={c.micro_batch_size}"
            for c in self.costs
        )
        raise ConfigError(
            f"the profile of {self.gpu} has no costs for model={model} parallel.tensor={tensor} "
            f"parallel.micro_batch_size={micro_batch_size}; it has: {known}"
        )


def read_profile(name: str) -> LayerProfile:
    """The profile `fasop/profiles/<name>.yaml`.

    Raises:
        ConfigError: it does not exist, or is not one.
    """
    path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(other.stem for other in FOLDER.glob("*.yaml")))
        raise ConfigError(f"there is no profile {name!r} in {FOLDER}; there are: {known}")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(LayerProfile), OmegaConf.load(path))
        profile = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path} is not a profile: {str(error).splitlines()[0]}") from error
    assert isinstance(profile, LayerProfile)
    return profile
