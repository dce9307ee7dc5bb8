"""What can go wrong in a search."""

from __future__ import annotations

from conf.errors import TdppError


class SearchError(TdppError):
    """A schedule or a search that makes no sense, or that no plan satisfies."""
