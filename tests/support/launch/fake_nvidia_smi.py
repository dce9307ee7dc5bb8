"""A strict double of nvidia-smi: knows the fields and formats that the real one knows, and prints as it does.

What it tells is a JSON file named by NVIDIA_SMI_STATE. It follows `nvidia-smi --help-query-gpu`, the manual page (exit
codes), and what people report: values in brackets, and `Unable to determine the device handle …` on stderr beside the
rows of the GPUs that still answer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

UNITS = {
    "index": "",
    "uuid": "",
    "name": "",
    "utilization.gpu": "%",
    "memory.used": "MiB",
    "memory.total": "MiB",
    "power.draw": "W",
    "enforced.power.limit": "W",
    "temperature.gpu": "",
}
PROCESS_UNITS = {"gpu_uuid": "", "pid": "", "used_memory": "MiB"}
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n"
)


def main(arguments: list[str]) -> int:
    state = json.loads(Path(os.environ["NVIDIA_SMI_STATE"]).read_text())
    if state.get("hangs"):
        time.sleep(10_000)
    if state.get("no_driver"):
        print(NO_DRIVER)
        return 9
    query, form = arguments
    name, _, fields = query.partition("=")
    key, units = {"--query-gpu": ("gpus", UNITS), "--query-compute-apps": ("apps", PROCESS_UNITS)}[name]
    for field in fields.split(","):
        if field not in units:
            print(f'Field "{field}" is not a valid field to query.\n')
            return 2
    options = form.removeprefix("--format=").split(",")
    if form == options or "csv" not in options or not {"csv", "noheader", "nounits"}.issuperset(options):
        print('Invalid combination of input arguments. Please run "nvidia-smi -h" for help.\n')
        return 2
    if not state["gpus"]:
        print("No devices were found")
        return 6
    if "noheader" not in options:
        print(", ".join(f"{field} [{units[field]}]" if units[field] else field for field in fields.split(",")))
    for entry in state[key]:
        print(
            ", ".join(value(entry[field], "" if "nounits" in options else units[field]) for field in fields.split(","))
        )
    if "complaint" in state:
        print(state["complaint"], file=sys.stderr)
    return state.get("exit_code", 0)


def value(given: object, unit: str) -> str:
    return f"{given} {unit}" if unit and not str(given).startswith("[") else str(given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
