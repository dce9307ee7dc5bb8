"""A file of another system in the place of the words that it stands for: `pipedream=FILE`, `openseq2seq=FILE`.

Each system's reader is a plug-in, which is imported only where a command line has its word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from conf.errors import ConfigError
from conf.pipedream import WORD as PIPEDREAM
from conf.pipedream import ModelOf

Reader = Callable[[Path, tuple[str, ...], ModelOf], tuple[list[str], list[str]]]
"""Takes a file, the other words of the command line, which take precedence, and what finds the model that words of its
group choose. Returns the words that the file stands for, and what it says that has no place here, a sentence each.
Raises a `ConfigError` where the file cannot be read, or says what cannot be expressed, with a line
for each such key."""


def expanded(words: Sequence[str], model_of: ModelOf) -> tuple[list[str], list[str]]:
    """The words, those of other systems' files in the place of the files; and all that these say in vain.

    A model that another system's file describes is not one of the sizes that tdpp begins with.
    """
    found, notes = list(words), list[str]()
    for beginning, read in READERS.items():
        files = [word.removeprefix(beginning) for word in found if word.startswith(beginning)]
        if len(files) > 1:
            raise ConfigError(f"{beginning}… occurs {len(files)} times; give it once")
        if files:
            given = tuple(word for word in found if not word.startswith(beginning))
            said, more = read(Path(files[0]), given, model_of)
            found, notes = [*said, *given], [*notes, *more]
    of_file = any(word.startswith("model.config=") or word == "model.family=huggingface" for word in found)
    if of_file and not any(word.startswith("model=") for word in found):
        found = ["model=huggingface", *found]
    return found, notes


def _openseq2seq(path: Path, given: tuple[str, ...], _: ModelOf) -> tuple[list[str], list[str]]:
    from conf.reading import openseq2seq

    return openseq2seq.words_of(path, given)


def _pipedream(path: Path, given: tuple[str, ...], model_of: ModelOf) -> tuple[list[str], list[str]]:
    from conf.pipedream import words

    return words.words_of(path, given, model_of)


READERS: dict[str, Reader] = {"openseq2seq=": _openseq2seq, PIPEDREAM: _pipedream}
"""The readers by the beginning of their word."""
