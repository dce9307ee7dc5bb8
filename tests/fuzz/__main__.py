"""python -m tests.fuzz [KIND ...] [--count N] [--seed S]: tries random inputs, and counts what became of them.

The only allowed outcomes are success, and one message with an exit code; others are printed with the seed that draws
them again: `python -m tests.fuzz KIND --seed S --count 1`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections import Counter

from tests.fuzz.kinds import KINDS, trials
from tests.fuzz.trial import GOOD, Outcome

SHOWN = 1500
"""Characters of a failure's output."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Try random inputs.")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; without any all of them")
    parser.add_argument("--count", type=int, default=1000, help="of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first (default: %(default)s)")
    asked = parser.parse_args()
    if unknown := set(asked.kinds) - set(KINDS):
        parser.error(f"there is no kind {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    failed = False
    for kind in asked.kinds or KINDS:
        counts: Counter[Outcome] = Counter()
        begun = time.monotonic()
        for seed, trial in trials(kind, asked.seed, asked.count):
            counts[trial.outcome] += 1
            if trial.outcome not in GOOD:
                failed = True
                words = shlex.join(word if len(word) < 200 else f"{word[:200]}…" for word in trial.argv)
                print(f"--- {trial.outcome}: python -m tests.fuzz {kind} --seed {seed} --count 1\ntdpp {words}")
                print(trial.printed[-SHOWN:].encode("unicode_escape").decode().replace("\\n", "\n"), flush=True)
        told = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        print(f"{kind}: {counts.total()} tried in {time.monotonic() - begun:.0f} s: {told}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
