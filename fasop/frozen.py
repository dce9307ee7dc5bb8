"""Frozen dataclasses with other values: `dataclasses.replace` in 40 % of its time. A search makes thousands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import replace as replace
else:
    import dataclasses
    from functools import cache

    @cache
    def _fields(kind: type) -> dict[str, None]:
        """The names of a class's fields; none where its objects are more than the values of these."""
        fields = dataclasses.fields(kind)
        plain = all(one.init for one in fields) and not hasattr(kind, "__slots__")
        return dict.fromkeys(one.name for one in fields) if plain else {}

    def replace(one: Any, /, **changes: Any) -> Any:
        kind = type(one)
        names = _fields(kind)
        if not names or not changes.keys() <= names.keys():
            return dataclasses.replace(one, **changes)
        known = vars(one)
        values = dict(known) if len(known) == len(names) else {name: known[name] for name in names}
        values.update(changes)
        made = object.__new__(kind)
        object.__setattr__(made, "__dict__", values)
        if hasattr(kind, "__post_init__"):
            made.__post_init__()
        return made
