"""What a launcher asks the ranks of `megatron_ext.profile` to measure."""

from __future__ import annotations

import json
import math
import os
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from megatron_ext.contract.worker import PROFILE


class Request(NamedTuple):
    """What is to be measured."""

    padded_vocab_sizes: Dict[int, int]
    """The padded vocabulary for each tensor size."""
    micro_batch_sizes: List[int]
    seconds: float
    """How long passes last for a tensor size and micro-batch, at most, if their times do not become known before."""
    room_from: Optional[int] = None
    """The micro-batch from which on larger ones are tried, until there is no room for the whole model's."""
    memory_bytes: Optional[Dict[str, int]] = None
    """What a rank has, by group of nodes, where no allocator says when there is no more."""
    streams: Sequence[int] = ()
    """Numbers of copies of the whole model beside each other on a rank, upwards; none: that is not measured."""
    earlier: Optional[str] = None
    """The folder of a job that ended too early, whose finished measurements count."""
    killed: Sequence[Dict[str, Any]] = ()
    """Sizes with which Linux killed ranks of such jobs, as notes have them in `at`: these do not fit."""

    @classmethod
    def read(cls) -> Request:
        content = json.loads(os.environ[PROFILE])
        sizes = {int(tensor): int(padded) for tensor, padded in content["padded_vocab_sizes"].items()}
        batches, seconds = list(content["micro_batch_sizes"]), float(content["seconds"])
        others = {key: content[key] for key in cls._field_defaults if key in content}
        return cls(sizes, batches, seconds, **others)

    def least_killed(self, what: str, **of: int) -> float:
        """Samples of a GPU from which on a size of this kind does not fit, as far as is known."""
        alike = [one for one in self.killed if one["what"] == what and of.items() <= one.items()]
        return min((one["samples"] for one in alike), default=math.inf)
