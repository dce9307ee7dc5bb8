"""Words of a command line that Hydra reads: values written for it, its options, and what no word may be.

Hydra's own parser prints a page of usage for a wrong option, and for some words it would not end well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from conf.errors import ConfigError, UsageError
from conf.reading.values import MOST_DIGITS
from conf.utf8 import is_utf8, shown

if TYPE_CHECKING:
    from conf.reading.parser import Parser


def in_word(value: Any) -> str:
    """Behind the `=` of a word."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(in_word, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}: {in_word(one)}' for key, one in value.items())}}}"
    if isinstance(value, str) and (value.lower() == "null" or not re.fullmatch(r"[\w./-]+", value)):
        return quoted(value)
    return str(value)


def quoted(text: str) -> str:
    """A text with any character, quoted for Hydra's grammar."""
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"


MOST_DEEP = 50
"""Lists and dictionaries within each other: Hydra's grammar calls itself for each."""
MOST_VALUES = 10_000
"""The most values of a range in a sweep."""
_PACKAGE, _PRINTED = re.compile(r"-p|--p"), re.compile(r"(-c|--cfg)(=|$)")
_OF_HYDRA = re.compile(r"(?:[+~]*hydra(?:[./@][^=]*)?=|~hydra(?:[./@]|$))")
_OF_SWEEPER = re.compile(r"[+~]*hydra(?:/sweeper(?:/\w+)?|\.sweeper(?:\.\w+)+)=")
_UNSEEN = re.compile(r"_target_|sweeper\.(?:custom_search_space|search_space|params)\b")
"""In a word of the sweeper: a function that would be called here, or words that nobody would check."""
_NUMBER = r"\s*(?:start\s*=|stop\s*=|step\s*=)?\s*(?P<{}>[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?)\s*"
_RANGE = rf"range\({_NUMBER.format('a')}(?:,{_NUMBER.format('b')})?(?:,{_NUMBER.format('c')})?\)"
_OPENED = dict.fromkeys("[{(", 1) | dict.fromkeys("]})", -1)


def with_values(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The words of a command line, with these values in the place of those for the same keys."""
    kept = [word for word in words if word.lstrip("+~").partition("=")[0] not in values]
    return [*kept, *(f"{key}={value}" for key, value in values.items())]


def check_words(words: Sequence[str]) -> None:
    """Raises ConfigError for the first one that cannot be."""
    printed = any(_PRINTED.match(word) for word in words)
    for word in words:
        if _PACKAGE.match(word) and not printed:  # it would take the word behind it, and no notice of that
            raise ConfigError(f"{word}: only '--cfg job' takes --package; leave it out")
        if not is_utf8(word):
            raise ConfigError(f"{shown(word)}: not UTF-8; write it in UTF-8")
        if _OF_HYDRA.match(word) and (not _OF_SWEEPER.match(word) or _UNSEEN.search(word)):
            raise ConfigError(
                f"{word}: tdpp sets Hydra's own configuration itself; leave it out (a run has its own folder, "
                f"<runs_dir>/<name>). Only a sweeper can be chosen, with hydra/sweeper=NAME, and set, with "
                f"hydra.sweeper.KEY=…, such as n_trials; it varies words such as 'train.lr=interval(1e-4,1e-2)'"
            )
        if digits := re.search(rf"[0-9_]{{{MOST_DIGITS + 1},}}", word):
            raise ConfigError(f"{word}: a number of {len(digits[0])} digits; at most {MOST_DIGITS} are allowed")
        if (values := _in_ranges(word)) > MOST_VALUES:
            raise ConfigError(f"{word}: a range of {values:.0f} values; at most {MOST_VALUES} are allowed")
        if max(accumulate(_OPENED.get(letter, 0) for letter in word), default=0) > MOST_DEEP:
            raise ConfigError(f"{word}: lists and dictionaries nested more than {MOST_DEEP} deep; no key takes that")


def _in_ranges(word: str) -> float:
    """How many values the ranges of a sweep have, which Hydra would write out; 0 without any."""
    if "range(" not in word.lower():
        return 0.0
    counts = [0.0]
    for found in re.finditer(_RANGE, word, re.IGNORECASE):
        start, stop, step = (float(found[group] or default) for group, default in (("a", 0), ("b", 0), ("c", 1)))
        if found["b"] is None:
            start, stop = 0.0, start
        counts.append(abs(stop - start) / abs(step) if step else math.inf)
    return max(counts)


CONFIG_DIR = "--config-dir"
FULL = "--full"
"""tdpp's own: of a dry run."""
_ABOUT = ("-h", "--help", "--hydra-help", "--version")
_COMPOSED = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def parser() -> Parser:
    """One that takes what Hydra takes, apart from what tdpp decides itself, and `--full`."""
    from conf.reading.parser import Parser  # most commands are words alone

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
    """Ends the program with a message if `tdpp launch` has no such option, or the option no such value. Raises
    UsageError: of --dry-run, for which argparse would suggest --run."""
    for word in words:
        if re.fullmatch(r"--dry[-_]?run(=.*)?", word):
            raise UsageError(f"{word}: 'tdpp launch' has no such option; write dry_run=true")
    parser().parse_intermixed_args([*words])


def refuse_options(words: Sequence[str]) -> None:
    """Refuses options of a command that takes words alone. Raises UsageError: an option is among them."""
    options = [word.partition("=")[0] for word in words if word.startswith("-")]
    if not options:
        return
    known = {name for action in parser()._actions for name in action.option_strings}
    why = "only 'tdpp launch' takes this option" if options[0] in known else "there is no such option"
    raise UsageError(f"{options[0]}: {why}; this command has only {CONFIG_DIR} DIR and --help")
