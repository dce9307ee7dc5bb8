"""`tdpp generate`: continues a text with a trained run."""

from __future__ import annotations

from collections.abc import Sequence

from conf.reading.parser import Parser, option
from conf.reading.values import from_0, not_negative, whole
from launch.commands.run_arguments import add_run, chosen_run
from launch.commands.translate import add_checkpoint, require_torch
from launch.errors import of_engine
from megatron_ext.checkpoints.kept_weights import kind_of, tell_kind


def main(argv: Sequence[str]) -> int:
    """Prints the prompt and what follows, as it is found."""
    arguments = parser().parse_args(argv)
    run = chosen_run(arguments)
    require_torch("tdpp generate")
    import numpy as np

    from data_prep.indexed.manifest import tokenizer_of
    from megatron_ext.inference.generating import Generator, data_of
    from megatron_ext.inference.held_out import checkpoint_of

    plan = run.read_plan()
    with of_engine():
        checkpoint = checkpoint_of(run.path, arguments.checkpoint)
        kind = kind_of(checkpoint, arguments.weights)
        generator = Generator(plan, checkpoint, kind, arguments.device)
    tokenizer = tokenizer_of(data_of(plan))
    tell_kind(kind, arguments.weights)
    end = tokenizer.end_of_document
    prompt = tokenizer.prompt(arguments.prompt) or [end]
    before = len(tokenizer.decode(np.array(prompt, dtype=np.int64)))
    tokens, shown = list[int](), ""
    print(arguments.prompt, end="", flush=True)
    for token in generator.tokens(prompt, arguments.tokens, arguments.temperature, arguments.seed, end):
        tokens.append(token)
        text = tokenizer.decode(np.array([*prompt, *tokens], dtype=np.int64))[before:]
        whole_text = text.rstrip("\ufffd")  # a letter may have several tokens
        print(whole_text[len(shown) :], end="", flush=True)
        shown = whole_text
    print()
    return 0


def parser() -> Parser:
    made = Parser(
        prog="tdpp generate",
        description="Continue a text with a trained run whose model predicts the next token, such as a GPT.",
    )
    add_run(made)
    made.add_argument("--prompt", default="", metavar="TEXT", help="what comes before (default: nothing)")
    made.add_argument(
        "--tokens", type=option(whole), default=100, metavar="N", help="at most so many tokens (default: %(default)s)"
    )
    made.add_argument(
        "--temperature",
        type=option(not_negative),
        default=0.0,
        metavar="T",
        help="0: always the likeliest token (default); above 0 tokens are drawn, and 1 leaves the probabilities as "
        "they are",
    )
    made.add_argument("--seed", type=option(from_0), default=0, metavar="N", help="for drawing (default: %(default)s)")
    made.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default: %(default)s")
    add_checkpoint(made)
    return made
