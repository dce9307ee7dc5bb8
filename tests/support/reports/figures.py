"""The figures of a page, as its scripts read them."""

from __future__ import annotations

import json
import re
from typing import Any


def drawn(page: str) -> list[dict[str, Any]]:
    """Data and layout of each, in their order."""
    found = re.findall(r'<div class="plot"[^>]*></div><script type="application/json">(.*?)</script>', page)
    return [json.loads(text) for text in found]


def course_of(page: str) -> dict[str, Any]:
    """What the charts of a page's course are drawn from."""
    found = re.search(r'<script type="application/json" id="course-data">(.*?)</script>', page)
    assert found is not None, "no course"
    content: dict[str, Any] = json.loads(found[1])
    return content


def lines_of(course: dict[str, Any]) -> dict[str, list[tuple[int, float | None]]]:
    """Its points: iteration and value, by the key of the chart and the name of the line."""
    return {
        f"{chart['key']}/{line['name']}": [*zip(course["places"][line["at"]], line["y"], strict=True)]
        for chart in course["charts"]
        for line in chart["lines"]
    }
