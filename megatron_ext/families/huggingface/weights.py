"""The weights of a model of transformers in files of safetensors, as from_pretrained reads and save_pretrained writes
them: under the names of today, or of the versions of transformers that a family has had."""

from __future__ import annotations

import json
import zlib
from copy import deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron_ext.contract.errors import EngineError
from megatron_ext.families.huggingface.library import Headed, transformers

SMALL = 1 << 16
"""Numbers in a tensor that an __init__ may make, such as the bounds of an activation."""


def fill(root: nn.Module, name: str, owner: Optional[Any], seed: int) -> None:
    """Fills parameters and buffers below `root`, which is called `name` in the whole model, where they are not on the
    device meta. `owner` is the model of transformers that it is a part of; None: itself.

    The same, whatever else of the model is there: each module's numbers follow from its name and the seed.

    Raises:
        EngineError: the model leaves numbers that are not drawn.
    """
    pretrained = transformers().PreTrainedModel
    every = [*root.named_parameters(), *root.named_buffers()]
    numbers = [(key, one) for key, one in every if not one.is_meta and one.is_floating_point()]
    for _, one in numbers:
        one.detach().fill_(torch.nan)
    if owner is None:
        owner = next(one for one in root.modules() if isinstance(one, pretrained))
    with torch.random.fork_rng([]):
        _fill(root, name, owner, seed, pretrained)
        left = [(key, one) for key, one in numbers if one.isnan().any()]
        usual = _usual(owner, seed) if left else {}
    for key, one in left:
        whole = f"{name}.{key}" if name else key
        value = next((value for other, value in usual.items() if f".{whole}".endswith(f".{other}")), one)
        if value.is_meta or value.isnan().any():
            raise EngineError(
                f"{type(owner).__name__} cannot be trained from new weights: it leaves {whole} as it finds it in memory"
            )
        one.detach().copy_(value)


def _usual(owner: Any, seed: int) -> Dict[str, Tensor]:
    """What a model's own __init__ gives to its parameters and buffers, by their names in it; only small ones are not on
    the device meta."""
    torch.manual_seed(seed)
    with _Small():
        model = type(owner)._from_config(owner.config, dtype=torch.float32)
    return dict([*model.named_parameters(), *model.named_buffers()])


