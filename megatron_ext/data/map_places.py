"""The files of maps of samples: they lie beside the data where one may write there, else in the user's cache, or where
told.

A map's name has a hash of all that it follows from: it is found wherever it lies, and never taken for another.
"""

from __future__ import annotations

import os
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any, Callable, Iterable, List, NoReturn, Optional, Union

from numpy.lib import format as npy

from megatron_ext.contract.errors import DataError
from megatron_ext.contract.files import user_cache
from megatron_ext.data.indexed_dataset import replacing

if TYPE_CHECKING:
    from numpy.typing import NDArray

FilesOf = Callable[[Path], List[Path]]
"""From what names begin with to the files of maps that belong together."""
_WAY_OUT = "delete it, it will be rebuilt, or give a folder of your own for such maps, data.cache=FOLDER"


def places(prefix: Union[str, Path], cache: Optional[str]) -> List[Path]:
    """What the names of the maps of this data may begin with, in the order in which they are looked for.

    `cache` is the folder that was given (data.cache), if one was.
    """
    if cache is not None:
        return [Path(cache) / Path(prefix).name]
    return [Path(prefix), user_cache() / Path(prefix).name]


def find_maps(prefix: Union[str, Path], cache: Optional[str], files_of: FilesOf) -> Optional[List[Path]]:
    """The first files of maps all of which are there."""
    candidates = map(files_of, places(prefix, cache))
    return next((files for files in candidates if all(file.is_file() for file in files)), None)


def find_or_build(
    prefix: Union[str, Path], cache: Optional[str], files_of: FilesOf, build: Callable[[], Iterable[NDArray[Any]]]
) -> List[Path]:
    """The files of maps, whose content `build` gives where they are not there.

    Processes that build at the same time do no harm: each file appears whole, and all write the same bytes. Let one
    rank call this before the others, so that the work is done once.

    Raises:
        DataError: they cannot be written.
    """
    files = find_maps(prefix, cache, files_of)
    if files is None:
        place = place_to_write(prefix, cache)
        _make_folder(place)
        files = files_of(place)
        for file, content in zip(files, build()):
            _save(file, content)
    return files


def place_to_write(prefix: Union[str, Path], cache: Optional[str]) -> Path:
    """The first of `places` where this process may write. Raises DataError: there is none."""
    possible = places(prefix, cache)
    for place in possible:
        if _writable(place.parent, may_be_made=place != Path(prefix)):
            return place
    told = " or in ".join(str(place.parent) for place in possible)
    raise DataError(
        f"{prefix}: its index maps cannot be written in {told}; give a folder that you may write to, data.cache=FOLDER"
    )


def _make_folder(place: Path) -> None:
    """The folder of a place that may not be there yet, for this user alone. Raises DataError: it cannot be made."""
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


def _save(file: Path, content: NDArray[Any]) -> None:
    """Save as `np.save` does, which does not notice when the disk has no room for the last bytes."""
    with replacing(file) as opened:
        npy.write_array_header_1_0(opened, npy.header_data_from_array_1_0(content))
        opened.write(content.data)


def load_map(file: Path) -> NDArray[Any]:
    """A map from its file, memory-mapped. Raises DataError: it cannot be read."""
    try:
        loaded: NDArray[Any] = npy.open_memmap(file, mode="r")
    except (OSError, ValueError, TypeError, OverflowError, SyntaxError, TokenError) as error:  # a header may be damaged
        raise DataError(f"{file}: this index map cannot be read ({error}); {_WAY_OUT}") from error
    return loaded


def misfit(what: str, file: Path, expected: str, found: str) -> NoReturn:
    """Raises DataError for a map, which is `what`, that does not fit its data."""
    raise DataError(
        f"{file}: this {what} was made for other data or another split, or is damaged: expected {expected}, found "
        f"{found}; {_WAY_OUT}"
    )
