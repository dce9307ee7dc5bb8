"""A model of transformers from its config.json: made on torch's device meta, where it takes no memory."""

from __future__ import annotations

import contextlib
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Dict, Iterator, Optional, Tuple, Type

import torch
from torch import nn

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import read_regular_text, why
from megatron_ext.contract.models.hf_config import OLDEST, config_file
from megatron_ext.contract.models.model import ModelConfig

CODE = "_implementation"
"""In keys that say by which kernels layers compute, as attn_implementation. A value may name code on a server, which
transformers would download and run; so this machine's usual ones are taken."""
LAYERS = "layers"
"""The name that a pipeline plan has for the row of layers."""

POSITIONS, MASKS = "position_ids", "attention_mask"
"""The keywords by which a model takes positions and masks."""
AXES = 4
"""Axes of positions: text's, and time, height and width of images, which are the same for text."""
WAYS = 3
"""There are so many, tried in this order: positions, from which a model makes its masks itself; those of `AXES`; and
positions with masks, which transformers makes of them."""


class Headed(nn.Module):
    """A model without a head of its own, as the text models inside models of images and speech, with a linear one."""

    def __init__(self, model: nn.Module, hidden: int, vocab_size: int, embedding: Any) -> None:
        """`embedding` is the module whose matrix is the head's, too; None: the head has its own."""
        super().__init__()
        self.model = model
        self.lm_head = nn.Linear(hidden, vocab_size, bias=False, device="meta")
        if embedding is not None:
            self.lm_head.weight = embedding.weight

    def forward(self, input_ids: torch.Tensor, use_cache: bool, **given: torch.Tensor) -> Tuple[torch.Tensor]:
        """[batch, sequence] -> logits [batch, sequence, vocabulary]."""
        return (self.lm_head(self.model(input_ids=input_ids, use_cache=use_cache, **given)[0]),)


def transformers() -> Any:
    """The library, imported where a model of it is trained. Raises EngineError: it is not installed here, or too
    old."""
    try:
        library = import_module("transformers")
    except ImportError as error:
        raise EngineError(
            f"model.family=huggingface needs transformers where its ranks run, and {sys.executable} cannot import it: "
            f"{error}; install it there (pip install 'transformers>={OLDEST}')"
        ) from error
    if tuple(map(int, library.__version__.split(".")[:1])) < (OLDEST,):
        raise EngineError(
            f"model.family=huggingface needs transformers {OLDEST} or newer where its ranks run, and "
            f"{sys.executable} has {library.__version__}; install a newer one"
        )
    return library


def config_of(model: ModelConfig) -> Any:
    """The configuration that `model.config` leads to, as transformers reads it. Raises EngineError: it cannot be read,
    or is of no family that transformers knows."""
    library = transformers()
    path = config_file(str(model.config))
    try:
        content = _without_code(json.loads(read_regular_text(Path(path))))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(
            f"model.config={model.config}: {path} cannot be read: {why(error)}; give a config.json"
        ) from error
    kind = content.pop("model_type", None)
    try:
        config = library.AutoConfig.for_model(kind, **content)
    except Exception as error:
        raise EngineError(
            f"model.config={model.config}: transformers {library.__version__} makes no configuration of model_type "
            f"{kind!r} from {path}: {error}"
        ) from error
    config.use_cache = False
    return config


def _without_code(content: Any) -> Any:
    """The same without keys that have `CODE` in them, also in the configurations within it."""
    if not isinstance(content, dict):
        return content
    return {key: _without_code(value) for key, value in content.items() if CODE not in key}


def made(model: ModelConfig) -> nn.Module:
    """The whole model on the device meta. Raises EngineError: transformers has no causal model of its family."""
    library, config = transformers(), config_of(model)
    try:
        with torch.device("meta"):
            found: nn.Module = _made(library, config)
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(
            f"model.config={model.config}: transformers {library.__version__} cannot make a {config.model_type} of "
            f"it: {type(error).__name__}: {error}"
        ) from error
    return found


