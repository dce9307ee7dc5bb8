"""What changes a process for good is done in another one."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_ext.core import library


def in_another_process(compute: Callable[[], Any], path: Path) -> Any:
    """What `compute` gives in a fork: megatron.core changes torch for the rest of a process."""
    library.preload()
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        code = 1
        try:
            torch.save(compute(), path)
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return torch.load(path)
