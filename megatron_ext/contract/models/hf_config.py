"""Hugging Face's config.json, for the families that read it (`Family.from_hf`).

What maps is taken, what would be another model is refused. Differences that leave the sizes as they are, and that the
families here have of their own accord (Megatron-LM's BERT has its norms in front), are notes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

from megatron_ext.contract.errors import EngineError

OLDEST = 5
"""The oldest major version of transformers whose models can be trained as they are."""
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")
_MISSING = object()


def config_file(config: str) -> str:
    """The file that `model.config` names: itself, or the config.json in its folder."""
    return str(Path(config) / "config.json") if Path(config).is_dir() else config


class HfConfigError(EngineError):
    """A config.json of what is no model here."""


class AnotherModelError(HfConfigError):
    """A config.json that is sound, of a model that a family here computes differently."""


@dataclass
class HfConfig:
    """The file's content. Whoever reads a key says what it may be."""

    path: str
    content: Mapping[str, Any]
    sequence_length: Optional[int] = None
    """How long sequences shall be; None: as long as the model knows."""
    notes: List[str] = field(default_factory=list)
    """Differences that leave the sizes as they are."""

    @property
    def kind(self) -> str:
        """The file's `model_type`."""
        return str(self.content["model_type"])

    def refuse(self, key: str, value: object, why: str) -> HfConfigError:
        return HfConfigError(f"{self.path}: {key}={json.dumps(value, default=str)}: {why}")

    def differs(self, key: str, value: object, why: str) -> HfConfigError:
        """Refuse, as `refuse` does, a value that makes another model than the family's."""
        return AnotherModelError(str(self.refuse(key, value, why)))

    def given(self, key: str, default: object = _MISSING) -> Any:
        value = self.content.get(key, default)
        if value is _MISSING:
            raise HfConfigError(f"{self.path}: {key} is missing; a {self.kind} needs it")
        return default if value is None and default is not _MISSING else value

    def size(self, key: str, default: object = _MISSING) -> int:
        value = self.given(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(key, value, "must be a whole number of at least 1")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.given(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.refuse(key, value, "must be a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.given(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, value, "must be true or false")
        return value

    def table(self, key: str) -> Mapping[str, Any]:
        """Empty where it is absent or null."""
        value = self.content.get(key) or {}
        if not isinstance(value, dict):
            raise self.refuse(key, value, "must be an object")
        return value

    def must(self, key: str, allowed: object, why: str) -> None:
        """Requires a value that may be absent, which stands for what is allowed. `allowed` may be a tuple of values."""
        values = allowed if isinstance(allowed, tuple) else (allowed,)
        value = self.content.get(key, values[0])
        if value not in values or isinstance(value, bool) != isinstance(values[0], bool):
            raise self.differs(key, value, f"{why}; only {' or '.join(map(json.dumps, values))} can be imported")

    def length(self, longest: int, bounded: bool = True) -> int:
        """Tokens of a sequence, of a model that knows so many positions, or any number where these are no bound."""
        if self.sequence_length is None:
            return longest
        if bounded and self.sequence_length > longest:
            raise HfConfigError(
                f"--sequence-length {self.sequence_length}: {self.path} has positions up to {longest}; give at most "
                f"that"
            )
        return self.sequence_length

    def encoder(self) -> Dict[str, object]:
        """What a BERT and a ViT call alike."""
        hidden = self.size("hidden_size", 768)
        inner = self.size("intermediate_size", 3072)
        return {
            "layers": self.size("num_hidden_layers", 12),
            "hidden": hidden,
            "heads": self.size("num_attention_heads", 12),
            **unless({"ffn_hidden": inner}, ffn_hidden=4 * hidden),
            "norm_epsilon": self.number("layer_norm_eps", 1e-12),
            **dropouts(self.number("hidden_dropout_prob", 0.1), self.number("attention_probs_dropout_prob", 0.1)),
        }

    def classes(self) -> int:
        labels = self.content.get("id2label")
        return len(labels) if isinstance(labels, dict) and labels else self.size("num_labels", 2)

    def untied(self, tied_by_default: bool) -> Dict[str, object]:
        tied = self.flag("tie_word_embeddings", tied_by_default)
        return {} if tied else {"untie_embeddings_and_output_weights": True}


def dropouts(hidden: float, attention: float) -> Dict[str, object]:
    found: Dict[str, object] = {"hidden_dropout": hidden, "attention_dropout": attention}
    return unless(found, hidden_dropout=0.0, attention_dropout=0.0)


def unless(values: Dict[str, object], **usual: object) -> Dict[str, object]:
    """Leaves out what the schema has by itself."""
    return {key: value for key, value in values.items() if value != usual[key]}
