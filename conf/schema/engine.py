"""What trains on the ranks."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import Any

from conf.errors import ConfigError
from conf.schema.values.ranges import config


class EngineKind(StrEnum):
    """What trains on the ranks."""

    tdpp = "tdpp"
    megatron_core = "megatron_core"
    """Megatron-Core's model, schedules and optimizer, with everything that tdpp has around them (docs/engines.md)."""
    megatron_lm = "megatron_lm"
    """A checkout's own script (docs/megatron-lm.md)."""
    auto = "auto"
    """The one of tdpp and megatron_core that can run the plan (docs/engines.md)."""


@config
class Engine:
    """What trains; all but `kind` and `options` is for Megatron-LM. Paths are as the ranks see them, for example in a
    container."""

    kind: EngineKind = EngineKind.tdpp
    checkout: str | None = None
    """Folder of a Megatron-LM checkout, with pretrain_gpt.py in it."""
    vocab_file: str | None = None
    """Vocabulary file of GPT-2's tokenizer, together with merge_file. Indexed data need no tokenizer; without these
    files Megatron-LM gets only the vocabulary size."""
    merge_file: str | None = None
    """Merge file of GPT-2's tokenizer, together with vocab_file."""
    options: dict[str, Any] = field(default_factory=dict)
    """For megatron_core: fields of its TransformerConfig that no key of tdpp sets, such as
    {moe_aux_loss_coeff: 0.02}."""
    arguments: list[str] = field(default_factory=list)
    """Further options of pretrain_gpt.py; they come last, so they override those that tdpp sets."""

    def __post_init__(self) -> None:
        given = [key for key in ("checkout", "vocab_file", "merge_file", "arguments") if getattr(self, key)]
        if self.options and self.kind not in (EngineKind.megatron_core, EngineKind.auto):
            name = next(iter(self.options))
            raise ConfigError(
                f"engine.options.{name} is for Megatron-Core, but engine.kind={self.kind}; use engine=megatron_core too"
            )
        for name, one in self.options.items():
            if any(isinstance(inner, (dict, list)) for inner in (one if isinstance(one, list) else [one])):
                raise ConfigError(
                    f"engine.options.{name}={one} must be a number, a text, true, false, null or a list of these"
                )
        if self.kind is not EngineKind.megatron_lm:
            if given:
                raise ConfigError(
                    f"engine.{given[0]} is for Megatron-LM, but engine.kind={self.kind}; use engine=megatron_lm too"
                )
            return
        if not self.checkout:
            raise ConfigError(
                "engine.kind=megatron_lm needs engine.checkout, the folder of Megatron-LM that has pretrain_gpt.py, as "
                "the ranks see it"
            )
        if (self.vocab_file is None) != (self.merge_file is None):
            raise ConfigError(
                f"engine.vocab_file={self.vocab_file} and engine.merge_file={self.merge_file} are the two files of one "
                "tokenizer: give both, or neither"
            )
