"""Profiles: every shipped one reads, and what is wrong with one is told in one message."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from conf.schema.experiment import Precision
from fasop.costs.layers import layer_times
from fasop.costs.network.links import Link
from fasop.costs.profiles import files
from fasop.costs.profiles.doubts import profile_doubts
from fasop.costs.profiles.files import read_profile
from fasop.costs.profiles.profile import Cost, LayerProfile, ModelCosts, Shape
from fasop.costs.profiles.profile_text import profile_text
from fasop.search.inputs import read

SHIPPED = sorted(path.stem for path in files.FOLDER.glob("*.yaml"))
PROFILE = """gpu: X
source: a test
models:
  xl: {hidden: 1600, heads: 16, sequence_length: 1024, vocab_size: 50257}
optimizer_ns_per_parameter: {fp16: 0.3}
within:
  p2p: {latency_us: 5, gbit_per_s: 100, us_by_bytes: {1024: 5.1}}
costs:
  - model: xl
    tensor: 1
    micro_batch_size: 1
    precision: fp16
    embedding: {forward: 1, backward: 50}
    layer: {forward: 1, backward: 2}
    head: {forward: 1, backward: 2}
  - model: xl
    tensor: 2
    micro_batch_size: 1
    precision: fp16
    embedding: {forward: 1, backward: 1}
    layer: {forward: 1.1, backward: 2}
    head: {forward: 1, backward: 2}
  - model: xl
    tensor: 1
    micro_batch_size: 4
    precision: fp16
    embedding: {forward: 1, backward: 1}
    layer: {forward: 3, backward: 6}
    head: {forward: 1, backward: 2}
