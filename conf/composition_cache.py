"""What Hydra has composed and what files say, from the user's cache: a fifth of the time, and neither Hydra nor, for
plain values, OmegaConf is even imported.

An entry is found by what decides where Hydra looks: the words, the folders, the code and its libraries. It counts only
if every file and folder that Hydra looked up is what it was then; contents are compared, not times.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from conf.plain import Plain, filled
from conf.reading.files import PREFIX
from conf.reading.own_folders import SHIPPED
from megatron_ext.contract.files import read_regular, user_cache, write_atomic

if TYPE_CHECKING:
    from omegaconf import DictConfig

T = TypeVar("T")

ROOT = "config"
"""The name of the config that all others are merged into, which has references of Hydra's own alone."""
VARIES = "varies"
"""The state of a file whose meaning may change though its content does not."""
_ABSENT, _FOLDER = "absent", "folder"
_RESOLVER = re.compile(r"\$\{[^{}]*:")
"""`${oc.env:HOME}` and its like: Hydra may ask the machine while it composes."""
_MOST_ENTRIES = 512
_LIBRARIES = ("hydra", "omegaconf")
_CODE = tuple(SHIPPED.parent / name for name in ("conf", "megatron_ext/contract", "fasop/costs/profiles"))
"""Whose classes the schema and profiles are made of, and which reads the files."""
_DAMAGED = (OSError, ValueError, KeyError, TypeError, RecursionError)
"""What an entry raises that is none."""


def state_of(path: Path) -> str:
    """What is at a path: the SHA-256 of a file, or that it is a folder, or nothing that can be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except IsADirectoryError:
        return _FOLDER
    except (OSError, ValueError):
        return _ABSENT


def asks_the_machine(text: str) -> bool:
    """Whether a file or a word has a reference that only the machine or the moment can answer."""
    return _RESOLVER.search(text) is not None


Make = Callable[[], tuple["DictConfig", Mapping[Path, str]]]
"""Returns a configuration, and the paths that Hydra looked up for it in their states before."""


def kept(words: Sequence[str], folders: Sequence[Path], make: Make) -> DictConfig:
    """The configuration that `make` returns; from the cache where it is there.

    `words` and `folders` are all that it depends on but for these paths and the code. A cache that cannot be read or
    written only costs time.
    """
    entry = _entry_of(words, folders)
    if (known := _known(entry)) is not None and (built := _built(known)) is not None:
        return built
    made, looked_up = make()
    if entry is not None:
        _keep(entry, made, looked_up)
    return made


def kept_values(words: Sequence[str], folders: Sequence[Path], make: Make) -> dict[str, Any]:
    """The same as plain values, with enumerations by name."""
    if (known := _known(_entry_of(words, folders))) is not None:
        return known["values"]
    from omegaconf import OmegaConf

    made: Any = OmegaConf.to_container(kept(words, folders, make), enum_to_str=True)
    assert isinstance(made, dict)
    return made


def kept_parts(words: Sequence[str], folders: Sequence[Path], parts: Sequence[str]) -> Plain | None:
    """Parts of the configuration that `kept` has for these, if it is an `Experiment`, and no value of them is missing
    or refers to another one; else None."""
    known = _known(_entry_of(words, folders))
    if known is None or not known["structured"]:
        return None
    found = {part: known["values"].get(part) for part in parts}
    text = json.dumps(found)
    if "${" in text or "???" in text or not all(isinstance(part, dict) for part in found.values()):
        return None
    return Plain({part: Plain(values) for part, values in found.items()})


def kept_object(kind: type[T], path: Path, make: Callable[[], T]) -> T:
    """What `make` returns, a frozen object of a class of the schema, which depends on the content of a file alone; one
    whose values refer to others, such as those of the environment, is made each time."""
    try:
        content = read_regular(path)
    except (OSError, ValueError):
        return make()
    state = hashlib.sha256(content).hexdigest()
    entry = None if b"${" in content else _entry_of([kind.__qualname__, state], [])
    if (known := _known(entry)) is not None:
        return filled(kind, known["values"])
    made = make()
    assert is_dataclass(made) and not isinstance(made, type)
    with suppress(*_DAMAGED):
        values = json.loads(json.dumps(asdict(made)))
        if entry is not None and filled(kind, values) == made and state_of(path) == state:
            _write(entry, {"values": values, "looked_up": []})
    return made


def _entry_of(words: Sequence[str], folders: Sequence[Path]) -> Path | None:
    """Where it is kept; None if it may not be."""
    folder = user_cache() / "composed"
    passing = any(path.name.startswith(PREFIX) for path in folders)
    if passing or not folder.is_absolute() or any(map(asks_the_machine, words)):
        return None
    return folder / f"{_key(words, folders)}.json"


def _known(entry: Path | None) -> dict[str, Any] | None:
    """What an entry holds, if it counts."""
    if entry is None:
        return None
    with suppress(*_DAMAGED):
        known: dict[str, Any] = json.loads(entry.read_text(encoding="utf-8"))
        if known["digest"] == _digest(known) and _unchanged({Path(path): state for path, state in known["looked_up"]}):
            return known
    return None


def _keep(entry: Path, made: DictConfig, looked_up: Mapping[Path, str]) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from conf.schema.experiment import Experiment

    with suppress(*_DAMAGED, OmegaConfBaseException):  # of values that are not JSON's
        known = {
            "structured": made._metadata.object_type is Experiment,
            "struct": made._get_node_flag("struct"),
            "values": OmegaConf.to_container(made, enum_to_str=True),
            "looked_up": [(str(path), state) for path, state in looked_up.items()],
        }
        again = _built(json.loads(json.dumps(known)))
        same = again is not None and [*_nodes(again)] == [*_nodes(made)]
        if same and _unchanged(looked_up):  # since Hydra read them, too
            _write(entry, known)


def _digest(known: Mapping[str, Any]) -> str:
    text = json.dumps({key: value for key, value in known.items() if key != "digest"})
    return hashlib.sha256(text.encode()).hexdigest()


def _built(known: Mapping[str, Any]) -> DictConfig | None:
    """The configuration of these values; None if they are none."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from conf.schema.experiment import Experiment

    with suppress(*_DAMAGED, OmegaConfBaseException):
        built: Any = OmegaConf.create(known["values"])
        if known["structured"]:
            built = OmegaConf.unsafe_merge(OmegaConf.structured(Experiment), built)
        OmegaConf.set_struct(built, known["struct"])
        assert isinstance(built, DictConfig)
        return built
    return None


