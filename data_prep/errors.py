"""What this room tells users."""

from __future__ import annotations

from conf.errors import TdppError


class DataPrepError(TdppError):
    """Text or indexed data that cannot be used."""
