"""Whether whoever types `tdpp launch` alone means the demo: with a cluster of their own they hardly do."""

from __future__ import annotations

from collections.abc import Sequence

from conf.errors import UsageError
from conf.reading.own_folders import SUFFIX, own_folders
from conf.reading.user_files import config_dirs

_STARTS_NOTHING = ("-c", "--cfg", "-i", "--info", "-h", "--help", "--hydra-help", "--version")


def require_choice(argv: Sequence[str]) -> None:
    """Raises UsageError where no word says what to launch, and there are clusters of one's own: the demo would take
    this machine, perhaps a cluster's login node."""
    folders, words = config_dirs(argv)
    if any("=" in word or word.startswith(("~", *_STARTS_NOTHING)) for word in words):
        return
    folders = [*own_folders(), *folders]
    clusters, experiments = (
        sorted({file.stem for folder in folders for file in folder.glob(f"{group}/*{SUFFIX}")})
        for group in ("cluster", "experiment")
    )
    if clusters:
        yours = f"experiment={experiments[0]}" if experiments else f"cluster={clusters[0]} model=NAME data=NAME"
        raise UsageError(
            f"tdpp launch: no experiment given; use {yours} for your own cluster "
            f"({', '.join(clusters)}), or experiment=demo for the demo on this machine"
        )
