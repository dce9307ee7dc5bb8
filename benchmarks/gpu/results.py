"""python -m benchmarks.gpu.results FOLDER…: tables of what `benchmarks.gpu_training` wrote into these folders.

They go to `benchmarks/results/gpu-CARD.md`, and all that was measured to `gpu-CARD.json` beside it. Iterations are
predicted from the profiles here, so this needs all of tdpp.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.predicted import predictions
from benchmarks.gpu.prepare import CASES, PROFILES, Case, ProfileCase
from benchmarks.gpu.run import ROOT
from benchmarks.gpu_training import PROFILE

Record = Mapping[str, Any]
TEXT = """# {device}

Measured on {days} by `python -m benchmarks.gpu_training`, with torch {torch} and CUDA {cuda}; every call's own figures
are in [{json}]({json}). Rates are medians of ten iterations. MFU is operations of forward and backward pass without
recomputation (`megatron_ext.contract.models.counts`), divided by the dense bf16 peak of the GPU's data sheet.
"Beside ours" is the rate divided by the mean of `ours` of the same case in the same call. Kernels, host waits and idle
time are those of one iteration under torch's profiler; "outside" is what nvidia-smi says is used more than before,
less what torch has reserved.
"""


def read(folders: Sequence[Path]) -> list[Record]:
    """In the order in which they were measured."""
    records = [json.loads(path.read_text()) for folder in folders for path in sorted(folder.glob("*.json"))]
    return sorted(records, key=lambda one: str(one["call"]))


def table(head: str, rows: Sequence[Sequence[object]]) -> list[str]:
    """Makes a table of Markdown, with an empty line before; nothing without rows."""
    if not rows:
        return []
    lines = ["", f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    return lines + [f"| {' | '.join(map(str, row))} |" for row in rows]


def right(records: Sequence[Record]) -> Iterator[Sequence[object]]:
    """Runs of which the losses on a CPU are known."""
    known = [one for one in records if "furthest_from_the_cpu" in one]
    for one in known:
        same = [other["losses"] == one["losses"] for other in known if other is not one]
        again = "" if not same else "yes" if all(same) else "no"
        yield one["case"], len(one["losses"]), f"{one['furthest_from_the_cpu']:.1e}", again


def training(records: Sequence[Record]) -> Iterator[Sequence[object]]:
    for one in records:
        if "samples_per_s" not in one:
            continue
        counts, mib = one["counts"], one["mib"]
        reserved, idle = mib.get("max_reserved"), counts["idle"]
        rate = f"{one['tokens_per_s']:,.0f} tokens" if "tokens_per_s" in one else f"{one['samples_per_s']:,.1f} images"
        yield (
            one["case"],
            one["contender"],
            rate,
            f"{one['mfu']:.1%}" if "mfu" in one else "",
            f"{beside(records, one):.3f}" if beside(records, one) else "",
            _whole(mib.get("max_allocated")),
            _whole(reserved),
            _whole(one["used_mib"] - reserved if "used_mib" in one else None),
            counts["kernels"],
            counts["host_waits"],
            "" if idle is None else f"{idle:.1%}",
        )


def beside(records: Sequence[Record], one: Record) -> float | None:
    """Its rate divided by that of `ours` in the same call."""
    same = [
        other["samples_per_s"]
        for other in records
        if (other["case"], other["call"], other["contender"]) == (one["case"], one["call"], "ours")
        and "samples_per_s" in other
    ]
    return one["samples_per_s"] / statistics.mean(same) if same else None


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def predicted(
    records: Sequence[Record], profiles: Mapping[str, ProfileCase], cases: Mapping[str, Case]
) -> Iterator[Sequence[object]]:
    """Beside all runs of the call that the profile was measured in."""
    for noted in records:
        if noted["contender"] != PROFILE or "failed" in noted:
            continue
        with TemporaryDirectory() as folder:
            for one in predictions(noted["rank"], profiles[noted["case"]], cases, Path(folder)):
                runs = [
                    run
                    for run in records
                    if (run["case"], run["call"], run["contender"]) == (one.case, noted["call"], "ours")
                    and "samples_per_s" in run
                ]
                batch = cases[one.case].micro * cases[one.case].micro_batches
                for run in runs:
                    took_ms = 1e3 * batch / run["samples_per_s"]
                    used, allocated = run.get("used_mib"), run["mib"].get("max_allocated")
                    yield (
                        *(one.case, f"{one.ms:.1f}", f"{took_ms:.1f}", f"{one.ms / took_ms - 1:+.1%}"),
                        *(_whole(one.mib), _whole(used), "" if used is None else f"{one.mib / used - 1:+.1%}"),
                        _whole(used - allocated if used is not None and allocated is not None else None),
                    )


def longest(records: Sequence[Record]) -> Iterator[Sequence[object]]:
    """The kernels that take most of an iteration, of the first run of each case and contender."""
    seen = set()
    for one in records:
        what = one["case"], one["contender"]
        if what not in seen and one.get("counts", {}).get("longest"):
            seen.add(what)
            for name, number, ms in one["counts"]["longest"][:5]:
                yield *what, f"`{name.replace('|', '/')}`", number, f"{ms:.2f}"


def page(
    records: Sequence[Record], name: str, profiles: Mapping[str, ProfileCase], cases: Mapping[str, Case]
) -> list[str]:
    """Lines of Markdown, of the records of one kind of machine."""
    machine = records[-1]["machine"]
    days = ", ".join(dict.fromkeys(str(one["call"])[:10] for one in records))
    failed = [
        (one["case"], one["contender"], one["took_s"], f"`{one['failed'].splitlines()[-1][:200]}`")
        for one in records
        if "failed" in one
    ]
    known = {"days": days, "json": name, "cuda": machine.get("cuda", "none")}
    return [
        *TEXT.format(**{**machine, **known}).splitlines(),
        *table(
            "case | iterations | largest difference to the CPU's losses | same as the other runs", [*right(records)]
        ),
        *table(
            "case | contender | a second | MFU | beside ours | allocated MiB | reserved | outside | kernels | "
            "host waits | idle",
            [*training(records)],
        ),
        *table(
            "case | predicted ms | took ms | error | predicted MiB | used MiB | error | used, not allocated",
            [*predicted(records, profiles, cases)],
        ),
        *table("case | contender | kernel | calls | ms", [*longest(records)]),
        *table("failed | contender | after s | why", failed),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--into", type=Path, default=ROOT / "benchmarks" / "results", metavar="FOLDER")
    arguments = parser.parse_args()
    records = read(arguments.folders)
    for device in dict.fromkeys(one["machine"]["device"] for one in records):
        alike = [one for one in records if one["machine"]["device"] == device]
        path = arguments.into / f"gpu-{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.md"
        lines = page(alike, path.with_suffix(".json").name, PROFILES, CASES)
        path.write_text("\n".join(lines) + "\n")
        path.with_suffix(".json").write_text(json.dumps(alike, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
