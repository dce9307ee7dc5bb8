"""From YAML files and overrides to an `Experiment`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_type_hints

from conf.blocks_of_module import count_blocks
from conf.composition_cache import ROOT, kept, kept_parts
from conf.engine_choice import with_engine
from conf.errors import CompositionError, ConfigError, reworded
from conf.foreign_files import expanded
from conf.plain import Plain, filled
from conf.reading.own_folders import groups
from conf.reading.user_files import Words, found_files
from conf.reading.words import check_words, refuse_options
from conf.run_folder.run_files import unreadable
from conf.schema.model import Model
from conf.schema.train import LENGTHS
from conf.schema.values.ranges import MOST_LAYERS
from megatron_ext.contract.models.hf_config import HfConfigError
from megatron_ext.contract.models.images import counted_blocks
from megatron_ext.contract.models.keys import DEPTHS
from megatron_ext.contract.models.model import SIZES, Family, ModelConfig, family_named, family_names

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from conf.schema.experiment import Experiment

T = TypeVar("T")
_LACKING = re.compile(r"Missing mandatory value: (?P<key>[\w.]+)")
"""What OmegaConf says of a reference to a value that is not set."""
FROM_FILE = ("layers", "hidden", "heads", "sequence_length", "vocab_size")
"""Sizes that the file of `model.config` sets."""
_REFERENCE = re.compile(r"(\\*)\$\{")


def to_experiment(cfg: DictConfig, words: Sequence[str] | None = None) -> Experiment:
    """The composed configuration as one checked, frozen object; `words` are those that Hydra has composed it of. Raises
    ConfigError: a key is unknown, a value is missing, an interpolation leads nowhere, or a rule is broken."""
    from conf.schema.experiment import Experiment  # parts of it are searched without all its rules

    known = with_known_keys(cfg, words)
    with _values_named():
        count_blocks(known)
    experiment, _ = with_engine(known, lambda one: (to_object(one, Experiment), None))
    return experiment


def to_object(cfg: DictConfig | Plain, kind: type[T], part: str | None = None) -> T:
    """A configuration, or a `part` of it, as one checked, frozen object. Raises ConfigError: a value is missing, an
    interpolation leads nowhere, or a rule is broken."""
    if isinstance(cfg, Plain):
        return filled(kind, cfg if part is None else cfg[part])
    from omegaconf import OmegaConf

    from conf.reading.yaml_lines import require_shapes

    with _values_named():
        node = cfg if part is None else cfg[part]
        require_shapes(node, kind, part or "")
        made = OmegaConf.to_object(node)
    assert isinstance(made, kind)
    return made


@contextmanager
def _values_named() -> Iterator[None]:
    """Raises ConfigError, with the key, for a value that is missing or refers to nothing."""
    try:
        yield
    except Exception as error:
        if (said := _without_value(error)) is None:
            raise
        raise ConfigError(said) from error


def _without_value(error: Exception) -> str | None:
    from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue

    if isinstance(error, MissingMandatoryValue):
        return _not_set(str(error.full_key))
    if not isinstance(error, InterpolationResolutionError):
        return None
    if (lacking := _LACKING.search(str(error))) is not None:
        return _not_set(lacking["key"])
    key, cause = error.full_key, str(error).splitlines()[0]
    return f"{key} cannot be resolved: {cause}; give {key}=…"


def _not_set(key: str) -> str:
    return f"{key} is not set: give {key}=…, or choose a file that sets it"


def with_known_keys(cfg: DictConfig, words: Sequence[str] | None) -> DictConfig:
    """The same, all keys of which the schema has, and one length of the training where it is composed of `words`. The
    one given is not to be used any more.

    Hydra's `+key=value` adds a key to any class; a merge of plain values tells that the class has none such, but takes
    ten times as long as a look at what Hydra has merged into the schema already.

    Raises:
        ConfigError: a key is unknown.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigKeyError

    from conf.reading.yaml_lines import is_of
    from conf.schema.experiment import Experiment

    if is_of(cfg, Experiment):
        known = cfg
        OmegaConf.set_struct(known, None)
    else:
        try:
            merged = OmegaConf.unsafe_merge(OmegaConf.structured(Experiment), OmegaConf.to_container(cfg))
        except ConfigKeyError as error:
            from conf.hydra_errors import unknown_key  # imports Hydra

            raise ConfigError(unknown_key(str(error.full_key))) from error
        known = cast("DictConfig", merged)
    if words is not None and not OmegaConf.is_missing(known, "train"):
        with _values_named():
            choose_length(known.train, words)
    if not OmegaConf.is_missing(known, "model"):
        with _values_named():
            fill_sizes(known.model)
    return known