def _made(library: Any, config: Any) -> nn.Module:
    if type(config) in library.AutoModelForCausalLM._model_mapping:
        return library.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    kind = _base_class(library, config)
    base = kind._from_config(config, dtype=torch.float32)
    causal = [module.is_causal for module in base.modules() if hasattr(module, "is_causal")]
    if getattr(config, "is_causal", True) is False or not all(causal):
        raise EngineError(
            f"transformers has no causal model of a {config.model_type}: each token of a {kind.__name__} sees those "
            "after it, so there is nothing to predict; choose a family of AutoModelForCausalLM"
        )
    embedding = base.get_input_embeddings() if getattr(config, "tie_word_embeddings", False) else None
    return Headed(base, config.hidden_size, config.vocab_size, embedding)


def _base_class(library: Any, config: Any) -> Type[Any]:
    """The model without a head whose configuration it is."""
    with contextlib.suppress(KeyError, ValueError):  # not listed, or listed though the package does not export it
        found = library.AutoModel._model_mapping[type(config)]
        return found[0] if isinstance(found, tuple) else found
    package, _, name = type(config).__module__.rpartition(".")
    module = getattr(sys.modules[package], name.replace("configuration_", "modeling_"))
    for one in vars(module).values():
        if isinstance(one, type) and issubclass(one, library.PreTrainedModel) and _is_of(one, type(config)):
            return one
    raise EngineError(f"transformers has no model of model_type {config.model_type!r} that stands by itself")


def _is_of(model: Type[Any], config: Type[Any]) -> bool:
    """Whether a class is a model that stands by itself and has a configuration of this class."""
    said = vars(model).get("config_class"), vars(model).get("__annotations__", {}).get("config")
    return config in said and not model.__name__.endswith("PreTrainedModel")


def rows_of_layers(model: nn.Module, count: Optional[int]) -> Iterator[Tuple[str, nn.ModuleList]]:
    """The rows of modules that may be its layers, by their names in it: that of its pipeline plan, or those of `count`
    modules."""
    rows = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.ModuleList)]
    for name, module in model.named_modules():
        plan = getattr(getattr(module, "config", None), "base_model_pp_plan", None) or {}
        path = f"{name}.{LAYERS}" if name else LAYERS
        if LAYERS in plan and any(row == path for row, _ in rows):
            yield next((row, one) for row, one in rows if row == path)
            return
    yield from ((name, row) for name, row in rows if len(row) == count)


def layers_of(model: nn.Module) -> Tuple[str, nn.ModuleList]:
    """The row of its layers, and its name in it. Raises EngineError: there is none, or there are several."""
    config: Any = model.config if hasattr(model, "config") else model.model.config  # type: ignore[union-attr]
    count = getattr(config, "num_hidden_layers", None)
    found = list(rows_of_layers(model, count))
    outermost = [(name, row) for name, row in found if not any(name.startswith(f"{other}.") for other, _ in found)]
    if len(outermost) != 1:
        raise EngineError(
            f"{type(model).__name__} cannot be cut: it declares no pipeline plan, and has "
            f"{len(outermost) or 'no'} row{'s' * (len(outermost) != 1)} of {count} layers"
        )
    return outermost[0]


def placed(positions: Optional[torch.Tensor], way: int, config: Any, dtype: torch.dtype) -> Dict[str, Any]:
    """What a model is given beside tokens for the `positions` [batch, sequence] of its documents."""
    if positions is None:
        return {}
    if way == 0:
        return {POSITIONS: positions}
    if way == 1:
        return {POSITIONS: positions.expand(AXES, *positions.shape)}
    like = torch.zeros(1, dtype=dtype, device=positions.device).expand(*positions.shape, 1)
    return {
        POSITIONS: positions,
        MASKS: transformers().masking_utils.create_masks_for_generate(config, like, None, None, positions),
    }
