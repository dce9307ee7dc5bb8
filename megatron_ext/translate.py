"""Translates with an exported model: `python -m megatron_ext.translate FILE < source.txt`.

It needs torch and numpy alone, so that it runs on a small board; where `tokenizers` is installed, it is faster.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import List

from megatron_ext.contract.errors import EngineError
from megatron_ext.inference import exported
from megatron_ext.inference.lines import translated
from megatron_ext.inference.scoring import add_scoring, scoring_of
from megatron_ext.inference.text import Counting, tokenizer_of
from megatron_ext.inference.translator import Translator


def main(argv: List[str]) -> int:
    """The command; exit code 0, 1 with a message on stderr, or 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ext.translate", description="Translate the lines of stdin with an exported model."
    )
    parser.add_argument("file", type=Path, help="made by 'tdpp translate RUN --export FILE'")
    add_scoring(parser)
    arguments = parser.parse_args(argv)
    scoring = scoring_of(arguments)
    try:
        found = exported.read(arguments.file)
        translator = Translator(found.model, found.weights, arguments.device)
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
        tokenizer = Counting(tokenizer_of(found.tokenizer))
        for line in translated(sys.stdin, translator, tokenizer, scoring, live=True):
            print(line, flush=True)
        doubt = tokenizer.doubt()
        if doubt is not None:
            print("warning: " + doubt, file=sys.stderr)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
