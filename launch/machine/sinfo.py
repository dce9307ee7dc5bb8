"""A node as sinfo lists it: its partition, what it has, its GPUs, and whether it takes jobs now. Nothing here acts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from launch.errors import LaunchError

PART = re.compile(r"(?<![a-z0-9])\d+g[._-]?(\d+)gb|(?<![a-z])mig(?![a-z])", re.IGNORECASE)
"""Within the type of a part of a GPU (MIG), such as a100_1g.5gb, 2g.20gb or a100-mig; the group is its memory."""
_MAKERS = re.compile(r"nvidia|geforce|quadro|tesla|instinct|amd|rtx|gtx")
TENSOR_TFLOPS = {
    **{"gb300": 2500, "b300": 2250, "gb200": 2500, "b200": 2250, "b100": 1750, "blackwell": 2250},
    **{"gh200": 989, "h200": 989, "h100": 989, "h800": 989, "h20": 148, "hopper": 989},
    **{"a100": 312, "a800": 312, "ampere": 312, "a40": 150, "a30": 165, "a10": 125, "a16": 72, "a2": 18},
    **{"l40s": 362, "l40": 181, "l20": 119, "l4": 121, "ada": 181},
    **{"v100": 125, "volta": 125, "t4": 65, "turing": 65, "t10": 65},
    **{"p100": 19, "pascal": 19, "p40": 12, "p6": 6, "p4": 5.5, "m60": 5, "m40": 7, "k80": 4, "k40": 4, "k20": 3.5},
    **{"5090": 210, "5080": 113, "5070": 62, "4090": 165, "4080": 97, "4070": 58, "4060": 30},
    **{"3090": 71, "3080": 60, "3070": 41, "3060": 26, "2080ti": 54, "2080": 40, "2070": 30, "2060": 26},
    **{"1080ti": 11, "1080": 9, "1070": 6.5, "1060": 4, "titan": 65, "titanv": 110, "titanxp": 12, "titanx": 11},
    **{"6000ada": 364, "5000ada": 261, "a6000": 155, "a5500": 136, "a5000": 111, "a4500": 95, "a4000": 77},
    **{"8000": 130, "6000": 130, "5000": 89, "4000": 57, "p6000": 12, "p5000": 9},
    **{"mi325x": 1307, "mi300x": 1307, "mi300": 981, "mi250": 362, "mi210": 181, "mi100": 185, "mi60": 29, "mi50": 26},
}
"""Dense 16-bit peaks of data sheets (fp32 ones where there is no 16-bit unit), by what a type of gres may contain. Only
their order counts here."""
UNKNOWN_TFLOPS = 40.0
"""The rate of a type that is not among them: an ordinary GPU of recent years."""


@dataclass(frozen=True, kw_only=True)
class Gres:
    """GPUs of a node, as Slurm counts them."""

    type: str | None
    count: int

    @property
    def is_part(self) -> bool:
        """Whether these are parts of GPUs (MIG), which the driver does not list as GPUs."""
        return self.type is not None and PART.search(self.type) is not None

    def __str__(self) -> str:
        return ":".join(["gpu", *([self.type] if self.type else []), str(self.count)])


def parse_gres(text: str) -> tuple[Gres, ...]:
    """`gpu:a100:4(S:0-1),mps:400`: the GPUs alone, those to ask for first. Without a number there is one.

    Whole GPUs come before parts, faster ones before slower ones, then larger ones, then the more numerous.
    """
    counts: Counter[str | None] = Counter()
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        name, *words = item.strip().split(":")
        if name == "gpu":
            count = int(words.pop()) if words and words[-1].isdigit() else 1
            counts[words[0] if words else None] += count
    return tuple(sorted((Gres(type=kind, count=count) for kind, count in counts.items() if count), key=_rank))


def _rank(gres: Gres) -> tuple[bool, float, int, int, str]:
    kind = gres.type or ""
    if gres.is_part:
        return True, 0, 0, -gres.count, kind
    memory = max(map(int, re.findall(r"(\d+)gb?(?![a-z])", kind.lower())), default=0)
    return False, -tensor_tflops(kind), -memory, -gres.count, kind


def tensor_tflops(kind: str) -> float:
    """How fast a whole GPU is, by the type that Slurm gives it, such as nvidia_a100-sxm4-80gb or rtx_3090."""
    words = re.findall(r"[a-z0-9]+", _MAKERS.sub(" ", kind.lower()))
    # `titan v` and `2080_ti` are one name; a letter may follow a name (v100l, a10g), a digit may not (a100, a1000).
    names = ["".join(pair) for pair in pairwise(words)] + words
    known = [key for key in TENSOR_TFLOPS for name in names if re.match(rf"{key}(?!\d)", name)]
    return TENSOR_TFLOPS[max(known, key=len)] if known else UNKNOWN_TFLOPS


UNUSABLE = {
    "down": "down",
    "drain": "drained",
    "drng": "draining",
    "fail": "failing",
    "futr": "not set up yet",
    "unk": "unknown to Slurm",
    "inval": "invalid, since it has less than slurm.conf says",
    "maint": "under maintenance",
    "resv": "reserved",
}
"""How sinfo's states of nodes begin that take no job for now, and what they mean. A node that is powered off to save
power (idle~), or powers up or down, does take jobs: Slurm wakes it."""
UNUSABLE_MARKS = {"*": "not answering Slurm", "$": "under maintenance"}
"""How such states end."""
EXCLUDED = "excluded"
RESERVED = frozenset({"reserved", "under maintenance"})
"""Among the meanings, those of reservations, which end by themselves."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A node in one of its partitions."""

    node: str
    partition: str
    default: bool
    state: str
    availability: str
    """Whether the partition is up; only `up` ones start jobs."""
    cpus: int
    memory_mb: int
    time_limit: str
    """The limit that Slurm writes, such as 1-00:00:00 or infinite."""
    yields: bool
    """Whether jobs of this partition give way to those of others."""
    gres: tuple[Gres, ...]
    features: frozenset[str]
    excluded: bool = False
    """Whether the user does not want it."""

    @property
    def usable(self) -> bool:
        return self.hindrance is None

    @property
    def is_open(self) -> bool:
        return self.availability == "up"

    @property
    def hindrance(self) -> str | None:
        """What the node is that keeps it from taking jobs now, such as `down`; None: it takes some."""
        if self.excluded:
            return EXCLUDED
        for begin, meaning in UNUSABLE.items():
            if self.state.startswith(begin):
                return meaning
        for mark, meaning in UNUSABLE_MARKS.items():
            if self.state.endswith(mark):
                return meaning
        return None if self.is_open else f"in a partition that is {self.availability}"


