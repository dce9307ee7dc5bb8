"""A timeline's table as the records that it was made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reports.readers.events import EVENT, Timeline


def records(timeline: Timeline) -> NDArray[Any]:
    """(events,) of EVENT; names index `timeline.names`."""
    found = np.zeros(len(timeline.events), EVENT)
    for key, column in timeline.events.items():
        found[key] = column.cat.codes if key == "name" else column
    return found