def read_experiment(config: Path) -> Experiment:
    """The experiment of a run's config.yaml.

    Raises:
        ConfigError: as `to_experiment`, for example because it is of another version of tdpp.
        RunFolderError: it cannot be read.
    """
    from omegaconf.errors import OmegaConfBaseException

    from conf.reading.yaml_file import fault, load_frozen
    from conf.schema.experiment import Experiment

    try:
        loaded = load_frozen(config, Experiment)
        _require_groups(loaded)
        return to_experiment(loaded)
    except ConfigError as error:
        raise ConfigError(f"{config}: {error}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{config}: {fault(error)}") from error
    except OSError as error:
        raise unreadable(config, error) from error


def _require_groups(cfg: DictConfig) -> None:
    """Raises ConfigError for a value in the place of a group of keys, whose key OmegaConf would not name."""
    from omegaconf import DictConfig

    from conf.schema.experiment import Experiment

    for key, hint in get_type_hints(Experiment).items():
        if is_dataclass(hint) and key in cfg and not isinstance(cfg[key], DictConfig):
            raise ConfigError(f"{key}={cfg[key]} must be a group of keys")


def config_text(experiment: Experiment) -> str:
    """What `read_experiment` reads: YAML, in which a `${` of a value stands for itself and refers to nothing."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(_literal(asdict(experiment))))


def _literal(value: Any) -> Any:
    """With the escapes of OmegaConf, for which backslashes have a meaning before `${` only."""
    if isinstance(value, dict):
        return {key: _literal(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_literal(part) for part in value]
    if isinstance(value, str) and not isinstance(value, Enum):
        return _REFERENCE.sub(r"\1\1\\${", str(value))  # OmegaConf takes no subclass of str but enumerations
    return value


def compose(words: Sequence[str] = ()) -> Experiment:
    """The experiment that `tdpp launch <words>` runs. Raises ConfigError: as `to_experiment`; a word cannot be read, or
    names no key or file."""
    return to_experiment(_composed(words), words)


def compose_unchecked(words: Sequence[str] = ()) -> DictConfig:
    """The same before any rule is checked: what a search for a plan reads, since its parts need not fit together yet.
    Raises ConfigError: a word cannot be read, or names no key or file."""
    return with_known_keys(_composed(words), words)


def compose_parts(words: Sequence[str], parts: Sequence[str]) -> DictConfig | Plain:
    """The same, of which only some parts are asked for: plain values of these, if they were composed before and are
    whole."""
    with _command_line_of_one(words) as found:
        values = kept_parts([ROOT, *found.overrides], found.folders, parts)
    if values is None:
        return compose_unchecked(words)
    if "train" in values:
        choose_length(values.train, words)
    return values


@contextmanager
def _command_line_of_one(words: Sequence[str]) -> Iterator[Words]:
    with command_line_as_given(words) as found:
        refuse_options(found.overrides)
        if of_sweeper := [word for word in found.overrides if re.match(r"[+~]*hydra[./]", word)]:
            raise ConfigError(f"{' '.join(of_sweeper)}: only 'tdpp launch' takes this option")
        yield found


def _composed(words: Sequence[str]) -> DictConfig:
    with _command_line_of_one(words) as found:
        return kept([ROOT, *found.overrides], found.folders, partial(_by_hydra, found))


def _by_hydra(found: Words) -> tuple[DictConfig, Mapping[Path, str]]:
    from conf.hydra_files import composed  # imports Hydra

    return composed(ROOT, with_texts(found).all)


@contextmanager
def command_line(words: Sequence[str]) -> Iterator[Words]:
    """The words of a command line, which Hydra may read while this lasts. Raises ConfigError: it cannot compose
    them."""
    with command_line_as_given(words) as found:
        yield with_texts(found)


@contextmanager
def command_line_as_given(words: Sequence[str]) -> Iterator[Words]:
    """The same, but for quotes around texts, without which Hydra may misread them (`with_texts`)."""
    check_words(words)
    words, notes = expanded(words, _model_of)
    with found_files(words) as found:
        try:
            yield replace(found, notes=tuple(notes))
        except Exception as error:
            from conf.hydra_errors import COMPOSING, message  # imports Hydra

            if not isinstance(error, COMPOSING):
                raise
            raise CompositionError(message(error, with_texts(found))) from error


def with_texts(found: Words) -> Words:
    """The same with quotes around what Hydra would take for a number, though its key holds text."""
    from conf.reading.word_texts import quote_texts  # imports Hydra
    from conf.schema.experiment import Experiment

    quoted = [quote_texts(word, Experiment, groups()) for word in found.overrides]
    texts = {shown: text for _, of_word in quoted for shown, text in of_word.items()}
    return replace(found, overrides=tuple(word for word, _ in quoted), given={**found.given, **texts})


def _model_of(words: Sequence[str]) -> Model:
    """What words of the group `model` choose. Raises ConfigError: they cannot be read, or the model breaks a rule of
    its own."""
    return to_object(compose_unchecked(words), Model, "model")


def choose_length(train: Any, words: Sequence[str]) -> None:
    """Takes that of the command line in the place of what files give, among the keys of `train`. Raises ConfigError:
    one place gives two."""
    if train is None:
        return
    named = {word.partition("=")[0].lstrip("+") for word in words}
    on_line = [key for key in LENGTHS if f"train.{key}" in named and _given(train, key)]
    for key in LENGTHS if on_line else ():
        if key not in on_line:
            train[key] = None
    given = [key for key in LENGTHS if _given(train, key)]
    if len(given) > 1:
        values = " and ".join(f"train.{key}={train[key]}" for key in given)
        rest = " ".join(f"train.{key}=null" for key in given[:-1])
        raise ConfigError(
            f"{values} {'both' if len(given) == 2 else 'all'} set the length of the training; give one of them, or if "
            f"a file sets the other, add {rest}"
        )


def _given(train: Any, key: str) -> bool:
    return train.get(key) is not None


def fill_sizes(model: DictConfig) -> None:
    """Sets sizes that the model's family does not have to 0, and `layers` where its blocks follow from other keys.

    Only what has no value yet; what is wrong with the other keys is for the schema to say.
    """
    from omegaconf import OmegaConf

    name = str(model.get("family")).removeprefix("Family.")
    if name not in family_names():
        return
    family = family_named(name)
    for key in family.lacks:
        if OmegaConf.is_missing(model, key):
            model[key] = 0
    if family.needs == ("config",):
        _fill_from_file(family, model)
    if family.counts_all and not family.user_code and OmegaConf.is_missing(model, "layers"):
        model.layers = _count(family, model)


def _fill_from_file(family: Family, model: DictConfig) -> None:
    """Raises ConfigError if no file is given, or it cannot be read, or lacks a size that nothing else gives."""
    from omegaconf import OmegaConf

    lacking = [key for key in FROM_FILE if OmegaConf.is_missing(model, key)]
    if not lacking:
        return
    if model.get("config") is None:
        raise ConfigError(
            f"model.config is not set, but model.family={family.name} needs it; give model.config=… a config.json, or "
            "the folder of a model"
        )
    with reworded(ConfigError, f"model.config={model.config}: ", of=HfConfigError):
        found = family.sizes_of(str(model.config))
    for key in lacking:
        if key not in found:
            raise ConfigError(
                f"model.{key} is not set, and model.config={model.config} has no key for it; give model.{key}=…, or "
                "the config.json of a causal model of transformers"
            )
        model[key] = found[key]


def _count(family: Family, model: DictConfig) -> int:
    """Its blocks; 1 where they cannot be counted, for a key is missing or wrong."""
    keys = (*family.needs, "channels", "width")
    depths = str(model.depths or "1")
    if any(model.get(key) is None for key in keys) or not re.fullmatch(DEPTHS, depths):
        return 1
    if sum(map(int, depths.split("-"))) > MOST_LAYERS:
        return 1
    sizes: dict[str, Any] = dict.fromkeys(("layers", *SIZES), 0)
    return len(counted_blocks(ModelConfig(family=family.name, **sizes, **{key: model[key] for key in keys})))
