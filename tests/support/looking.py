"""Asking torch in a forked process instead of a fresh one, which takes three CPU seconds to import it, and five more
for a model of transformers.

For tests whose subject is another one; `tests/megatron_ext/tasks/user/test_looking.py` compares both ways.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryFile

from conf import torch_answers

FRESH = torch_answers.run
"""The product's own way."""


def forked(module: str, words: Sequence[str] = (), given: str | None = None) -> CompletedProcess[str]:
    """In place of `conf.torch_answers.run`: the same exit code and output."""
    import torch._dynamo  # noqa: F401  (once here, not in every process that is forked)

    import megatron_ext.blocks
    import megatron_ext.families.huggingface.task  # noqa: F401

    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # not pytest's
                sys.stdin, sys.argv[1:] = io.StringIO(given), words
                sys.path.insert(0, str(Path.cwd()))
                sys.modules.pop(module, None)
                runpy.run_module(module, run_name="__main__", alter_sys=True)
                code = 0
            except SystemExit as end:
                code = exit_code(end)
            except BaseException:  # noqa: BLE001  (a process that dies of it prints it)
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        found = []
        for file in (out, err):
            file.seek(0)
            found.append(file.read())
    return CompletedProcess([module, *words], code, *found)


def exit_code(end: SystemExit) -> int:
    """What a process that ends with it exits with, and first prints, as Python does."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1