"""
FIRST, SECOND, THIRD = "layer: {forward: 1, backward: 2}", "layer: {forward: 1.1, backward: 2}", "layer: {forward: 3,"
OF_FIRST = r"model=xl parallel\.tensor=1 parallel\.micro_batch_size=1 train\.precision=fp16"


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_profile_reads_and_says_where_it_is_from(name: str) -> None:
    shipped = files.read_profile(name)
    assert shipped.source
    for costs in shipped.costs:
        assert 0 < costs.parts["layer"].forward < costs.parts["layer"].backward


def test_costs_are_found_by_the_models_shape_whatever_its_name_and_layers() -> None:
    xl = compose(["experiment=seed_a10x8"]).model
    shipped = files.read_profile("a10")
    deeper = replace(xl, name="deep", layers=96)
    assert shipped.points(deeper, Precision.fp16) == shipped.points(xl, Precision.fp16) != []
    assert shipped.points(replace(xl, hidden=3200), Precision.fp16) == shipped.points(xl, Precision.fp32) == []


@pytest.mark.parametrize("name", [*SHIPPED, "written"])
def test_what_is_written_of_a_profile_reads_as_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "written":
        (tmp_path / "written.yaml").write_text(PROFILE)
        monkeypatch.setattr(files, "FOLDER", tmp_path)
    read = files.read_profile(name)
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    (tmp_path / "again.yaml").write_text(profile_text(read, "A comment.\nOf two lines."))
    assert files.read_profile("again") == read


def test_an_unknown_profile_is_told_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=f"no profile 'nope' in .*; the known ones are {', '.join(SHIPPED)}; "):
        files.read_profile("nope")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("gpu: X\n", "", r"is not a profile: gpu is not set"),
        ("source: a test\n", "", "is not a profile: source is not set"),
        ("    precision: fp16\n", "", r"is not a profile: costs\[0\]\.precision is not set"),
        ("precision: fp16", "precision: fp8", r"is not a profile: .*precision: .*fp8"),
        (FIRST, FIRST.replace("2", "soon"), r"is not a profile: layer\.backward: .*soon"),
        ("    head:", "    tail:", "is not a profile: .*tail"),
        ("    head:", "    hed:", r"is not a profile: .*hed.*; did you mean head\? \(docs/profile.md\)"),
        (FIRST, FIRST.replace("2", "-1"), OF_FIRST + r": layer\.backward=-1\.0 must be above 0"),
        (FIRST, FIRST.replace("1", "0"), OF_FIRST + r": layer\.forward=0\.0 must be above 0"),
        (FIRST, FIRST.replace("1", ".nan"), OF_FIRST + r": layer\.forward=nan must be above 0"),
        (FIRST, FIRST.replace("2", ".inf"), OF_FIRST + r": layer\.backward=inf must be above 0"),
        ("tensor: 2", "tensor: 1", OF_FIRST + " occurs twice"),
        ("tensor: 2", "tensor: 0", "tensor must be at least 1"),
        ("  xl: {hidden: 1600", "  x: {hidden: 1600", r"costs are for model xl, but models has no such key"),
        ("heads: 16", "heads: 0", r"models\.xl\.heads=0 must be at least 1"),
        ("{fp16: 0.3}", "{fp16: -1}", r"optimizer_ns_per_parameter\.fp16=-1\.0 must be"),
        ("gbit_per_s: 100", "gbit_per_s: 0", r"within\.p2p\.gbit_per_s=0\.0 must be above 0"),
        ("1024: 5.1", "1024: .nan", r"within\.p2p\.us_by_bytes: 1024: nan must be"),
        (PROFILE[PROFILE.index("costs:") :], "costs: []\n", "costs of X is empty"),
        ("gpu: X", "gpu: X: Y", "not YAML: mapping values are not allowed here"),
        ("gpu: X", "gpu: \udcff", "not a text file: byte"),
    ],
    ids=[
        *("no-type", "no-source", "no-precision", "unknown-precision", "no-number", "unknown-key", "misspelt-key"),
        *("negative", "zero", "nan", "infinite"),
        *("twice", "no-tensor", "unknown-model", "no-heads", "optimizer", "link", "message", "no-costs"),
        *("no-yaml", "bytes"),
    ],
)
def test_a_bad_profile_is_one_message_with_file_place_and_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, told: str
) -> None:
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    (tmp_path / "good.yaml").write_text(PROFILE)
    assert len(files.read_profile("good").costs) == 3
    assert old in PROFILE
    (tmp_path / "bad.yaml").write_bytes(PROFILE.replace(old, new, 1).encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=told) as raised:
        files.read_profile("bad")
    assert str(raised.value).startswith(str(tmp_path / "bad.yaml"))
    assert "\n" not in str(raised.value)


HEAD = "head: {forward: 1, backward: 2}"


@pytest.mark.parametrize(
    ("old", "new", "doubt"),
    [
        (
            HEAD,
            HEAD.replace("2", "8.8"),
            OF_FIRST + r": head\.backward=8\.8 ms is 8\.8 times forward \(1 ms\), but usual is 0\.125",
        ),
        (
            FIRST,
            FIRST.replace("2", "10"),
            OF_FIRST + r": layer\.backward=10 ms is 10 times forward \(1 ms\), but usual is 0\.7",
        ),
        (
            SECOND,
            SECOND.replace("1.1", "100").replace("2", "200"),
            r"tensor=2 .*layer\.forward=100 ms is 100 times that of tensor 1 \(1 ms\), but usual is 0\.4 to 30;",
        ),
        (SECOND, SECOND.replace("1.1", "0.3").replace("2", "0.6"), r"tensor=2 .*=0\.3 ms is 0\.3 times that of"),
        (THIRD, THIRD.replace("3", "0.3"), r"size=4 .*: layer\.backward=6 ms is 20 times forward"),
        ("forward: 3, backward: 6", "forward: 90, backward: 90", r"size=4 .*=90 ms is 90 times that of micro-batch 1"),
        (
            "forward: 3, backward: 6",
            "forward: 0.9, backward: 6",
            r"size=4 .*=0\.9 ms is 0\.9 times that of micro-batch 1",
        ),
        (
            "forward: 3, backward: 6",
            "forward: 6.2, backward: 9",
            r"size=4 .*=6\.2 ms is 6\.2 times that of micro-batch 1",
        ),
        (HEAD, "head: {forward: 1000000, backward: 2000000}", r"head\.forward=1e\+06 ms is more than 10 minutes"),
        ("{fp16: 0.3}", "{fp16: 20000}", r"optimizer_ns_per_parameter\.fp16=20000 is more than 10000 nanoseconds"),
    ],
    ids=[
        *(
            "head",
            "backward",
            "tensor",
            "too-good-tensor",
            "slip-of-a-digit",
            "batch",
            "faster-with-more",
            "not-in-proportion",
            "unit",
            "optimizer",
        ),
    ],
)
def test_figures_that_are_hard_to_believe_are_read_with_a_doubt_that_has_the_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, doubt: str
) -> None:
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    (tmp_path / "odd.yaml").write_text(PROFILE)
    assert profile_doubts(files.read_profile("odd")) == []
    assert old in PROFILE
    (tmp_path / "odd.yaml").write_text(PROFILE.replace(old, new, 1))
    odd = files.read_profile("odd")
    assert len(odd.costs) == 3
    assert [one for one in profile_doubts(odd) if re.search(doubt, one)]


@pytest.mark.parametrize(("last_ms", "odd"), [(3.4, False), (2.2, True)], ids=["fuller", "bent"])
def test_a_micro_batch_whose_further_samples_cost_nearly_nothing_is_doubted(last_ms: float, odd: bool) -> None:
    """1.0 and 1.8 ms with one sample and two: two more take 1.6 ms in proportion, and hardly less than half of it."""

    def costs(size: int, forward: float) -> ModelCosts:
        part = Cost(forward=forward, backward=2 * forward)
        return ModelCosts(
            model="xl", tensor=1, micro_batch_size=size, precision="fp16", embedding=part, layer=part, head=part
        )

    measured = [costs(1, 1.0), costs(2, 1.8), costs(4, last_ms)]
    profile = LayerProfile(
        gpu="A10",
        source="here",
        models={"xl": Shape(hidden=8, heads=1, sequence_length=8, vocab_size=8)},
        costs=measured,
    )
    found = profile_doubts(profile)
    assert [one.split("; ")[0] for one in found if "layer.forward" in one] == [
        f"{measured[2]}: layer.forward={last_ms:g} ms: each sample beyond micro-batch 2 takes 0.2 ms, but 0.8 ms "
        f"beyond micro-batch 1"
    ] * odd
    assert bool(found) == odd


def test_doubts_about_another_model_are_not_those_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    (tmp_path / "odd.yaml").write_text(PROFILE.replace(HEAD, HEAD.replace("2", "8.8"), 1))
    xl = compose(["experiment=seed_a10x8"]).model
    assert len(profile_doubts(files.read_profile("odd"), xl)) == 1
    assert profile_doubts(files.read_profile("odd"), replace(xl, hidden=3200)) == []


def test_a_profile_has_every_kind_of_block_by_its_name(tmp_path: Path) -> None:
    """A T5's, as tdpp writes it; without a kind it has no times of the model."""
    inputs = read(["model=t5-tiny", "cluster=a10x8", "parallel.global_batch_size=64", "train.precision=fp16"])
    model, kinds = inputs.training.model, inputs.training.blocks.every_kind
    assert kinds == ("embedding", "encoder", "encoder_norm", "decoder_embedding", "decoder", "head")
    parts = {kind: Cost(forward=1.0 + number, backward=2.0 + number) for number, kind in enumerate(kinds)}
    costs = ModelCosts.of(parts, model="t5", tensor=1, micro_batch_size=1, precision=Precision.fp16)
    profile = LayerProfile(gpu="A10", source="a test", models={"t5": Shape.of(model)}, costs=[costs])
    path = tmp_path / "some.yaml"
    path.write_text(profile_text(profile, "a comment"))
    again = read_profile(str(path))
    assert again == profile
    assert again.points(model, Precision.fp16)[0].parts == parts
    training = replace(inputs.training, parallel=replace(inputs.training.parallel, micro_batch_size=1))
    times = layer_times(inputs.kinds[0].gpu, again, training, Link(latency_s=0.0, s_per_byte=0.0))
    assert [round(1e3 * one.forward, 6) for one in times.layers] == [2, 3 + 4 + 5, 5]
    assert (times.embedding.forward, times.head.forward) == (1e-3, 6e-3)
    longer = replace(model, layers=model.layers + 3, decoder_layers=7)
    assert again.points(longer, Precision.fp16) == again.points(model, Precision.fp16)
    assert again.points(replace(model, decoder_sequence_length=32), Precision.fp16) == []
    lacking = {kind: cost for kind, cost in parts.items() if kind != "decoder"}
    without = replace(profile, costs=[replace(costs, blocks={k: v for k, v in lacking.items() if k in costs.blocks})])
    assert without.points(model, Precision.fp16) == []