def _nodes(node: Any, key: object = None) -> Iterator[tuple[object, ...]]:
    """All that a configuration consists of, node by node."""
    from omegaconf import Container

    about, content = node._metadata, node._content if isinstance(node, Container) else node._value()
    inner = content if isinstance(content, dict | list) else None
    yield key, type(node), content if inner is None else len(inner), about.ref_type, about.object_type
    yield about.optional, about.flags or None
    if inner is not None:
        for name, value in inner.items() if isinstance(inner, dict) else enumerate(inner):
            yield from _nodes(value, name)


def _unchanged(looked_up: Mapping[Path, str]) -> bool:
    return all(state_of(path) == state for path, state in looked_up.items())


def _key(words: Sequence[str], folders: Sequence[Path]) -> str:
    everything = (sys.version, list(words), [str(folder.absolute()) for folder in folders], _stamps())
    return hashlib.sha256(repr(everything).encode("utf-8", "surrogateescape")).hexdigest()


@cache
def _stamps() -> list[tuple[str, int, int]]:
    """Paths, times and sizes of the code, which is what this process has read."""
    libraries = [Path(spec.origin) for name in _LIBRARIES if (spec := find_spec(name)) and spec.origin]
    return [(str(path), found.st_mtime_ns, found.st_size) for path, found in _stats([*_sources(), *libraries])]


def _sources() -> Iterator[Path]:
    for root in _CODE:
        for folder, _, files in sorted(os.walk(root)):
            yield from (Path(folder, file) for file in sorted(files) if file.endswith(".py"))


def _stats(paths: Sequence[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    for path in paths:
        with suppress(FileNotFoundError):
            yield path, path.stat()


def _write(entry: Path, known: Mapping[str, Any]) -> None:
    entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(entry, json.dumps({**known, "digest": _digest(known)}), durable=False, mode=0o600)
    entries = [Path(one) for one in os.scandir(entry.parent)]
    if len(entries) > _MOST_ENTRIES:
        for path, _ in sorted(_stats(entries), key=lambda one: one[1].st_mtime)[: _MOST_ENTRIES // 4]:
            path.unlink(missing_ok=True)
