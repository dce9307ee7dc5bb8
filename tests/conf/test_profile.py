"""Layer-cost profiles: every shipped one reads, and what is wrong with one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf import profile
from conf.errors import ConfigError

SHIPPED = sorted(path.stem for path in profile.FOLDER.glob("*.yaml"))
COSTS = """gpu: X
costs:
  - model: xl
    tensor: 1
    micro_batch_size: 1
    embedding: {forward: 1, backward: 1}
    layer: {forward: 1, backward: LAYER}
    head: {forward: 1, backward: 1}
"""


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_profile_reads(name: str) -> None:
    read = profile.read_profile(name)
    assert read.costs
    for costs in read.costs:
        assert read.of(costs.model, costs.tensor, costs.micro_batch_size) is costs
        assert 0 < costs.layer.forward < costs.layer.backward


def test_an_unknown_profile_is_told_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=f"no profile 'nope' in .*; there are: {', '.join(SHIPPED)}"):
        profile.read_profile("nope")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (COSTS.replace("LAYER", "-1"), r"backward=-1\.0 must be between 0 and 60000 milliseconds"),
        (COSTS.replace("LAYER", "soon"), "is not a profile: .*soon"),
        (COSTS.replace("LAYER", "1").replace("    head:", "    tail:"), "is not a profile: .*tail"),
        ("gpu: X\n", "is not a profile: .*costs"),
        (f"optimizer_ns_per_parameter: -1\n{COSTS.replace('LAYER', '1')}", r"optimizer_ns_per_parameter=-1\.0 must be"),
    ],
    ids=["negative", "no-number", "unknown-key", "no-costs", "negative-optimizer"],
)
def test_a_bad_profile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str) -> None:
    monkeypatch.setattr(profile, "FOLDER", tmp_path)
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=told):
        profile.read_profile("bad")
