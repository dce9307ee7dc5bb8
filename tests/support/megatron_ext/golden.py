"""What megatron-core wrote for a small corpus; tests/data_prep/golden/README.md says how."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.support import ROOT

PREFIX = ROOT / "tests" / "data_prep" / "golden" / "tiny"
DOCUMENTS = range(2, 25)
SEQUENCE_LENGTH = 16
SEED = 1234


def golden_documents() -> list[NDArray[np.int64]]:
    """Of 1 to 300 tokens, ids 0 to 256."""
    random = np.random.RandomState(7)
    return [random.randint(0, 257, length) for length in (*random.randint(1, 60, 23), 300, 1)]
