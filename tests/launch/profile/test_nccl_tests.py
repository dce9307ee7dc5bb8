"""`tdpp profile nccl_tests=FILE`: what nccl-tests prints, in the forms of its versions, as measured collectives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fasop.costs.profiles import files as profiles
from fasop.costs.profiles.files import read_profile
from fasop.costs.profiles.steps import Operation
from launch.cli import main
from launch.errors import LaunchError
from launch.profile.nccl_tests import read

COLUMNS = """#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
BEGIN = (
    "# nThread 1 nGpus 1 minBytes 256 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 "
    "validation: 1 graph: 0\n#\n# Using devices\n"
)
TWO_NODES = (
    "#  Rank  0 Group  0 Pid 1478709 on      gpu23 device  0 [0x31] NVIDIA A10\n"
    "#  Rank  1 Group  0 Pid 1171742 on      gpu24 device  0 [0x31] NVIDIA A10\n"
)
SEND_RECV = (
    "  256  64  float  sum  -1  34.24  0.01  0.01  0  33.65  0.01  0.01  N/A\n"
    "  8192  2048  float  sum  -1  31.76  0.26  0.26  0  31.59  0.26  0.26  N/A\n"
    "  67108864  16777216  float  sum  -1  5600.1  11.98  11.98  0  5590.0  12.01  12.01  N/A\n"
    "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 2.7\n#\n"
)
"""As in github.com/NVIDIA/nccl-tests, issue 214, the largest but for."""


def eight(gpu: str = "NVIDIA A10", hosts: tuple[str, ...] = ("node-1",)) -> str:
    """The lines of 8 ranks on each host."""
    return "".join(
        f"#   Rank {rank:2} Pid {1000 + rank:6} on {host:>10} device {rank % 8:2} [0x{rank % 8:x}0] {gpu}\n"
        for rank, host in enumerate(host for host in hosts for _ in range(8))
    )


