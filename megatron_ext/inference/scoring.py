"""How translations are compared, and the options that say so; without torch, for help must not wait for it."""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple


class Scoring(NamedTuple):
    """How hypotheses are compared."""

    beam: int = 5
    """How many go on, of a sentence; 1: the best token each time."""
    length_norm: float = 0.6
    """Alpha: log probabilities are divided by ((5 + tokens) / 6) ** alpha."""
    coverage: float = 0.1
    """Beta: weight of the logarithms of what each source token was attended to in all, 1 at most."""

    def normalized(self, log_probability: float, tokens: int) -> float:
        return log_probability / math.pow((5.0 + tokens) / 6.0, self.length_norm)


DEFAULT = Scoring()
GREEDY = Scoring(1, 0.0, 0.0)
MOST_BEAM = 1000


def add_scoring(parser: argparse.ArgumentParser) -> None:
    """For `scoring_of`, and the device."""
    parser.add_argument(
        "--beam",
        type=_beam,
        default=DEFAULT.beam,
        metavar="N",
        help="hypotheses kept at each step (default: %(default)s)",
    )
    parser.add_argument("--greedy", action="store_true", help="the best token each time: --beam 1, no normalization")
    for name, letter in (("length_norm", "alpha"), ("coverage", "beta")):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=_weight,
            default=getattr(DEFAULT, name),
            metavar=letter.upper(),
            help=f"GNMT's {letter} (default: %(default)s)",
        )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default: %(default)s")


def scoring_of(arguments: argparse.Namespace) -> Scoring:
    """Reads the options."""
    if arguments.greedy:
        return GREEDY
    return Scoring(arguments.beam, arguments.length_norm, arguments.coverage)


def _beam(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= value <= MOST_BEAM:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 to {MOST_BEAM}")
    return value


def _weight(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 10:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 0 to 10")
    return value
