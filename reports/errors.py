"""What can be wrong with the files that a report is made from."""

from __future__ import annotations

from conf.errors import TdppError


class ReportError(TdppError):
    """A file that a report needs is not what `docs/formats.md` says."""


class NeitherError(ReportError):
    """A file or folder is neither a run nor a log that can be read."""
