"""What samples of masked text need to know of the tokenizer: `<prefix>.vocabulary.json` (docs/formats.md)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Union

import numpy as np

from megatron_ext.contract.errors import DataError
from megatron_ext.contract.files import read_regular, why
from megatron_ext.data.indexed_dataset import data_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

VERSION = 1
VOCABULARY = ".vocabulary.json"
"""What the file beside the data ends in."""
_WAY_OUT = (
    "prepare the data with 'tdpp data prepare --split-sentences' (for T5 also --vocab-extra-ids 100), which writes it"
)


@dataclass(frozen=True)
class Vocabulary:
    """Ids of a tokenizer that have a meaning beside their text; None where it has no such token."""

    size: int
    """All ids are below it."""
    cls: Optional[int]
    """Begins a sample."""
    sep: Optional[int]
    """Ends each part of a sample."""
    mask: Optional[int]
    """Stands for a token that is to be found."""
    pad: Optional[int]
    """Fills a sample up."""
    bos: Optional[int]
    """Begins what a decoder reads."""
    eos: Optional[int]
    """Ends what a decoder writes."""
    sentinels: List[int]
    """Each stands for one span of a sample, in this order."""
    continues: List[int]
    """Tokens that go on with the word before them, such as WordPiece's `##ing`."""

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}) + "\n"

    @classmethod
    def read(cls, prefix: Union[str, Path]) -> Vocabulary:
        """What lies beside indexed data. Raises DataError: it is not there, or cannot be understood."""
        path = data_file(prefix, VOCABULARY)
        try:
            content = json.loads(read_regular(path))
        except FileNotFoundError as error:
            raise DataError(
                f"{path}: no such file, which describes the tokens of the data (where words begin, ids of "
                f"[CLS], [SEP], [MASK], …); {_WAY_OUT}"
            ) from error
        except (OSError, ValueError, RecursionError) as error:
            raise _damaged(path, why(error)) from error
        return cls._parsed(path, content)

    @classmethod
    def _parsed(cls, path: Path, content: Any) -> Vocabulary:
        if not isinstance(content, dict) or content.get("version") != VERSION:
            raise _damaged(path, f"expected version {VERSION}")
        values: Dict[str, Any] = {key: value for key, value in content.items() if key != "version"}
        if values.keys() != cls.__dataclass_fields__.keys():
            raise _damaged(path, f"its keys are {', '.join(values)} instead of {', '.join(cls.__dataclass_fields__)}")
        size = values["size"]
        if type(size) is not int or size < 1:
            raise _damaged(path, f"size is {size!r}")
        for key, value in values.items():
            listed = key in ("sentinels", "continues")
            if listed != isinstance(value, list):
                raise _damaged(path, f"{key} is {value!r}")
            for token in value if listed else [] if key == "size" or value is None else [value]:
                if type(token) is not int or not 0 <= token < size:
                    raise _damaged(path, f"{key} has {token!r}, which is not an id below size={size}")
        return cls(**values)

    def require(self, prefix: Union[str, Path], *names: str) -> List[int]:
        """The ids of these special tokens. Raises DataError: the tokenizer lacks one."""
        found = {name: getattr(self, name) for name in names}
        for name, token in found.items():
            if token is None:
                raise DataError(
                    f"{data_file(prefix, VOCABULARY)}: the tokenizer has no token for {name!r}, which these samples "
                    f"need; {_WAY_OUT}"
                )
        return list(found.values())

    def word_begins(self) -> NDArray[np.bool_]:
        """[size]: whether a token begins a word."""
        begins = np.ones(self.size, bool)
        begins[self.continues] = False
        return begins


def _damaged(path: Path, found: str) -> DataError:
    return DataError(f"{path}: not a description of a vocabulary, or damaged ({found}); {_WAY_OUT}")
