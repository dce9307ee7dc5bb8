"""Hydra as a library: one composition at a time, since Hydra keeps its state in one object of the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

from hydra import initialize_config_module

from conf import hydra_files

_LOCK = RLock()


@contextmanager
def hydra_session() -> Iterator[None]:
    """Within it, Hydra composes from the configurations in `conf`; other threads wait for their turn."""
    hydra_files.register()
    with _LOCK, initialize_config_module("conf", version_base="1.3"):
        yield
