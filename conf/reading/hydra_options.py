"""The options of `tdpp launch` that Hydra reads. Its own parser prints a page of usage for one that is wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence

from conf.errors import UsageError
from conf.reading.values import Parser

CONFIG_DIR = "--config-dir"
FULL = "--full"
"""tdpp's own: of a dry run."""
_ABOUT = ("-h", "--help", "--hydra-help", "--version")
_COMPOSED = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def parser() -> Parser:
    """One that takes what Hydra takes, apart from what tdpp decides itself, and `--full`."""
    made = Parser(prog="tdpp launch", add_help=False)
    made.add_argument("words", nargs="*")
    made.add_argument("-m", "--multirun", action="store_true")
    made.add_argument("-c", "--cfg", choices=["job", "hydra", "all"])
    made.add_argument("--resolve", action="store_true")
    made.add_argument("-p", "--package")
    made.add_argument("-i", "--info", nargs="?", choices=_COMPOSED)
    made.add_argument("-cd", CONFIG_DIR)
    made.add_argument("-cn", "--config-name")
    made.add_argument("-r", "--run", action="store_true")
    made.add_argument(FULL, action="store_true")
    for name in _ABOUT:
        made.add_argument(name, action="store_true", dest="about")
    return made


def check_options(words: Sequence[str]) -> None:
    """Ends the program with a message if `tdpp launch` has no such option, or the option no such value.

    Raises:
        UsageError: of --dry-run, for which argparse would suggest --run.
    """
    for word in words:
        if re.fullmatch(r"--dry[-_]?run(=.*)?", word):
            raise UsageError(f"{word}: 'tdpp launch' has no such option; write dry_run=true")
    parser().parse_intermixed_args([*words])


def refuse_options(words: Sequence[str]) -> None:
    """Of a command that takes words alone.

    Raises:
        UsageError: an option is among them.
    """
    options = [word.partition("=")[0] for word in words if word.startswith("-")]
    if not options:
        return
    known = {name for action in parser()._actions for name in action.option_strings}
    why = "only 'tdpp launch' takes this option" if options[0] in known else "there is no such option"
    raise UsageError(f"{options[0]}: {why}; this command has only {CONFIG_DIR} DIR and --help")
