"""The console command `tdpp`: finds the command and hands over. It imports nothing before it knows which."""

from __future__ import annotations

import atexit
import errno
import gc
import io
import os
import sys
from collections.abc import Sequence

from conf.errors import TdppError
from conf.utf8 import AS_BYTES, enter_utf8_mode, is_utf8, shown
from conf.visible import nearest, shortened, visible
from launch.commands import COMMANDS, module_of

INTERRUPTED = 130
NO_READER = 141
WRONG_USAGE = 2
AROUND = 100
"""Characters that are shown on both sides of what is not UTF-8: the text may be a whole file's."""
OF_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EROFS)
"""What is wrong with a path that a user gave, wherever it is noticed."""
UNCOLLECTED = 200_000
"""Objects that are made before Python looks for unreachable ones: a command keeps most of what it makes until it ends,
and with Python's own 700 a tenth of a search goes into looking."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `tdpp <argv>`; returns its exit code (docs/exit-codes.md)."""
    if argv is None:
        gc.set_threshold(UNCOLLECTED)
        atexit.register(gc.freeze)  # nothing that a command leaves behind need be looked through once more
        enter_utf8_mode(terminal=True)
        argv = sys.argv[1:]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=AS_BYTES)  # names of files may hold what no encoding has
    os.umask(os.umask(0o022) | 0o022)  # what others could write to, they could have a job of ours run
    try:
        try:
            code = _run(argv)
        finally:
            sys.stdout.flush()  # here, where a device without room can be reported; also after argparse's --help
    except TdppError as error:
        print(visible(f"tdpp: error: {_with_origins(error, argv)}"), file=sys.stderr)
        return error.exit_code
    except UnicodeEncodeError as error:
        if is_utf8(error.object):
            raise
        what = shown(error.object[max(0, error.start - AROUND) : error.end + AROUND])
        print(visible(f"tdpp: error: {what}: not UTF-8, so no file could name it; rename it"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as head, has seen enough; the rest of stdout goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except OSError as error:
        from conf.run_folder.rundir import is_full

        if error.errno in OF_PATHS and error.filename is not None:
            print(visible(shortened(f"tdpp: error: {error.filename}: {error.strerror}")), file=sys.stderr)
            return 1
        if not is_full(error):
            raise
        where = error.filename or "standard output"
        print(f"tdpp: error: {where}: {error.strerror}; free some space there", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if argv[0] == "--version":
        print(f"tdpp {_version()}")
        return 0
    verb, *rest = argv
    if verb not in COMMANDS:
        hint = nearest(verb, [*COMMANDS, "--help", "--version"])
        print(f"tdpp: error: unknown command {verb!r}; {hint}'tdpp --help' lists all", file=sys.stderr)
        return WRONG_USAGE
    return int(module_of(verb).main(rest))


def _with_origins(error: TdppError, argv: Sequence[str]) -> str:
    """Its message, with the lines of the user's files that it is about."""
    if not any("=" in word for word in argv):
        return str(error)
    from conf.origins import with_origins  # imports Hydra

    return with_origins(error, argv[1:])


def usage() -> str:
    """The commands, a line each."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {purpose}" for name, purpose in COMMANDS.items()]
    return "\n".join(
        ["usage: tdpp COMMAND ...", "", *lines, "", "'tdpp COMMAND --help' shows its options; 'tdpp --version'."]
    )


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("tdpp")
    except metadata.PackageNotFoundError:
        return "(not installed: run from its source tree)"


if __name__ == "__main__":
    sys.exit(main())
