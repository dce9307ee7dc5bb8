"""What Hydra has composed before, from the user's cache: a fifth of the time, and Hydra is not even imported.

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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.reading.files import PREFIX
from conf.reading.own_folders import SHIPPED
from conf.schema.experiment import Experiment
from megatron_ext.contract.files import user_cache, write_atomic

VARIES = "varies"
"""The state of a file whose meaning may change though its content does not."""
_ABSENT, _FOLDER = "absent", "folder"
_RESOLVER = re.compile(r"\$\{[^{}]*:")
"""`${oc.env:HOME}` and its like: Hydra may ask the machine while it composes."""
_MOST_ENTRIES = 512
_LIBRARIES = ("hydra", "omegaconf")
_CODE = (SHIPPED, SHIPPED.parent / "megatron_ext" / "contract")
"""Whose classes the schema is made of, and which reads the files."""


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


Make = Callable[[], tuple[DictConfig, Mapping[Path, str]]]
"""Returns a configuration, and the paths that Hydra looked up for it in their states before."""


def kept(words: Sequence[str], folders: Sequence[Path], make: Make) -> DictConfig:
    """The configuration that `make` returns; from the cache where it is there.

    `words` and `folders` are all that it depends on but for these paths and the code. A cache that cannot be read or
    written only costs time.
    """
    folder = user_cache() / "composed"
    passing = any(path.name.startswith(PREFIX) for path in folders)
    if passing or not folder.is_absolute() or any(map(asks_the_machine, words)):
        return make()[0]
    entry = folder / f"{_key(words, folders)}.json"
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError, OmegaConfBaseException):  # a damaged one
        known = json.loads(entry.read_text(encoding="utf-8"))
        if known["digest"] == _digest(known) and _unchanged({Path(path): state for path, state in known["looked_up"]}):
            return _built(known)
    made, looked_up = make()
    with suppress(OSError, ValueError, TypeError, OmegaConfBaseException):  # of values that are not JSON's
        known = {
            "structured": made._metadata.object_type is Experiment,
            "struct": made._get_node_flag("struct"),
            "values": OmegaConf.to_container(made, enum_to_str=True),
            "looked_up": [(str(path), state) for path, state in looked_up.items()],
        }
        text = json.dumps({**known, "digest": _digest(known)})
        same = [*_nodes(_built(json.loads(text)))] == [*_nodes(made)]
        if same and _unchanged(looked_up):  # since Hydra read them, too
            _write(entry, text)
    return made


def _digest(known: Mapping[str, Any]) -> str:
    text = json.dumps({key: value for key, value in known.items() if key != "digest"})
    return hashlib.sha256(text.encode()).hexdigest()


def _built(known: Mapping[str, Any]) -> DictConfig:
    built: DictConfig = OmegaConf.create(known["values"])
    if known["structured"]:
        built = OmegaConf.unsafe_merge(OmegaConf.structured(Experiment), built)  # type: ignore[assignment]
    OmegaConf.set_struct(built, known["struct"])
    return built


def _nodes(node: Any, key: object = None) -> Iterator[tuple[object, ...]]:
    """All that a configuration consists of, node by node."""
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
    libraries = [Path(spec.origin) for name in _LIBRARIES if (spec := find_spec(name)) and spec.origin]
    stamps = [(str(path), found.st_mtime_ns, found.st_size) for path, found in _stats([*_sources(), *libraries])]
    everything = (sys.version, list(words), [str(folder.absolute()) for folder in folders], stamps)
    return hashlib.sha256(repr(everything).encode("utf-8", "surrogateescape")).hexdigest()


def _sources() -> Iterator[Path]:
    for root in _CODE:
        for folder, _, files in sorted(os.walk(root)):
            yield from (Path(folder, file) for file in sorted(files) if file.endswith(".py"))


def _stats(paths: Sequence[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    for path in paths:
        with suppress(FileNotFoundError):
            yield path, path.stat()


def _write(entry: Path, content: str) -> None:
    entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(entry, content, durable=False, mode=0o600)
    entries = [Path(one) for one in os.scandir(entry.parent)]
    if len(entries) > _MOST_ENTRIES:
        for path, _ in sorted(_stats(entries), key=lambda one: one[1].st_mtime)[: _MOST_ENTRIES // 4]:
            path.unlink(missing_ok=True)
