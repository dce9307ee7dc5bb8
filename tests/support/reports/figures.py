"""The figures of a page, as its scripts read them."""

from __future__ import annotations

import json
import re
from typing import Any


def drawn(page: str) -> list[dict[str, Any]]:
    """Data and layout of each, in their order."""
    found = re.findall(r'<div class="plot"[^>]*></div><script type="application/json">(.*?)</script>', page)
    return [json.loads(text) for text in found]
