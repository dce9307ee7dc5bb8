"""Whether a checkout of Megatron-LM can train with this Python."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Optional, Sequence

PRETRAIN_GPT = "pretrain_gpt.py"
"""The script in a checkout."""
_REQUIRED = re.compile(r"^requires-python\s*=\s*[\"'][^\"']*>=\s*3\.(\d+)", re.MULTILINE)


def fault(script: Sequence[str]) -> Optional[str]:
    """Why not, and what helps; None if nothing is known. `script` is the path of pretrain_gpt.py and its options."""
    path, options = Path(script[0]), list(script[1:])
    if not path.is_file():
        return f"engine.checkout={path.parent}: {path} does not exist; give a checkout of Megatron-LM"
    project = path.with_name("pyproject.toml")
    found = _REQUIRED.search(project.read_text(encoding="utf-8", errors="replace")) if project.is_file() else None
    if found is not None and sys.version_info < (3, int(found[1])):
        return (
            f"engine.checkout={path.parent} needs Python 3.{found[1]}, and ranks would run with "
            f"{sys.version.split()[0]}; use a container that has it (container.image), an environment of that Python, "
            "or an older checkout, from core_v0.13.0 on"
        )
    given = [options[at + 1] for at, word in enumerate(options[:-1]) if word == "--transformer-impl"]
    given += [word.split("=", 1)[1] for word in options if word.startswith("--transformer-impl=")]
    if (not given or given[-1] == "transformer_engine") and find_spec("transformer_engine") is None:
        return (
            f"engine.checkout={path.parent}: Megatron-LM's layers are Transformer Engine's, which {sys.executable} "
            "does not have; use a container that has it (container.image), install transformer-engine[pytorch] where "
            "the ranks run, or take Megatron's own layers with engine.arguments=[--transformer-impl,local]"
        )
    return None
