"""What this room tells users."""

from __future__ import annotations

from conf.errors import TdppError


class DataPrepError(TdppError):
    """Text or indexed data that cannot be used."""


def missing_package(name: str, purpose: str) -> DataPrepError:
    return DataPrepError(f"the Python package {name} is needed {purpose}, and is not here: pip install 'tdpp[data]'")
