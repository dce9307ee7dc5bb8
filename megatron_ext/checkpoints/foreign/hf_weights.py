"""A model in Hugging Face's layout of GPT-2, Llama, Mistral, Mixtral, Qwen 2 or 3, or StableLM. What it is needs no
torch."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Callable, Dict, Mapping, Optional, Tuple

from megatron_ext.checkpoints.foreign import hf_gpt2, hf_llama
from megatron_ext.checkpoints.header import Entry, part_names, read_header
from megatron_ext.checkpoints.published import WHOLE, chosen, tensors_of
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import read_json, why
from megatron_ext.contract.models.counts import checkpoint_parameter
from megatron_ext.contract.models.model import OPTIONS, ModelConfig
from megatron_ext.data.indexed_dataset import replacing
from megatron_ext.families.gpt import GEMMAS, STABLELM

if TYPE_CHECKING:
    from torch import Tensor

_KINDS = {
    "gpt2": hf_gpt2,
    **dict.fromkeys(("llama", "mistral", hf_llama.MIXTRAL, "qwen2", "qwen3", STABLELM, *GEMMAS), hf_llama),
}
"""How tensors are called, for each `model_type` of config.json."""
FAMILIES = (hf_gpt2, hf_llama)


def described(
    path: Path, tensors: Mapping[str, Any], heads: Optional[int] = None, sequence_length: Optional[int] = None
) -> Tuple[ModuleType, Mapping[str, Any], ModelConfig]:
    """How a model's tensors are called, these by the names without a prefix, and the model.

    `tensors` are those of `path`, or what has their `shape`; beside it there may be a config.json. `heads` is needed
    for GPT-2's file without one; `sequence_length` is a Llama's, if not the longest.

    Raises:
        EngineError: it is not a model that is computed here, or its tensors do not fit its config.json.
    """
    config = _config(path.parent / "config.json")
    kind = config.get("model_type") if config else "gpt2"
    if kind not in _KINDS:
        expected = " or ".join(map(repr, sorted(_KINDS)))
        raise EngineError(f"{path.parent / 'config.json'}: expected model_type={expected}, found {kind!r}")
    if _KINDS[kind] is hf_llama:
        return hf_llama, tensors, hf_llama.model_of(path, config, sequence_length)
    found = hf_gpt2.without_prefix(path, tensors)
    return hf_gpt2, found, hf_gpt2.model_of(path, found, config, heads)


def _config(path: Path) -> Dict[str, Any]:
    """A config.json; empty if there is none."""
    if not path.is_file():
        return {}
    config = read_json(path, EngineError)
    if not isinstance(config, dict):
        raise EngineError(f"{path}: expected a JSON object, found {type(config).__name__}")
    return config


class Weights:
    """The weights of a folder, of which tensors are read when they are asked for."""

    def __init__(self, folder: Path, heads: Optional[int], sequence_length: Optional[int]) -> None:
        """Reads the headers of all files; `heads` and `sequence_length` are as `described` takes them. Raises
        EngineError: there is no such model, or a tensor is not there or has another shape."""
        self._path = chosen(folder)
        files = tensors_of(folder)
        self._headers = headers = {file: read_header(file) for file in sorted(set(files.values()))}
        held = {name: _Held(file, headers[file].start, headers[file].entries[name]) for name, file in files.items()}
        self._family, found, self.model = described(self._path, held, heads, sequence_length)
        self._found: Mapping[str, _Held] = found
        for part in part_names(self.model.layers):
            for name, twin in self._family.twins(self.model, part).items():
                twin.require(self._path, found, checkpoint_parameter(self.model, part, name))

    def check_sums(self) -> None:
        """Reads all files that have a checksum, as those of tdpp have; raises EngineError if one is damaged."""
        from megatron_ext.checkpoints import safetensors

        for file, header in self._headers.items():
            safetensors.check_sum(file, header)

    def part(self, part: str) -> Dict[str, Tensor]:
        """The parameters of a part of a checkpoint of ours, in fp32; raises EngineError if a file cannot be read."""
        twins = self._family.twins(self.model, part)
        names = [name for twin in twins.values() for name in twin.names]
        if part == "head" and self._family is hf_gpt2 and "lm_head.weight" in self._found:
            hf_gpt2.require_tied(
                self._path, {name: self._found[name].read() for name in ("lm_head.weight", "wte.weight")}
            )
        tensors = {name: self._found[name].read() for name in names}
        return {
            name: twin.ours(self._path, tensors, checkpoint_parameter(self.model, part, name))
            for name, twin in twins.items()
        }


def save(out: Path, model: ModelConfig, content: Callable[[str], Dict[str, Tensor]]) -> None:
    """Writes what from_pretrained of transformers loads: a file if the name of `out` ends with .safetensors, else a
    folder with config.json too. `content` gives the weights of a part, in fp32.

    Raises:
        EngineError: there is no such model in transformers, a part is damaged, or `out` cannot be written.
    """
    from megatron_ext.checkpoints import safetensors

    family: Optional[ModuleType] = next((family for family in FAMILIES if family.fits(model)), None)
    if family is None:
        options = ", ".join(f"model.{key}={value}" for key, value in model.identity().items() if key in OPTIONS)
        raise EngineError(
            f"no GPT-2, Llama, Mistral, Mixtral, Qwen 2 or 3, StableLM or Gemma 2 or 3: {options}; only these are "
            f"exported"
        )
    prefix = hf_gpt2.PREFIX if family is hf_gpt2 else ""
    tensors: Dict[str, Tensor] = {}
    for part in part_names(model.layers):
        held = content(part)
        for name, twin in family.twins(model, part).items():
            pairs = twin.theirs(held[name], checkpoint_parameter(model, part, name))
            tensors.update({f"{prefix}{theirs}": each for theirs, each in pairs})
    as_file = out.suffix == ".safetensors"
    if not as_file:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngineError(f"{out}: cannot be written: {error}") from error
    safetensors.write(out if as_file else out / WHOLE, tensors, {"format": "pt"})
    if not as_file:
        with replacing(out / "config.json") as file:
            file.write((json.dumps(family.config_of(model), indent=2) + "\n").encode())


class _Held:
    """A tensor in a file."""

    def __init__(self, file: Path, start: int, entry: Entry) -> None:
        self._file, self._start, self._entry = file, start, entry
        self.shape = entry.shape

    def read(self) -> Tensor:
        import torch

        from megatron_ext.checkpoints.safetensors import DTYPES

        entry = self._entry
        content = bytearray(entry.end - entry.begin)
        try:
            with self._file.open("rb") as file:
                file.seek(self._start + entry.begin)
                filled = file.readinto(content)
        except (OSError, MemoryError) as error:
            raise EngineError(f"{self._file}: cannot be read: {why(error)}") from error
        if filled != len(content):
            raise EngineError(f"{self._file}: ends within a tensor")
        return torch.frombuffer(content, dtype=DTYPES[entry.dtype]).view(entry.shape)
