"""`tdpp` as a user calls it, except that its workers are `stand_in_worker` and no data are asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import launch.commands.launch
from launch import cli
from tests.support.launch.live import WORKER, no_data_needed

real_launch = launch.commands.launch.main


def stand_in_launch(argv: Sequence[str]) -> int:
    return real_launch(argv, preflight=no_data_needed, worker=WORKER)


if __name__ == "__main__":
    launch.commands.launch.main = stand_in_launch
    sys.exit(cli.main())
