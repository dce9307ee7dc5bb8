"""A rule of plan.json: it says which values do not go together, of those that are each known to be right."""

from __future__ import annotations

from typing import Any, Callable, Iterator, List, Mapping, Tuple

Values = Mapping[str, Any]
Faults = Iterator[Tuple[str, Any, str]]
"""Keys, their values and what these must be."""
Rules = List[Tuple[Tuple[str, ...], Callable[[Values], Faults]]]
"""By the keys that they need."""
GRID = ("tensor", "data", "pipeline")
"""The keys of a layout in which all stages are alike."""
