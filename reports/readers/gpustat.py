"""What `gpustat -i > FILE` leaves (https://github.com/wookayin/gpustat): readings one after the other, each a line with
host, time and driver, then a line for each GPU. The shell scripts left one for each node, `log2/<job id>/<node>.gpu`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise

from conf.run_folder.gpu_lines import GpuReading, GpuSample

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\([A-Z]|[=>])")
"""Colours and cursor moves, where gpustat took its output for a terminal."""
_HEAD = re.compile(r"(\S+) +(\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4})(?: .*)?")
_GPU = re.compile(
    r"\[(?P<index>\d{1,3})\] (?P<name>[^|]*?) *\| *(?P<temperature_c>\d{1,3}|\?\?)(?:'|°)C, "
    r"(?: *(?:\d{1,3}|\?\?) %, )? *(?P<utilisation>\d{1,3}|\?\?) %(?: \([^|]*\))?"
    r"(?:, +(?P<power_w>\d{1,5}|\?\?) (?:/ +(?P<power_limit_w>\d{1,5}|\?\?) )?W)? "
    r"\| +(?P<memory_used_mib>\d{1,7}|\?\?) / +(?P<memory_total_mib>\d{1,7}|\?\?) MB(?: \|.*)?"
)
_NUMBERS = ("temperature_c", "utilisation", "power_w", "power_limit_w", "memory_used_mib", "memory_total_mib")


def readings(text: str) -> tuple[GpuReading, ...]:
    """The readings in a part of the file, which may begin and end anywhere; the last one may lack GPUs.

    Times are taken as this machine's local time, for gpustat writes no zone. Processes are not distinguished: gpustat
    names their users, not whose job they are. Without any line of a host and a time (`--no-header`) a reading begins
    where the numbers of GPUs do; its times are not known, and its interval is 0.
    """
    lines = [line.strip() for line in _ESCAPES.sub("", text).splitlines()]
    found: list[tuple[str, int, list[GpuSample]]] = []
    for line in lines:
        head, gpu = _HEAD.fullmatch(line), _GPU.fullmatch(line)
        if head is not None and (unix := _unix(head[2])) is not None:
            found.append((head[1], unix, []))
        elif gpu is not None and found:
            host, _, gpus = found[-1]
            gpus.append(_sample(gpu, host))
    if not found:
        return _without_times(lines)
    times = [unix for _, unix, _ in found]
    interval_s = max(min((after - before for before, after in pairwise(times)), default=1), 1)
    return tuple(
        GpuReading(unix=unix, host=host, number=number, interval_s=interval_s, gpus=tuple(gpus))
        for number, (host, unix, gpus) in enumerate(found, 1)
        if gpus
    )


def _without_times(lines: Sequence[str]) -> tuple[GpuReading, ...]:
    found: list[list[GpuSample]] = []
    for gpu in filter(None, map(_GPU.fullmatch, lines)):
        sample = _sample(gpu, "")
        if not found or sample.index <= found[-1][-1].index:
            found.append([])
        found[-1].append(sample)
    return tuple(
        GpuReading(unix=0, host="", number=number, interval_s=0, gpus=tuple(gpus))
        for number, gpus in enumerate(found, 1)
    )


def _unix(text: str) -> int | None:
    try:
        return int(datetime.strptime(text, "%a %b %d %H:%M:%S %Y").timestamp())
    except (ValueError, OverflowError, OSError):
        return None


def _sample(gpu: re.Match[str], host: str) -> GpuSample:
    numbers = {key: None if gpu[key] in (None, "??") else int(gpu[key]) for key in _NUMBERS}
    return GpuSample(
        index=int(gpu["index"]),
        uuid=f"{host} {gpu['index']}",
        name=gpu["name"],
        processes=None,
        clocks=None,
        fault=None,
        **numbers,
    )
