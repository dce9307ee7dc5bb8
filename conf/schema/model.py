"""The model that is trained."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from enum import StrEnum
from functools import cached_property, lru_cache, partial
from typing import Any

from conf.errors import ConfigError
from conf.schema.values import ranges
from conf.schema.values.ranges import MISSING, config, divides
from conf.visible import plural
from megatron_ext.contract.keys import Range, option, shown
from megatron_ext.contract.models import keys
from megatron_ext.contract.models.counts import parameter_count
from megatron_ext.contract.models.images import ImageFamily, counted_blocks, depths_of
from megatron_ext.contract.models.keys import DEFAULT, DEPTHS
from megatron_ext.contract.models.model import OPTIONS, SIZES, ModelConfig, family_named, family_names
from megatron_ext.contract.models.model import Family as Traits
from megatron_ext.contract.rules.training import broken_by_model

MOST_BLOCKS = 10_000
"""Blocks of a module, at most."""


class Family(StrEnum):
    """What a model is made of, and what it learns (docs/models.md)."""

    _ignore_ = "name_"
    for name_ in family_names():
        vars()[name_] = name_

    @property
    def summary(self) -> str:
        """A sentence about it."""
        return family_named(self).summary


@config
class Model(keys.Model):
    """A transformer, whose options have Megatron-LM's names and begin as GPT-2's, or a module of your own."""

    name: str = MISSING
    """The name of the model on pages and in messages."""
    family: Family = Family(DEFAULT)
    layers: int = MISSING
    hidden: int = MISSING
    heads: int = MISSING
    sequence_length: int = MISSING
    vocab_size: int = MISSING
    vocab_multiple: int = option(128, Range(1, 2**20))
    """The embedding has vocab_size rounded up to a multiple of this times the tensor size, as in Megatron."""

    def __post_init__(self) -> None:
        family = self.traits
        if family.user_code:
            _check_module(self)
        else:
            ranges.check("model", self, without=family.lacks)
        for broken in broken_by_model(partial(getattr, self), family):
            raise ConfigError(broken)
        if isinstance(family, ImageFamily):
            _check_images(self, family)
        if family.counts_all:
            return
        if self.kv_channels is None and self.config is None:
            divides("model.heads", self.heads, "model.hidden", self.hidden)
        if self.num_query_groups is not None:
            divides("model.num_query_groups", self.num_query_groups, "model.heads", self.heads)

    def __hash__(self) -> int:
        """Hash its fields once: a search asks what it knows of a model thousands of times."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, one.name) for one in fields(self)))

    @property
    def traits(self) -> Traits:
        """The description of its family."""
        return family_named(self.family)

    def padded_vocab(self, tensor: int) -> int:
        multiple = self.vocab_multiple * tensor
        return -(-self.vocab_size // multiple) * multiple

    def sized(self, tensor: int) -> ModelConfig:
        """What the engine is given, with the vocabulary padded for this tensor size."""
        of_files = self.code is not None or self.config is not None  # whose paths depend on the working directory
        return self.newly_sized(tensor) if of_files else _sized(self, tensor)

    def newly_sized(self, tensor: int) -> ModelConfig:
        """Do as `sized`, which keeps what this returns."""
        options: dict[str, Any] = {key: getattr(self, key, default) for key, default in OPTIONS.items()}
        if self.code is not None:
            options["code"] = ":".join((os.path.abspath(self.code_file), self.code.rpartition(":")[2]))  # noqa: PTH100
        if self.config is not None:
            options["config"] = os.path.abspath(self.config)  # noqa: PTH100
        options["family"] = str(self.family)
        return ModelConfig(
            **{key: getattr(self, key) for key in ("layers", "hidden", "heads", "sequence_length", "vocab_size")},
            padded_vocab_size=self.padded_vocab(tensor) if self.vocab_size else 0,
            **options,
        )

    @property
    def code_file(self) -> str:
        """The path in `code`."""
        return (self.code or "").rpartition(":")[0]

    @property
    def code_name(self) -> str:
        """`code` without folders; of another measured family, its name, and its tokens where a file has the rest."""
        if self.config is not None:  # whose file says nothing of the length that was measured
            return f"{self.family} with {self.sequence_length} tokens"
        if self.code is None:
            return str(self.family)
        return ":".join((os.path.basename(self.code_file), (self.code or "").rpartition(":")[2]))  # noqa: PTH119

    def block_names(self) -> list[str]:
        """List the names of the blocks of a model of images that a partition counts."""
        return counted_blocks(self.sized(1))

    @property
    def measured(self) -> bool:
        """Whether what a block takes is known from profiles alone."""
        return self.traits.measured

    @property
    def attends(self) -> bool:
        """Whether anything is known of attention in it, of which a part could be computed again."""
        return self.traits.attends

    @property
    def said(self) -> str:
        """What is trained, as a user says it."""
        return f"model={self.name}" if self.code is None else f"model.code={self.code}"

    @property
    def counted(self) -> int:
        """Blocks that a partition counts: the layers, of t5 the encoder's and the decoder's."""
        return self.sized(1).counted

    @property
    def blocks(self) -> str:
        """The keys whose values add up to `counted`, in words."""
        if self.traits.user_code:
            return f"model.code={self.code} has {plural(self.layers, 'block')}"
        if self.traits.counts_all:
            return f"model={self.name} has {self.layers} blocks"
        if not self.traits.decoder:
            return f"model.layers={self.layers}"
        decoder = self.counted - self.layers
        return f"model.layers={self.layers} + model.decoder_layers={decoder} = {self.counted}"

    def parameters(self) -> int:
        """Weights of the model without vocabulary padding; a tied embedding counts once."""
        return parameter_count(self.sized(1))


@lru_cache(maxsize=1024)
def _sized(model: Model, tensor: int) -> ModelConfig:
    return model.newly_sized(tensor)


def check_code(code: str | None) -> None:
    """Raises ConfigError for a `model.code` that names nothing in a Python file."""
    if code is None or not re.fullmatch(r"[^\0]+\.py:[A-Za-z_][A-Za-z0-9_]*", code):
        raise ConfigError(
            f"model.code={shown(code)} must be FILE.py:NAME, a Python file and the name of what "
            f"to train in it, such as my.py:Net; docs/your-model.md shows one"
        )


def _check_module(model: Model) -> None:
    check_code(model.code)
    for key in SIZES:
        if getattr(model, key, 0):
            raise ConfigError(
                f"model.{key}={getattr(model, key)} does not apply to model.family=module, whose code sets its sizes; "
                f"leave it out"
            )
    if not 1 <= model.layers <= MOST_BLOCKS:
        raise ConfigError(
            f"model.layers={model.layers} must be the number of blocks in model.code={model.code}, from 1 to "
            f"{MOST_BLOCKS}; leave it out to have them counted"
        )


def _check_images(model: Model, family: ImageFamily) -> None:
    for key in family.lacks:
        if getattr(model, key, 0):
            raise ConfigError(
                f"model.{key}={getattr(model, key)} does not apply to model.family={model.family}; leave it out"
            )
    if model.depths is not None and (
        not re.fullmatch(DEPTHS, model.depths) or sum(depths_of(model.sized(1))) > ranges.MOST_LAYERS
    ):
        raise ConfigError(
            f"model.depths={model.depths} must be the blocks of one to five stages, each at least 1 and together "
            f"at most {ranges.MOST_LAYERS}, such as 3-4-6-3"
        )
    if model.patch_size is not None and model.image_size is not None:
        divides("model.patch_size", model.patch_size, "model.image_size", model.image_size)
    least = family.smallest_image(model.sized(1))
    if model.image_size is not None and model.image_size < least:
        raise ConfigError(
            f"model.image_size={model.image_size} is too small for model.family={model.family}: its "
            f"{family.what_shrinks} would leave nothing of the image; use at least {least}"
        )
    if family.counts_all and model.layers != (count := len(model.block_names())):
        raise ConfigError(
            f"model.layers={model.layers} must be the number of blocks of model.family={model.family}, {count}; leave "
            f"it out to have them counted"
        )
