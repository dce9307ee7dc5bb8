"""`tdpp profile` and links between node groups: what is measured, what it says of them, and a search that reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from conf.compose import compose
from conf.errors import ConfigError, OutputError
from conf.schema.values.links import PairLink, pairs
from fasop.costs.network.links import transfer_s
from fasop.costs.profiles import files as profiles
from launch.cli import main
from launch.profile.arguments import Arguments
from launch.profile.findings import Found
from launch.profile.pair_links import entry, measured_table, override, write_table

SIZES = [1024 * 4**number for number in range(8)]
ONE = {"a": {"b": {"gbit_per_s": 8.0}}, "b": {"a": {"gbit_per_s": 9.0}}}
HET = "experiment=seed_a100x1_a10x7"
LINKS = {"hgx": {"gpu2": {"gbit_per_s": 8.0}}, "gpu2": {"hgx": {"gbit_per_s_by_bytes": {1024: 1.0, 2048: 1.5}}}}


TWO_GROUPS = """
defaults: [/gpu@gpus.cpu: cpu, _self_]
name: two
groups:
  one: &node
    {gpu: cpu, gpus_per_node: 1, intra_gbit_per_s: 8, intra_latency_us: 9, inter_gbit_per_s: 8, inter_latency_us: 9}
  other: *node
"""


def times(latency_us: float, gbit_per_s: float, sharing: int = 1) -> dict[int, float]:
    return {size: latency_us + sharing * size * 8e-3 / gbit_per_s for size in SIZES}


def test_times_of_one_bandwidth_are_an_entry_of_one() -> None:
    assert entry(times(50, 10, sharing=4), 4) == {"gbit_per_s": 10.0, "latency_us": 50.0}


@pytest.mark.parametrize("sharing", [1, 4])
def test_times_that_no_bandwidth_explains_are_points_that_give_them_again(sharing: int) -> None:
    """2 Gbit/s up to 64 KiB, then 20 for what a message is longer."""
    slow = {size: min(size, 2**16) * 8e-3 / 2 + max(0, size - 2**16) * 8e-3 / 20 for size in SIZES}
    found = entry({size: 30 + sharing * us for size, us in slow.items()}, sharing)
    link = PairLink(gbit_per_s_by_bytes=tuple(found["gbit_per_s_by_bytes"].items()), latency_us=found["latency_us"])
    assert [*found["gbit_per_s_by_bytes"]] == [2**16, 2**20, 2**24]
    for size, us in slow.items():
        if size >= 2**16:
            seconds = transfer_s(link, size)
            assert seconds is not None
            assert found["latency_us"] + sharing * seconds * 1e6 == pytest.approx(30 + sharing * us, rel=0.06)


def found(links: dict[int, list[tuple[int, dict[int, float]]]]) -> Found:
    """Nodes of groups a, b and b with two ranks each."""
    ranks = {
        rank: {"p2p": [{"to": to, "us_by_bytes": {str(size): us for size, us in by.items()}} for to, by in sent]}
        for rank, sent in links.items()
    }
    nodes = (("gpu", (0, 1)), ("gpu", (2, 3)), ("gpu", (4, 5)))
    return Found(experiment=compose([]), nodes=nodes, ranks=ranks, groups=("a", "b", "b"))


def test_a_table_has_each_direction_of_each_pair_of_groups_that_was_measured() -> None:
    """And nothing of messages within nodes. A node's bandwidth is that of its ranks together."""
    there, back, own = times(10, 5), times(20, 2), times(5, 50)
    table = measured_table(
        found({0: [(1, own), (2, there)], 1: [(3, there)], 2: [(0, back), (4, own)], 3: [(1, back), (5, own)]})
    )
    assert table == {
        "a": {"b": {"gbit_per_s": 10.0, "latency_us": 10.0}},
        "b": {"a": {"gbit_per_s": 4.0, "latency_us": 20.0}, "b": {"gbit_per_s": 100.0, "latency_us": 5.0}},
    }


def test_a_table_is_a_word_that_the_command_line_takes() -> None:
    word = override(LINKS)
    assert word[0] == word[-1] == "'"
    one = compose([HET, word[1:-1]])
    assert pairs(one.cluster.links, one.cluster.groups)["gpu2", "hgx"].gbit_per_s_by_bytes == ((1024, 1.0), (2048, 1.5))


def test_a_file_is_read_into_the_configuration_and_added_to(tmp_path: Path) -> None:
    path = tmp_path / "links.yaml"
    write_table(path, {"hgx": {"hgx": {"gbit_per_s": 1.0}}}, Arguments(), "Made by: a test")
    assert path.read_text().startswith("# Made by: a test\nhgx:\n")
    write_table(path, LINKS, Arguments(add=True), "")
    cluster = compose([HET, f"cluster.links_file={path}"]).cluster
    assert cluster.links == {**LINKS, "hgx": {"hgx": {"gbit_per_s": 1.0}, **LINKS["hgx"]}}
    assert cluster.links_file is None  # a run has the table, whatever becomes of the file


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (None, [], "cannot be read: No such file or directory; 'tdpp profile links=FILE.yaml' writes such a file"),
        ("hgx: [", [], ": not YAML"),
        ("5", [], ": the file has no keys"),
        ("hgx: {gpu2: {gbit_per_s: 5}}", [], ": cluster.links.hgx.gpu2 has no counterpart"),
        ("{}", ["+cluster.links={hgx: {hgx: {gbit_per_s: 5}}}"], " are both given; give only one"),
    ],
    ids=["no-file", "no-yaml", "no-keys", "no-table", "both"],
)
def test_a_file_that_is_no_table_is_one_message(
    tmp_path: Path, text: str | None, words: list[str], message: str
) -> None:
    path = tmp_path / "links.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as error:
        compose([HET, f"cluster.links_file={path}", *words])
    assert f"cluster.links_file={path}{'' if text is None else message}" in str(error.value)
    assert message in str(error.value)


@pytest.mark.slow
def test_two_groups_are_measured_in_both_directions_and_a_search_reads_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profiles, "FOLDER", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.yaml").write_text(TWO_GROUPS)
    words = ["model=tiny", "model.hidden=32", "model.vocab_size=64", "cluster=two.yaml"]
    quick = ["tensor_sizes=1", "micro_batches=1", "seconds=0.1", "profile=mine"]
    # On busy cores large messages may by chance take no longer than small ones, which is an error.
    measure = ["profile", *words, *quick, "overwrite=true", "links=pairs.yaml"]
    assert any(main(measure) == 0 for _ in range(12))
    assert "written: pairs.yaml; cluster.links_file=pairs.yaml uses it" in capsys.readouterr().out
    table = yaml.safe_load((tmp_path / "pairs.yaml").read_text())
    assert {(row, column) for row, columns in table.items() for column in columns} == {
        ("one", "other"),
        ("other", "one"),
    }
    search = ["search", *words, "cluster.gpus.cpu.profile=mine", "parallel.global_batch_size=4", "top=1"]
    assert main([*search, "cluster.links_file=pairs.yaml"]) == 0
    with pytest.raises(OutputError, match=r"links=pairs\.yaml: pairs\.yaml already exists; .* add=true to add the"):
        from launch.commands import profile

        profile.main([*words, *quick, "overwrite=false", "links=pairs.yaml", "profile=other"])
