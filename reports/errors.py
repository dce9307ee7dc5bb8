"""What can be wrong with the files that a report is made from."""

from __future__ import annotations

from conf.errors import TdppError


class ReportError(TdppError):
    """A file that a report needs is not what `docs/formats.md` says."""
