"""Where maps of samples lie: beside the data where one may write there, else in the user's cache, or where told.

A map's name has a hash of all that it follows from: it is found wherever it lies, and never taken for another.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import List, Optional, Sequence, Union

from megatron_ext.contract.errors import DataError
from megatron_ext.contract.files import user_cache


def places(prefix: Union[str, Path], cache: Optional[str]) -> List[Path]:
    """What the names of the maps of this data may begin with, in the order in which they are looked for.

    `cache` is the folder that was given (data.cache), if one was.
    """
    if cache is not None:
        return [Path(cache) / Path(prefix).name]
    return [Path(prefix), user_cache() / Path(prefix).name]


def first_there(candidates: Sequence[List[Path]]) -> Optional[List[Path]]:
    """The first group of files all of which are there."""
    return next((files for files in candidates if all(file.is_file() for file in files)), None)


def place_to_write(prefix: Union[str, Path], cache: Optional[str]) -> Path:
    """The first of `places` where this process may write.

    Raises:
        DataError: there is none.
    """
    possible = places(prefix, cache)
    for place in possible:
        if _writable(place.parent, may_be_made=place != Path(prefix)):
            return place
    told = " or in ".join(str(place.parent) for place in possible)
    raise DataError(
        f"{prefix}: its index maps cannot be written in {told}; give a folder that you may write to, data.cache=FOLDER"
    )


def make_folder(place: Path) -> None:
    """The folder of a place that may not be there yet, for this user alone.

    Raises:
        DataError: it cannot be made.
    """
    try:
        place.parent.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{place.parent}: the folder for index maps cannot be made ({error.strerror}); give one with data.cache=…"
        ) from error


def _writable(folder: Path, may_be_made: bool) -> bool:
    while may_be_made and not os.path.lexists(str(folder)):
        folder = folder.parent
    return folder.is_dir() and os.access(str(folder), os.W_OK | os.X_OK, effective_ids=True)
