"""docs/accuracy.md shows what predictions are to reach, and is of the model as it is now."""

from __future__ import annotations

import re

import pytest

from benchmarks import accuracy
from benchmarks.accuracy import MEAN, PAGE, WORST, Outcome, published, written
from benchmarks.accuracy_cases import ENGINE, MODULES, PUBLISHED, REHEARSALS, Ends, stood_for
from fasop.costs.profiles.profile import Cost
from fasop.simulation.predict import predict, predict_plan

PARTS = ("engine", "computing", "modules", "rehearsed", "published")
ENDS = Ends(pass_ms=Cost(forward=0.75, backward=0.5), optimizer_ns=3.25)


def rows(part: str) -> dict[str, list[str]]:
    """Cells of the page's table, by the run's name."""
    found = re.search(rf"<!-- {part} -->\n(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    lines = [line.strip("| ").split(" | ") for line in found[1].splitlines() if line.startswith("| ")]
    return {line[0]: line[1:] for line in lines[1:]}


def test_runs_of_the_engine_are_predicted_as_well_as_promised() -> None:
    errors = [float(cells[3]) / float(cells[4]) - 1 for cells in rows("engine").values()]
    assert len(errors) >= 12
    assert sum(map(abs, errors)) / len(errors) <= MEAN
    assert max(map(abs, errors)) <= WORST


def test_the_plans_are_of_2_to_16_stages_and_have_both_orders() -> None:
    cells = rows("engine").values()
    assert {2, 16} <= {int(sizes.split(" x ")[0]) for sizes, *_ in cells}
    assert {"`fast+slow`", "`slow+fast`"} <= {nodes for _, _, nodes, *_ in cells}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["engine", "rehearsed", "published"])
def test_the_page_is_of_the_model_as_it_is_now(part: str) -> None:
    """Or it is to be made anew: python -m benchmarks.accuracy."""
    if part == "engine":
        ends = _ends(PAGE.read_text())
        now = {case.name: predict_plan(stood_for(case, ends=ends)).iteration_s for case in ENGINE}
    elif part == "rehearsed":
        now = {case.name: predict(case.experiment).iteration_s for case in REHEARSALS}
    else:
        now = {one.name: one.predicted_s for one in map(published, PUBLISHED)}
    told = {name: float(cells[3]) / 1e3 for name, cells in rows(part).items()}
    assert told == pytest.approx(now, rel=0.01)


def _ends(page: str) -> Ends:
    """As `awake` has told them."""
    told = r"took (\S+) ms forward and (\S+) ms backward for a micro-batch, and (\S+) ns for a parameter"
    found = re.search(told, " ".join(page.split()))
    assert found is not None
    forward, backward, optimizer_ns = map(float, found.groups())
    return Ends(pass_ms=Cost(forward=forward, backward=backward), optimizer_ns=optimizer_ns)


def test_new_tables_replace_the_old_ones_and_nothing_else() -> None:
    one = Outcome(
        name="one", sizes="2 x 1 x 1", partition="1-1", nodes="slow", predicted_s=1.0, measured_s=1.25, load=0.5
    )
    page = written(PAGE.read_text(), {part: [one] for part in PARTS}, ENDS)
    assert page.count("| one | 2 x 1 x 1 | `1-1` | `slow` | 1000 | 1250 | -20.0% |") == len(PARTS)
    tables = re.compile(r"(<!-- \w+ -->\n).*?(<!-- end -->)", re.DOTALL)
    assert _ends(page) == ENDS
    assert tables.sub(r"\1\2", page) == tables.sub(r"\1\2", PAGE.read_text())
    with pytest.raises(ValueError, match="the page has no part <!-- other -->"):
        written(page, {"other": [one]}, ENDS)


def test_each_run_of_a_module_has_the_median_error_of_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is of one round, whichever that is for the other runs."""
    took = {"a": iter((1.25, 0.8, 1.0)), "b": iter((0.9, 1.0, 0.8))}

    def of_round(*_: object) -> list[Outcome]:
        shape = {"sizes": "1 x 1 x 1", "partition": "2", "nodes": "local"}
        return [Outcome(name=name, predicted_s=1.0, measured_s=next(left), **shape) for name, left in took.items()]

    monkeypatch.setattr(accuracy, "_round_of_module", of_round)
    model, cases = next(iter(MODULES.items()))
    found = accuracy.of_module(model, cases, "")
    assert [(one.name, one.measured_s) for one in found] == [("a", 1.0), ("b", 0.9)]