ALL_REDUCE = (
    "  1048576  262144  float  sum  -1  27.76  37.78  66.11  0  27.49  38.15  66.76  0\n"
    "node-1:77:81 [3] misc/ibvwrap.cc:284 NCCL WARN Call to ibv_modify_qp failed with error No route to host 113\n"
    "  16777216  4194304  float  sum  -1  121.33  138.28  242.00  0  120.47  139.26  243.71  0\n"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a10.yaml").write_text((Path(profiles.__file__).parents[2] / "profiles" / "a10.yaml").read_text())
    monkeypatch.setattr(profiles, "FOLDER", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_reduction_is_read_in_place_and_what_others_write_between_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "all_reduce.log"
    file.write_text(BEGIN + eight() + COLUMNS + ALL_REDUCE)
    ((times, gpu),) = read(file)
    assert (times.operation, times.ranks, times.nodes, times.sharing) == (Operation.all_reduce, 8, 1, 1)
    assert times.us_by_bytes == {1048576: 27.49, 16777216: 120.5}
    assert gpu == "NVIDIA A10"


def test_messages_are_read_out_of_place_and_nodes_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "slurm-81.out"
    lines = ("+ srun ./build/sendrecv_perf -b 256 -e 64M -f 2\n" + BEGIN + TWO_NODES + COLUMNS + SEND_RECV).splitlines()
    file.write_text("".join(f"[1,0]<stdout>:{line}\n" for line in lines))
    ((times, _),) = read(file)
    assert (times.operation, times.ranks, times.nodes, times.sharing) == (Operation.send_recv, 2, 2, 1)
    assert times.us_by_bytes == {256: 34.24, 8192: 31.76, 67108864: 5600.0}


def test_several_runs_of_one_file_and_the_columns_of_older_versions(tmp_path: Path) -> None:
    """Versions before 2.10 have neither a root nor, of an all-gather, an operation; 2.17 names the collective."""
    older = (
        "    16777216        524288    float            900.0   18.64   17.48  0e+00    800.0   20.97   19.66  0e+00\n"
    )
    small = (
        "     1048576         32768    float             90.0   11.65   10.92  0e+00     80.0   13.11   12.29  0e+00\n"
    )
    of_16 = ALL_REDUCE
    for bus, of_all in {"66.11": "70.84", "66.76": "71.53", "242.00": "259.3", "243.71": "261.1"}.items():
        of_16 = of_16.replace(bus, of_all)
    file = tmp_path / "both.txt"
    file.write_text(
        f"# Collective test starting: all_reduce_perf\n{BEGIN}{eight(hosts=('a', 'b'))}{COLUMNS}"
        f"{of_16}# Collective test concluded: all_reduce_perf\n$ ./build/all_gather_perf -g 8\n"
        f"{BEGIN}{eight(hosts=('a', 'b'))}{small}{older}"
    )
    first, second = read(file)
    assert (first.times.operation, first.times.ranks, first.times.nodes) == (Operation.all_reduce, 16, 2)
    assert (second.times.operation, second.times.ranks) == (Operation.all_gather, 16)
    assert second.times.us_by_bytes == {1048576: 80.0, 16777216: 800.0}


def test_iterations_one_by_one_timestamps_and_programs_built_for_mpi(tmp_path: Path) -> None:
    """Versions 2.18 and 2.19, with mpirun's tags: `-I 1`, `-S 1`, and wrong values in exponents."""
    at = "   2026-11-29 10:30:00"
    line = "[1,0]<stdout>:  {}  {}  float  sum  -1  {}  {}  {}"
    sides = (
        ("27.76  37.78  66.11  0", "27.49  38.15  66.76  0"),
        ("121.33  138.28  242.00  0", "120.47  139.26  243.71  0"),
    )
    of_iterations = "  27.01  29.02  29.02  1.40"
    for more, end in (("", at), (of_iterations, ""), (of_iterations, at)):
        rows = [
            line.format(size, size // 4, out + more, within + more, end)
            for size, (out, within) in zip((2**20, 2**24), sides, strict=True)
        ]
        head = "[1,0]<stdout>:# Collective test starting: all_reduce_perf_mpi\n" + BEGIN + eight() + COLUMNS
        file = tmp_path / "slurm-82.out"
        file.write_text(head + "\n".join(rows) + "\n")
        ((times, _),) = read(file)
        assert (times.operation, times.us_by_bytes) == (Operation.all_reduce, {2**20: 27.49, 2**24: 120.5})


def test_groups_of_a_split_share_the_nodes(tmp_path: Path) -> None:
    """NCCL_TESTS_SPLIT: two groups of a GPU on each node."""
    ranks = "".join(
        f"#  Rank {rank:2} Group {rank % 2} Pid 1 on {'ab'[rank // 2]} device {rank % 2} [0x0] NVIDIA A10\n"
        for rank in range(4)
    )
    file = tmp_path / "sendrecv_perf.log"
    file.write_text(BEGIN + ranks + COLUMNS + SEND_RECV)
    ((times, _),) = read(file)
    assert (times.ranks, times.nodes, times.sharing) == (2, 2, 2)


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("all_reduce.log", "", "no line of it has a size"),
        ("out.log", BEGIN + eight() + COLUMNS + ALL_REDUCE, "name the file after the program"),
        ("out.log", "./broadcast_perf\n" + BEGIN + eight() + COLUMNS + ALL_REDUCE, "broadcast_perf is not one of"),
        ("all_reduce.log", BEGIN + COLUMNS + ALL_REDUCE, "give its whole output"),
        ("reduce_scatter.log", BEGIN + eight() + COLUMNS + ALL_REDUCE, "1.75 times algorithm bandwidth"),
        ("all_reduce.log", BEGIN + eight() + COLUMNS + ALL_REDUCE.replace("66.11  0", "66.11  7"), "7 wrong"),
        ("all_reduce.log", BEGIN + eight() + COLUMNS + ALL_REDUCE.replace("66.11  0", "66.11  1e+06"), "1000000 wrong"),
        ("all_reduce.log", BEGIN + eight() + COLUMNS.replace(" time", " cputime") + ALL_REDUCE, "measure without -C"),
        ("sendrecv.log", BEGIN + TWO_NODES[:-4] + "A100\n" + COLUMNS + SEND_RECV, "on NVIDIA A10 and on NVIDIA A100"),
    ],
    ids=["empty", "unnamed", "other program", "no ranks", "another's", "wrong", "many wrong", "CPU time", "mixed GPUs"],
)
def test_what_cannot_be_used_is_refused_with_the_way_out(tmp_path: Path, name: str, text: str, rule: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(LaunchError, match=rule):
        read(tmp_path / name)


def test_the_gpus_profile_of_the_cluster_gets_them_and_a_search_uses_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "all_reduce.log").write_text(BEGIN + eight(hosts=("a", "b")) + COLUMNS + ALL_REDUCE.replace("66.", "7."))
    words = ["nccl_tests=all_reduce.log", "cluster=a10x8", "profile=mine.yaml"]
    assert main(["profile", *words]) == 1
    assert "bus bandwidth" in capsys.readouterr().err
    (folder / "all_reduce.log").write_text(BEGIN + eight() + COLUMNS + ALL_REDUCE)
    assert main(["profile", *words]) == 0
    assert "all_reduce of 8 ranks on 1 node: 2 sizes from 1048576 to 16777216 bytes" in capsys.readouterr().out
    own, made = read_profile("a10"), read_profile("mine.yaml")
    assert (made.costs, made.device) == (own.costs, own.device)
    assert main(["profile", *words]) == 1
    assert "already exists" in capsys.readouterr().err
    (folder / "sendrecv.log").write_text(BEGIN + TWO_NODES + COLUMNS + SEND_RECV)
    assert main(["profile", *words[1:], "nccl_tests=sendrecv.log", "add=true"]) == 0
    assert [one.operation for one in read_profile("mine.yaml").collectives] == ["all_reduce", "send_recv"]
    capsys.readouterr()
    assert main(["profile", "nccl_tests=sendrecv.log", "profile=other.yaml", "cluster=p100x2"]) == 1
    assert "measured on NVIDIA A10, but cluster=p100x2 has P100-16GB" in capsys.readouterr().err


def test_sums_count_of_all_reductions_and_of_a_size_that_was_measured_again_the_median(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`-o all -d all -N 3` print a size several times; products with a factor take longer than the sums of training."""
    again = "".join(
        ALL_REDUCE.replace("27.49", us).replace("float", kind) for us, kind in (("27.9", "int8"), ("99", "half"))
    )
    others = ALL_REDUCE.replace("sum", "mulsum").replace("27.49", "51.0")
    text = BEGIN + eight() + COLUMNS + others + ALL_REDUCE + again + others
    (folder / "all_reduce.log").write_text(text)
    ((times, _),) = read(folder / "all_reduce.log")
    assert times.us_by_bytes == {1048576: 27.9, 16777216: 120.5}
    (folder / "all_reduce_2.log").write_text(BEGIN + eight() + COLUMNS + ALL_REDUCE.replace("27.49", "29.9"))
    words = ["profile", "cluster=a10x8", "profile=mine.yaml"]
    assert main([*words, "nccl_tests=all_reduce.log,all_reduce_2.log"]) == 0
    assert read_profile("mine.yaml").collectives[0].us_by_bytes == {1048576: 28.9, 16777216: 120.5}
    (folder / "sendrecv.log").write_text(BEGIN + TWO_NODES + COLUMNS + SEND_RECV)
    (folder / "sendrecv_2.log").write_text(
        BEGIN + TWO_NODES + TWO_NODES.replace("Rank  ", "Rank 1").replace("Group  0", "Group  1") + COLUMNS + SEND_RECV
    )
    capsys.readouterr()
    assert main([*words, "overwrite=true", "nccl_tests=sendrecv.log,sendrecv_2.log"]) == 1
    assert (
        "send_recv of 2 ranks on 2 nodes was measured with 1 and with 2 such groups at once" in capsys.readouterr().err
    )


def test_messages_that_were_not_checked_are_read_out_of_place_too(tmp_path: Path) -> None:
    """`-c 0`: neither side has a count of wrong values."""
    file = tmp_path / "sendrecv.log"
    file.write_text(BEGIN + TWO_NODES + COLUMNS + SEND_RECV.replace("  0  ", "  N/A  "))
    ((times, _),) = read(file)
    assert times.us_by_bytes == {256: 34.24, 8192: 31.76, 67108864: 5600.0}


def written(*, time: str = "time") -> dict[str, Any]:
    """What `all_reduce_perf -g 4 -J FILE` writes, but for the environment: two processes, with four GPUs each."""
    devices = [
        {"rank": 4 * host, "group": 0, "pid": 7, "hostname": f"node-{host}", "device": 0, "device_info": "NVIDIA A10"}
        for host in range(2)
    ]
    results = [
        {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "    -1"}
        | {way: {time: us + more, "alg_bw": 38.0, "bus_bw": 66.5, "nwrong": 0.0} for way, more in ways.items()}
        for size, us in ((1048576, 27.49), (16777216, 120.47))
        for ways in ({"out_of_place": 0.3, "in_place": 0.0},)
    ]
    config = {"nthreads": 1, "ngpus": 4, "devices": devices}
    return {"version": 3, "args": ["./build/all_reduce_perf", "-g", "4"], "config": config, "results": results}


def test_the_file_of_minus_j_has_the_same(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    file.write_text(json.dumps(written()))
    ((times, gpu),) = read(file)
    assert (times.operation, times.ranks, times.nodes) == (Operation.all_reduce, 8, 2)
    assert (times.us_by_bytes, gpu) == ({1048576: 27.49, 16777216: 120.5}, "NVIDIA A10")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (json.dumps(written(time="cpu_time")), "measure without -C"),
        (json.dumps({**written(), "results": []}), "no line of it has a size"),
        (json.dumps({**written(), "config": {}}), "not what nccl-tests writes with -J: .*nthreads"),
        (json.dumps(written())[:-9], "not what nccl-tests writes with -J"),
        ("{}", "not what nccl-tests writes with -J"),
    ],
    ids=["CPU time", "no results", "no ranks", "cut off", "another's"],
)
def test_a_file_of_minus_j_that_cannot_be_used_is_refused(tmp_path: Path, text: str, rule: str) -> None:
    (tmp_path / "all_reduce.json").write_text(text)
    with pytest.raises(LaunchError, match=rule):
        read(tmp_path / "all_reduce.json")
