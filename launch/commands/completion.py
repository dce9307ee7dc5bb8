"""`tdpp completion`: what lets a shell complete the words of tdpp.

The script that a shell reads asks this command again, with the line so far, each time somebody presses Tab.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from conf.errors import TdppError
from conf.reading.parser import Parser
from conf.reading.words import CONFIG_DIR, FULL
from conf.run_folder.run_folders import usual_runs_dir
from conf.run_folder.rundir import RunDir
from launch.commands import COMMANDS, module_of
from launch.errors import LaunchError

CONFIGURED = ("launch", "doctor", "search", "profile", "simulate", "rehearse")
"""Commands that take groups and keys."""
OF_RUNS = ("status", "logs", "stop", "runs", "report", "evaluate", "translate", "generate", "checkpoint")
"""Commands that take a RUN."""
RUN_WORDS = ("resume", "reproduce", "validate", "noise")
OF_LAUNCH = ("resume", "reproduce", "openseq2seq", "pipedream", "profile")
MODEL, LEARNING = "model", "learning"
"""What may come first after `tdpp init` and `tdpp rehearse`."""
MOST_RUNS = 50
"""So many, the latest, are offered."""

BASH = r"""_tdpp() {
    local line="${COMP_LINE:0:COMP_POINT}" found
    local word="${line##*[[:space:]]}"
    mapfile -t found < <("${COMP_WORDS[0]/#\~/$HOME}" completion --line "$line" 2>/dev/null)
    # Where = ends a word of readline's, only what stands behind it is completed.
    [[ $COMP_WORDBREAKS == *=* ]] && found=("${found[@]#"${word%"${word##*=}"}"}")
    COMPREPLY=("${found[@]}")
    [[ ${#found[@]} == 1 && $found == *[=.] ]] && compopt -o nospace
}
complete -o default -F _tdpp tdpp"""
ZSH = r"""(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
_tdpp() {
    local -a found
    found=(${(f)"$("${words[1]/#\~/$HOME}" completion --line "${(j: :)words[1,CURRENT]}" 2>/dev/null)"})
    if (( $#found )); then
        compadd -S '' -- ${(M)found:#*[=.]}
        compadd -- ${found:#*[=.]}
    else
        compset -P '*='
        _files
    fi
}
compdef _tdpp tdpp"""
FISH = r"""function __tdpp
    set -l program (commandline -opc)[1]
    set -l found ($program completion --line (commandline -cp) 2>/dev/null)
    if set -q found[1]
        printf '%s\n' $found
    else
        set -l key (string match -r '^.*=' -- (commandline -ct))
        printf '%s\n' $key(__fish_complete_path (string replace -r '^.*=' '' -- (commandline -ct)))
    end
end
complete -c tdpp -f -a '(__tdpp)'"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
HOW = """in ~/.bashrc:                   eval "$(tdpp completion bash)"
in ~/.zshrc:                    eval "$(tdpp completion zsh)"
in ~/.config/fish/config.fish:  tdpp completion fish | source"""


def main(argv: Sequence[str]) -> int:
    """Runs `tdpp completion <argv>`."""
    arguments = parser().parse_args(argv)
    if arguments.line is None:
        print(SCRIPTS[arguments.shell])
    else:
        for word in completed(arguments.line):
            print(word)
    return 0


def parser() -> Parser:
    made = Parser(
        prog="tdpp completion",
        description="Print a script that makes a shell complete commands, options, groups, keys, values and runs.",
        epilog=HOW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = made.add_mutually_exclusive_group(required=True)
    which.add_argument("shell", nargs="?", choices=list(SCRIPTS), metavar="|".join(SCRIPTS))
    which.add_argument("--line", help=argparse.SUPPRESS)  # the scripts ask so what its last word may become
    return made


def hydra_option(argv: Sequence[str]) -> int:
    """Hydra's own way to the same, `tdpp launch --shell-completion install=SHELL`. Its scripts know no commands. Raises
    LaunchError: it asks for something else."""
    shells = [shell for shell in SCRIPTS if f"install={shell}" in argv]
    if not shells:
        raise LaunchError(
            f"{' '.join(argv)}: give one shell: 'tdpp completion SHELL', where SHELL is {', '.join(SCRIPTS)}"
        )
    print(SCRIPTS[shells[0]])
    return 0


def completed(line: str) -> list[str]:
    """What the last word of a line may become; none, where that cannot be known."""
    try:
        words = shlex.split(line)
    except ValueError:  # within quotes
        words = line.split()
    word = "" if not words or line[-1:].isspace() else words.pop()
    if len(words) < 2:
        return [name for name in COMMANDS if name.startswith(word)] if words else []
    _, command, *others = words
    if command not in COMMANDS:
        return []
    known = offered(command, others, word)
    if known is not None:
        return known
    if command == "init":
        return [name for name in (MODEL,) if not others and name.startswith(word)]
    if command == "config":
        from conf.reference import parts

        names = (name for part in parts() for name in (part.name, *(key.name for key in part.keys)) if name)
        return [name for name in dict.fromkeys(names) if name.startswith(word)]
    if command == "rehearse" and not others:
        return [name for name in (LEARNING,) if name.startswith(word)]
    key, equals, value = word.partition("=")
    if (equals and key in RUN_WORDS) or command in OF_RUNS:
        start, what = (f"{key}=", value) if equals else ("", word)
        return [start + run for run in _runs(others) if run.startswith(what)]
    own = _own_words(command)
    found = [f"{name}=" for name in own if f"{name}=".startswith(word)]
    if command in CONFIGURED and not (equals and key in own):
        from conf.reference import candidates  # Hydra takes a while

        try:
            found += candidates(word, [other for other in others if other not in ("-m", "--multirun")])
        except TdppError:
            return found
    return found


def _own_words(command: str) -> tuple[str, ...]:
    """Words of a command that are no keys."""
    if command == "search":
        from fasop.graphs.arguments import WORDS as OF_GRAPH
        from fasop.search.arguments import WORDS as OF_SEARCH
        from launch.commands.searching.shares import WORDS as OF_SHARES
        from launch.commands.searching.stages import WORDS as OF_STAGES

        found = (*OF_SEARCH, "runs_dir", *OF_GRAPH, *OF_STAGES, *OF_SHARES)
        return tuple(dict.fromkeys(word for word in found if "." not in word))
    if command == "profile":
        from launch.profile.arguments import OF_IMPORT
        from launch.profile.arguments import WORDS as OF_PROFILE

        return (*OF_PROFILE, *OF_IMPORT)
    if command == "simulate":
        from launch.commands.simulating.arguments import WORDS as OF_SIMULATION

        return tuple(OF_SIMULATION)
    if command == "rehearse":
        from launch.commands.rehearse import WORDS as OF_REHEARSAL

        return tuple(OF_REHEARSAL)
    return OF_LAUNCH if command == "launch" else ()


def _runs(words: Sequence[str]) -> list[str]:
    """The names that runs share, and those of the latest runs."""
    folder = usual_runs_dir()
    for before, word in zip(["", *words], [*words, ""], strict=True):
        option, _, value = word.partition("=")
        if value and option in ("--runs-dir", "runs_dir"):
            folder = Path(value)
        elif before == "--runs-dir" and word:
            folder = Path(word)
    found = list(RunDir.all(folder))[-MOST_RUNS:]
    return [*dict.fromkeys(run.path.parent.name for run in found), *(run.name for run in found)]


OF_WORDS = {
    "launch": ("-m", "--multirun", FULL, "--cfg", "--resolve", "--package", "--info", CONFIG_DIR, "--help"),
    "search": (CONFIG_DIR, "--help"),
    "profile": (CONFIG_DIR, "--help"),
    "simulate": ("--json", CONFIG_DIR, "--help"),
    "rehearse": (CONFIG_DIR, "--help"),
}
"""The options of commands that take words, as Hydra does, and have no parser."""


def offered(command: str, before: Sequence[str], word: str) -> list[str] | None:
    """What a word of a command may become where its parser decides; None where it may be anything else. `before`: the
    words between the command and this one."""
    if command in OF_WORDS:
        return _beginning(word, OF_WORDS[command]) if word.startswith("-") else None
    parser = _parser(command, before)
    positional = [one for one in before if not one.startswith("-")]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            if not positional:
                return _beginning(word, [*action.choices, *_names(parser)] if word.startswith("-") else action.choices)
            chosen: argparse.ArgumentParser = action.choices.get(positional[0], parser)
            parser = chosen
    values = {name: action for action in parser._actions for name in action.option_strings if action.nargs != 0}
    option, equals, value = word.partition("=")
    if equals and option in values:
        return [f"{option}={one}" for one in _beginning(value, values[option].choices)]
    if before and before[-1] in values and values[before[-1]].choices is not None:
        return _beginning(word, values[before[-1]].choices)
    if before and before[-1] in values and before[-1] != "--watch":  # --watch alone has a value, too
        return []
    if word.startswith("-"):
        return _beginning(word, _names(parser))
    choices = [one for action in parser._actions if not action.option_strings for one in action.choices or ()]
    return _beginning(word, choices) if choices else None


def _parser(command: str, before: Sequence[str]) -> argparse.ArgumentParser:
    """A command's module is imported only where the command is asked for."""
    if command == "init" and before[:1] == ["model"]:
        from launch.commands import init_model

        return init_model.parser()
    parser = module_of(command).parser()
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def _names(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings


def _beginning(start: str, names: object) -> list[str]:
    return [str(name) for name in names or () if str(name).startswith(start)]  # type: ignore[attr-defined]
