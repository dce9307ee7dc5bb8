"""No reader of the search waits for a pipe, reads a device, or takes more memory than such a file is worth."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launch.cli import main
from tests.support.fasop import quickstart

KINDS = {
    "device": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "pipe": (os.mkfifo, "not a regular file"),
    "sparse": (lambda path: (path.touch(), os.truncate(path, 1 << 40)), f"it has {1 << 40} bytes, more than"),
    "folder": (lambda path: path.mkdir(), "not a regular file"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "file",
    [
        *(
            "config.json",
            "cluster.json",
            "bucket/resnet50_bucket_size_profile.json",
            "comm/inter_comm_profile_data.txt",
        ),
        *("comp/64/server-P100/resnet50_64_2_comp_profile.json", "mem/64/server-V100/max_memory_profile_info.json"),
    ],
)
def test_of_a_profile_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, file: str) -> None:
    config = quickstart.write(tmp_path)
    make, message = KINDS[kind]
    (tmp_path / file).unlink()
    make(tmp_path / file)
    assert main(["search", f"iidp={config}", "parallel.global_batch_size=512"]) == 1
    said = capsys.readouterr().err
    assert message in said or "no such file" in said or "must contain one file" in said or kind == "folder"
    assert len(said.splitlines()) == 1
    assert file.partition("/")[0] in said


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "words", ["search graph={} levels=2 bandwidths=1e9", "simulate noise={}.csv", "search openseq2seq={}.py"]
)
def test_of_a_file_that_a_word_names(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, words: str) -> None:
    command, word, *others = words.format(tmp_path / "odd").split()
    KINDS[kind][0](Path(word.partition("=")[2]))
    assert main([command, word, *others]) == 1
    assert "/odd" in capsys.readouterr().err


@pytest.mark.parametrize("batch", [32 * 3_125_000, 10**26, 640 * 10**20])
def test_a_batch_that_no_solver_could_share_out_ends_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], batch: int
) -> None:
    config = quickstart.write(tmp_path)
    assert main(["search", f"iidp={config}", f"parallel.global_batch_size={batch}"]) == 1
    assert f"parallel.global_batch_size={batch} " in capsys.readouterr().err


@pytest.mark.parametrize(
    "bandwidth, passes_ms, said", [(1e-300, 1.0, "inf s"), (1e10, 1e12, "0.0"), (1e10, 1e-310, "inf")]
)
def test_times_that_are_none_are_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bandwidth: float, passes_ms: float, said: str
) -> None:
    config = quickstart.write(tmp_path)
    servers = json.loads((tmp_path / "cluster.json").read_text())
    servers["node0"]["inter_network_bandwidth"] = bandwidth
    (tmp_path / "cluster.json").write_text(json.dumps(servers))
    for file in (tmp_path / "comp").rglob("*.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "fwd_time": passes_ms, "bwd_time": passes_ms}))
    assert main(["search", f"iidp={config}", "parallel.global_batch_size=512"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert "right?" in line or "measure again" in line
