"""`cluster.links`: a table of pairs of node groups, and one message for each way to write it wrongly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conf.compose import compose, config_text, read_experiment
from conf.errors import ConfigError
from conf.schema.values.links import PairLink, only, pairs

HET = "experiment=seed_a100x1_a10x7"
BACK = "gpu2: {hgx: {gbit_per_s: 5}}"


def table(text: str) -> str:
    return f"+cluster.links={{{text}}}"


def test_a_table_has_rows_that_send_and_columns_that_receive() -> None:
    words = table(
        f"hgx: {{gpu2: {{gbit_per_s_by_bytes: {{65536: 2, 1048576: 8.5}}, latency_us: 50}}}}, {BACK[:-1]}, "
        "gpu2: {latency_us: 3}}"
    )
    one = compose([HET, words])
    assert pairs(one.cluster.links, one.cluster.groups) == {
        ("hgx", "gpu2"): PairLink(gbit_per_s_by_bytes=((65536, 2.0), (1048576, 8.5)), latency_us=50.0),
        ("gpu2", "hgx"): PairLink(gbit_per_s=5.0),
        ("gpu2", "gpu2"): PairLink(latency_us=3.0),
    }
    assert only(one.cluster.links, ["gpu2"]) == {"gpu2": {"gpu2": {"latency_us": 3}}}


def test_a_runs_own_configuration_has_the_table(tmp_path: Path) -> None:
    one = compose([HET, table(f"hgx: {{gpu2: {{gbit_per_s_by_bytes: {{65536: 2, 1048576: 8}}}}}}, {BACK}")])
    (tmp_path / "config.yaml").write_text(config_text(one))
    assert read_experiment(tmp_path / "config.yaml") == one


BROKEN = {
    "a row that is not a group": ("hxg: {gpu2: {gbit_per_s: 5}}", "cluster.links.hxg: 'hxg' is not a node group; "),
    "a column that is not a group": (
        "gpu2: {hgx: {gbit_per_s: 5}, gpu3: {gbit_per_s: 5}}",
        "cluster.links.gpu2.gpu3: 'gpu3' is not a node group; cluster.groups has hgx, gpu2; correct the name",
    ),
    "one direction alone": (
        BACK,
        "cluster.links.gpu2.hgx has no counterpart cluster.links.hgx.gpu2: a table needs both directions of a pair; "
        "add cluster.links.hgx.gpu2",
    ),
    "a row that is not a table": (
        "hgx: 5",
        "cluster.links.hgx=5 must be a group of keys, such as {hgx: {gbit_per_s: 10}}",
    ),
    "an entry that is none": ("hgx: {hgx: 5}", "cluster.links.hgx.hgx=5 must be a group of keys, such as {gbit_per_s"),
    "an empty entry": ("hgx: {hgx: {}}", "cluster.links.hgx.hgx is empty: give it a figure, such as gbit_per_s"),
    "an unknown key": (
        "hgx: {hgx: {gbps: 5}}",
        "cluster.links.hgx.hgx.gbps is not a key of a link; those are gbit_per_s, gbit_per_s_by_bytes, latency_us",
    ),
    "no bandwidth": ("hgx: {hgx: {gbit_per_s: 0}}", "cluster.links.hgx.hgx.gbit_per_s=0.0 must be a number above 0"),
    "a negative one": (
        "hgx: {hgx: {gbit_per_s: -1}}",
        "cluster.links.hgx.hgx.gbit_per_s=-1.0 must be a number above 0",
    ),
    "a word": ("hgx: {hgx: {gbit_per_s: fast}}", "cluster.links.hgx.hgx.gbit_per_s=fast must be a number"),
    "a number of many digits": (
        f"hgx: {{hgx: {{gbit_per_s: 1{'0' * 400}}}}}",
        "cluster.links.hgx.hgx.gbit_per_s has a number of 401 digits; it must be at most 1e+09",
    ),
    "a size of many digits": (
        "hgx: {hgx: {gbit_per_s_by_bytes: {" + "9" * 400 + ": 1, 2: 2}}}",
        "cluster.links.hgx.hgx.gbit_per_s_by_bytes: size=" + "9" * 400 + " must be at most 1099511627776",
    ),
    "a negative latency": ("hgx: {hgx: {latency_us: -1}}", "cluster.links.hgx.hgx.latency_us=-1.0 must be a number"),
    "both spellings": (
        "hgx: {hgx: {gbit_per_s: 5, gbit_per_s_by_bytes: {1: 2, 3: 4}}}",
        "cluster.links.hgx.hgx gives both gbit_per_s=5 and gbit_per_s_by_bytes: keep the second if bandwidth "
        "depends on the message size, otherwise the first",
    ),
    "one point": (
        "hgx: {hgx: {gbit_per_s_by_bytes: {4096: 2}}}",
        "cluster.links.hgx.hgx.gbit_per_s_by_bytes has 1 point, but needs at least two",
    ),
    "no point": (
        "hgx: {hgx: {gbit_per_s_by_bytes: {}}}",
        "cluster.links.hgx.hgx.gbit_per_s_by_bytes has 0 points, but needs at least two",
    ),
    "sizes that fall": (
        "hgx: {hgx: {gbit_per_s_by_bytes: {4096: 2, 1024: 1}}}",
        "cluster.links.hgx.hgx.gbit_per_s_by_bytes: sizes must increase, but 1024 follows 4096; sort the points by "
        "size",
    ),
    "times that fall": (
        "hgx: {hgx: {gbit_per_s_by_bytes: {1024: 1, 2048: 9}}}",
        "cluster.links.hgx.hgx.gbit_per_s_by_bytes: 2048 bytes at 9 Gbit/s would not take longer than 1024 bytes at 1; "
        "correct a bandwidth, or leave a point out",
    ),
    "a point without bandwidth": (
        "hgx: {hgx: {gbit_per_s_by_bytes: {1024: 0, 2048: 9}}}",
        "cluster.links.hgx.hgx.gbit_per_s_by_bytes.1024=0.0 must be a number above 0",
    ),
    "a size that is none": (
        "hgx: {hgx: {gbit_per_s_by_bytes: {1k: 1, 2k: 2}}}",
        "cluster.links.hgx.hgx.gbit_per_s_by_bytes.1k must be a message's size in bytes, such as 1048576",
    ),
    "a list of points": (
        "hgx: {hgx: {gbit_per_s_by_bytes: [1, 2]}}",
        "cluster.links.hgx.hgx.gbit_per_s_by_bytes=[1, 2] must be a group of keys, such as {65536: 5, 16777216: 20}",
    ),
}


@pytest.mark.parametrize(("text", "message"), BROKEN.values(), ids=BROKEN)
def test_a_wrong_table_is_one_message(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        compose([HET, table(text)])
    assert "\n" not in str(error.value)
