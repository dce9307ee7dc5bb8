"""Which weights of a checkpoint are meant: those that are trained, or their average, where the run kept one."""

from __future__ import annotations

import argparse
import sys
from typing import Optional

from megatron_ext.checkpoints.header import read_header
from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.run_files import EMA, WEIGHTS

TRAINED = "trained"
CHOICES = (EMA, TRAINED)
"""The values of `--weights`."""


def add_weights(parser: argparse.ArgumentParser) -> None:
    """For `kind_of`."""
    parser.add_argument(
        "--weights", choices=CHOICES, help="of a run with train.ema: the average (default), or the weights themselves"
    )


def kind_of(checkpoint: Checkpoint, asked: Optional[str] = None) -> str:
    """The kind of tensors that are meant; of `asked`, one of `CHOICES`, None is the average where there is one. Raises
    EngineError: there is no average that was asked for, or a part of the checkpoint is damaged."""
    if asked == TRAINED:
        return WEIGHTS
    names = (name for part in checkpoint.parts() for name in read_header(checkpoint.part(part)).entries)
    averaged = any(name.startswith(f"{EMA}/") for name in names)
    if asked == EMA and not averaged:
        raise EngineError(f"--weights {EMA}: {checkpoint.folder} has no average of its weights (train.ema)")
    return EMA if averaged else WEIGHTS


def tell_kind(kind: str, asked: Optional[str]) -> None:
    """Tells on standard error which weights were taken where nobody asked for one of two kinds."""
    if asked is None and (said := note(kind)) is not None:
        print(f"({said})", file=sys.stderr)


def note(kind: str) -> Optional[str]:
    """What somebody who did not ask should know; None where there is one kind alone."""
    return f"the average of the weights (train.ema); --weights {TRAINED} takes the others" if kind == EMA else None
