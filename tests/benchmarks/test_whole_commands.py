"""Commands are measured whole and equally often, and the pages show what was measured."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks.whole_commands import PUBLIC, RESULTS, ROOT, Command, compared, once, text, written

BUSY = "import time\nwhile time.process_time() < 0.2: pass"


def command(folder: Path, code: str, name: str = "one") -> Command:
    return Command(shown=name, argv=[sys.executable, "-c", code], folder=folder)


def test_what_a_process_and_its_children_take_counts(tmp_path: Path) -> None:
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}], check=True)"
    cpu_s, mib = once(command(tmp_path, child))
    assert cpu_s >= 0.2
    assert mib > 0


def test_commands_take_turns_equally_often(tmp_path: Path) -> None:
    def writing(name: str) -> Command:
        return command(tmp_path, f"open('turns', 'a').write('{name}')", name)

    found = compared([writing("a"), writing("b")], rounds=3)
    assert (tmp_path / "turns").read_text() == "ababab"
    assert [(one.command, len(one.cpu_s)) for one in found] == [("a", 3), ("b", 3)]


def test_a_command_that_fails_is_no_figure(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"the public tool\n(.*\n)*.*no such profile\n+ended with 1"):
        once(command(tmp_path, "raise SystemExit('no such profile')", "the public tool"))


@pytest.mark.parametrize("name", PUBLIC)
def test_pages_show_what_was_measured(name: str) -> None:
    found = json.loads(RESULTS.read_text())[name]
    page = (ROOT / PUBLIC[name][1]).read_text()
    assert text(found) in page
    assert written(page, found) == page
    turns = {len(row["cpu_s"]) for rows in found["comparisons"] for row in rows}
    assert turns == {found["rounds"]}
    assert all(re.match(r"tdpp ", rows[0]["command"]) and len(rows) > 1 for rows in found["comparisons"])


def test_a_page_without_the_part_is_refused() -> None:
    with pytest.raises(ValueError, match="the page has no part <!-- whole commands -->"):
        written("# A page", {})