def parse(text: str) -> list[Membership]:
    """Lines of `slurm_commands.NODES_FORMAT`. Raises LaunchError: a line is none."""
    rows = [line.strip().split("|", 12) for line in text.splitlines() if line.strip()]
    if wrong := next((row for row in rows if len(row) != 13), None):
        raise LaunchError(f"cannot parse a line of sinfo: {'|'.join(wrong)}")
    top = max((int(row[9]) for row in rows if row[9].isdigit()), default=0)
    return [_membership(row, top) for row in rows]


def _membership(row: Sequence[str], top: int) -> Membership:
    node, partition, marked, availability, state, cpus, most, memory, limit, tier, preempt, gres, features = row
    of_node = int(re.sub(r"\D.*", "", cpus) or 1)
    return Membership(
        node=node,
        partition=partition,
        default=marked.endswith("*"),
        state=state.lower(),
        availability=availability.lower(),
        cpus=min(of_node, int(most)) if most.isdigit() and int(most) else of_node,
        memory_mb=int(re.sub(r"\D.*", "", memory) or 0),
        time_limit=limit,
        yields=preempt.lower() != "off" and tier.isdigit() and int(tier) < top,
        gres=parse_gres(gres),
        features=frozenset(word for word in features.split(",") if word and word != "(null)"),
    )