class _Small(TorchFunctionMode):
    """Memory that is not written to is on the device meta, if there is much of it, else it has no numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.zeros, torch.ones, torch.randn):
            found = func(*args, **{**kwargs, "device": "meta"})
            if found.numel() > SMALL:
                return found
            if func is torch.empty and found.is_floating_point():
                return torch.full(found.shape, torch.nan, dtype=found.dtype)
        return func(*args, **kwargs)


def _fill(module: nn.Module, name: str, owner: Any, seed: int, pretrained: Any) -> None:
    owner = module if isinstance(module, pretrained) else owner
    for key, child in module.named_children():
        _fill(child, f"{name}.{key}" if name else key, owner, seed, pretrained)
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    whole = [*module.parameters()]
    if any(not one.is_meta for one in own) or (whole and not any(one.is_meta for one in whole)):
        torch.manual_seed(zlib.crc32(name.encode(), seed))
        owner._init_weights(module)


class Published:
    """Files of the weights of a whole model. A tensor is read when it is asked for, and no other one with it."""

    def __init__(self, model: nn.Module, files: Mapping[str, Path]) -> None:
        """`model` is on the device meta; `files` has the file of each tensor. Raises EngineError: the files cannot be
        read, or hold weights in a format that has to be computed back."""
        self._folder = next(iter(files.values())).parent
        self._root, self._prefix = base_of(model)
        quantized = getattr(self._root.config, "quantization_config", None)
        if quantized:
            method = quantized.get("quant_method") if isinstance(quantized, dict) else type(quantized).__name__
            raise EngineError(
                f"{self._folder}: its weights are quantized ({method}), and training starts from plain ones; save "
                "them as bf16 or fp32, with from_pretrained(…, dtype='bfloat16') and save_pretrained"
            )
        self._names: Dict[int, List[str]] = {}
        for name, one in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(one), []).append(name)
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._core = import_module("transformers.core_model_loading")
        rules = import_module("transformers.conversion_mapping").get_model_conversion_mapping(self._root)
        self._converters = [one for one in rules if isinstance(one, self._core.WeightConverter)]
        renamings = [one for one in rules if isinstance(one, self._core.WeightRenaming)]
        self._files = self._opened(files)
        self._sources = self._grouped(renamings)

    def of(self, names: Sequence[str]) -> Dict[str, Tensor]:
        """The tensors of these names in the model that are there, in fp32; a tied one may be under the other name."""
        wanted = set(names)
        for name in names:
            wanted.update(self._names.get(id(self._parameters.get(name)), ()))
        found: Dict[str, Tensor] = {}
        for first, sources in self._sources.items():
            if wanted.intersection(self._targets(first, sources)):
                found.update(self._converted(first, sources))
        for name in names:
            for other in self._names.get(id(self._parameters.get(name)), ()):
                if name not in found and other in found:
                    found[name] = found[other]
        return {name: found[name] for name in names if name in found}

    def _opened(self, files: Mapping[str, Path]) -> Dict[str, Any]:
        """Map the name of each tensor to the open file that it is in."""
        safe_open = import_module("safetensors").safe_open
        opened = {}
        for path in set(files.values()):
            try:
                opened[path] = safe_open(path, framework="pt", device="cpu")
            except Exception as error:
                raise EngineError(f"{path}: cannot be read as safetensors: {error}; fetch it again") from error
        return {name: opened[path] for name, path in files.items()}

    def _grouped(self, renamings: Sequence[Any]) -> Dict[str, List[Tuple[str, Optional[str]]]]:
        """The tensors in the files, with the pattern of the rule that converts them, by the first that they become."""
        known = self._root.state_dict()
        rename, prefix = self._core.rename_source_key, self._root.base_model_prefix
        found: Dict[str, List[Tuple[str, Optional[str]]]] = {}
        for key in sorted(self._files, key=self._core.dot_natural_key):
            name, pattern = rename(key, renamings, self._converters, prefix, known)
            if name not in known and key in known:
                name, pattern = rename(key, [], [], prefix, known)
            if name in known:
                found.setdefault(name, []).append((key, pattern))
        return found

    def _targets(self, first: str, sources: Sequence[Tuple[str, Optional[str]]]) -> Set[str]:
        """All tensors of the model that are made of these."""
        pattern = sources[0][1]
        ends = [""] if pattern is None else self._rule(pattern).target_patterns
        return {self._prefix + first.replace(ends[0], end) for end in ends}

    def _rule(self, pattern: str) -> Any:
        return next(one for one in reversed(self._converters) if pattern in one.source_patterns)

    def _converted(self, first: str, sources: Sequence[Tuple[str, Optional[str]]]) -> Dict[str, Tensor]:
        """The tensors that are made of these."""
        key, pattern = sources[0]
        rule = self._core.WeightRenaming(key, first) if pattern is None else deepcopy(self._rule(pattern))
        for key, pattern in sources:
            rule.add_tensor(first, key, key if pattern is None else pattern, partial(self._read, key))
        try:
            made = rule.convert(first, model=self._root, config=self._root.config)
        except Exception as error:
            told = ", ".join(key for key, _ in sources[:3]) + (", …" if len(sources) > 3 else "")
            raise EngineError(f"{self._folder}: cannot make {first} of {told}: {error}") from error
        return {self._prefix + name: one[0] if isinstance(one, list) else one for name, one in made.items()}

    def _read(self, key: str) -> Tensor:
        found: Tensor = self._files[key].get_tensor(key)
        return found.float() if found.is_floating_point() else found


def save(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Makes `folder`, which from_pretrained loads, of a model on the device meta and its weights in fp32.

    Raises:
        EngineError: transformers has no class for it, a weight is missing or has another shape, or `folder` cannot be
            written.
    """
    root, prefix = base_of(model)
    if prefix:
        raise EngineError(
            f"transformers has no causal model of a {root.config.model_type}: its head is tdpp's, and from_pretrained "
            "would load the model without it"
        )
    try:
        root.load_state_dict(dict(tensors), strict=False, assign=True)
        root.tie_weights()
    except RuntimeError as error:
        raise EngineError(f"the checkpoint has other weights than {type(root).__name__}: {error}") from error
    lacking = [name for name, one in root.state_dict().items() if one.is_meta]
    if lacking:
        raise EngineError(f"the checkpoint has no {lacking[0]}, which {type(root).__name__} needs")
    root.config.use_cache = True  # as it is for whoever generates; training has set it to False
    import_module("transformers.utils.logging").disable_progress_bar()  # which would stand in the command's output
    try:
        root.save_pretrained(folder)
    except OSError as error:
        raise EngineError(f"{folder}: cannot be written: {error}") from error


def save_adapters(tensors: Dict[str, Tensor], config: Mapping[str, Any], folder: Path) -> None:
    """Writes what peft loads: the adapters, and what they are."""
    import_module("safetensors.torch").save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def base_of(model: nn.Module) -> Tuple[Any, str]:
    """The model that transformers knows, and what its names begin with here."""
    return (model.model, "model.") if isinstance(model, Headed) else (model, "")
