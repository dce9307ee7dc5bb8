"""Files that only one of several processes, on any host, can create."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from megatron_ext.contract.files import write_atomic


def created(path: Path, text: str) -> bool:
    """Writes a file with its whole content at once; False if there is one already."""
    path.parent.mkdir(exist_ok=True)
    own = path.with_name(f".{path.stem}.{secrets.token_hex(8)}")
    write_atomic(own, text)
    try:
        os.link(own, path)
    except FileExistsError:
        return False
    finally:
        own.unlink()
    return True
