"""Looking at a user's module in a forked process instead of a fresh one, which takes three CPU seconds to import torch.

For tests whose subject is another one; `tests/megatron_ext/tasks/user/test_looking.py` compares both ways.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryFile

from conf import blocks_of_module

FRESH = blocks_of_module._run
"""The product's own way."""


def forked(words: list[str]) -> CompletedProcess[str]:
    """In place of `conf.blocks_of_module._run`: the same exit code and output."""
    import torch._dynamo  # once here, not in every process that is forked

    from megatron_ext import blocks

    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # not pytest's
                sys.path.insert(0, str(Path.cwd()))
                torch.set_num_threads(1)
                code = blocks.main(words)
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
    return CompletedProcess(words, code, *found)
