"""Finds megatron.core, and what it can do on this machine."""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.plan import Plan
from megatron_ext.core import on_cpu

OLDEST, NEWEST = (0, 13), (0, 16)
"""The versions that were tried; a layout of uneven stages is not in earlier ones."""


class Library(NamedTuple):
    """The megatron.core that is here."""

    version: Tuple[int, ...]
    transformer_engine: bool
    """Whether layers are Transformer Engine's."""

    @property
    def remarks(self) -> List[str]:
        """What the log says of it."""
        shown = ".".join(map(str, self.version))
        layers = (
            "layers of Transformer Engine"
            if self.transformer_engine
            else "its own layers and torch's attention, for Transformer Engine is not there"
        )
        found = [f"megatron-core {shown} trains, with {layers}"]
        if self.version[:2] > NEWEST:
            found.append(
                f"megatron-core {shown} is newer than {'.'.join(map(str, NEWEST))}, the last that was tried with tdpp"
            )
        return found


@contextmanager
def _without_wandb() -> Iterator[None]:
    """megatron.core would import it for timers that nobody reads: a third of its own import's time."""
    if "wandb" in sys.modules:
        yield
        return
    sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["wandb"]


def preload(script: Optional[Sequence[str]] = None) -> None:
    """Imports what ranks on a CPU use of megatron.core, a CPU second, once before they are forked: that of the checkout
    whose `script` is to train, or else the installed one.

    What fails here is for them to report. On GPUs each of them imports it: it asks for CUDA, which forks then cannot
    use.
    """
    warnings.filterwarnings("ignore", module="megatron")
    if script:
        sys.path.insert(0, str(Path(script[0]).parent))
    with suppress(Exception), nullcontext() if script else _without_wandb(), on_cpu.uncompiled():
        from megatron.core import dist_checkpointing, parallel_state  # noqa: F401
        from megatron.core.distributed import DistributedDataParallel  # noqa: F401
        from megatron.core.models.gpt import GPTModel, gpt_layer_specs  # noqa: F401
        from megatron.core.optimizer import get_megatron_optimizer  # noqa: F401
        from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: F401
        from megatron.core.transformer import multi_latent_attention  # noqa: F401
        from megatron.core.transformer.moe import moe_utils  # noqa: F401


def load(plan: Plan) -> Library:
    """Imports megatron.core, for the plan's device. Raises EngineError: it is not installed, or too old."""
    warnings.filterwarnings("ignore", module="megatron")  # of what only some GPUs have, at each import
    try:
        with _without_wandb(), on_cpu.uncompiled() if plan.device == "cpu" else nullcontext():
            import megatron.core
    except ImportError as error:
        raise EngineError(
            f"engine=megatron_core needs megatron-core, which cannot be imported: {error}; install tdpp[megatron] "
            "where the ranks run, take a container that has it, or use engine=tdpp"
        ) from error
    version = tuple(int(part) for part in megatron.core.__version__.split("+")[0].split(".")[:3] if part.isdigit())
    if version[:2] < OLDEST:
        raise EngineError(
            f"engine=megatron_core: megatron-core {megatron.core.__version__} is too old for stages of different "
            f"lengths; install {'.'.join(map(str, OLDEST))} or newer, or use engine=tdpp"
        )
    if plan.device == "cpu":
        on_cpu.begin()
    found = Library(version, plan.device == "cuda" and _has_transformer_engine())
    if not found.transformer_engine:
        from megatron.core.transformer.moe import moe_utils

        if not hasattr(moe_utils, "te_general_gemm"):  # which its router asks for even then (0.16.1)
            moe_utils.te_general_gemm = None
        from megatron.core.transformer import multi_latent_attention as latent

        for name in [one for one in vars(latent) if one.startswith("TE")]:  # which it compares its layers with
            if not isinstance(getattr(latent, name), type):
                setattr(latent, name, type(name, (), {}))
    return found


def _has_transformer_engine() -> bool:
    from megatron.core.models.gpt import gpt_layer_specs

    return bool(gpt_layer_specs.HAVE_TE)  # megatron.core has names of Transformer Engine's layers even without it
