"""What can be wrong with the files that a report is made from."""

from __future__ import annotations

from pathlib import Path

from conf.errors import TdppError


class ReportError(TdppError):
    """A file that a report needs is not what `docs/formats.md` says."""


class NeitherError(ReportError):
    """A file or folder is neither a run nor a log that can be read."""

    def __init__(self, message: str, brief: str | None = None) -> None:
        """`brief` is for those that are left out among others."""
        super().__init__(message)
        self.brief = brief or message


def unwritable(path: Path, error: OSError) -> ReportError:
    """Returns the error and the way out: who may only read a run may still want its report."""
    return ReportError(f"{path}: cannot be written ({error.strerror}); write the report elsewhere with --output FOLDER")
