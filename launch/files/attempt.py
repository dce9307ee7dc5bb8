"""Which start of a run something belongs to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Start:
    """Later ones are greater. As text, in files and in the environment: `<submission>.<restarts>`."""

    submission: int
    """How often the run had been submitted before."""
    restarts: int
    """How often it was started again since: by Slurm, or with a new plan by the nodes of an elastic run."""

    def __str__(self) -> str:
        return f"{self.submission}.{self.restarts}"

    @property
    def next(self) -> Start:
        """The one after it in the same submission."""
        return Start(self.submission, self.restarts + 1)

    @classmethod
    def parse(cls, text: str) -> Start:
        submission, restarts = text.split(".")
        return cls(int(submission), int(restarts))
