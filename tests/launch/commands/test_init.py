"""`tdpp init` writes files that compose, says what nobody could know, and replaces nothing unasked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conf import compose as composing_module
from conf.compose import compose
from conf.schema.experiment import Experiment
from launch import cli
from launch.init import discover
from launch.init.machines import Found, answered, priced, usable
from launch.init.slurm_nodes import groups, parse
from launch.init.yaml_text import cluster_text, experiment_text, first_plan, plan_text, scalar
from launch.machine.gpus import GpuFigures
from launch.machine.node_figures import NodeFigures, network_gbit_per_s
from tests.support.composing import COMPOSED
from tests.support.launch.machines import Machine, nvml_gpu
from tests.support.ordinary_user import ordinary_user

NODES = """
{name}-1|{part}|{part}|up|idle|64|UNLIMITED|256000|1-00:00:00|10|OFF|{gres}|(null)
{name}-2|{part}|{part}|up|idle|64|UNLIMITED|256000|1-00:00:00|10|OFF|{gres}|(null)
"""
A100 = GpuFigures(name="NVIDIA A100-SXM4-40GB", memory_mib=40536, nvlinks=12)
A10 = GpuFigures(name="NVIDIA A10", memory_mib=22731)
L4 = GpuFigures(name="NVIDIA L4", memory_mib=23034, capability=(8, 9), cores=7424, clock_mhz=2040)


@pytest.fixture(autouse=True)
def empty_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a user who has no configurations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("TDPP_CONFIG", raising=False)
    monkeypatch.setattr(composing_module, "_composed", COMPOSED)  # what is read changes from test to test
    return tmp_path


def slurm(**nodes: tuple[str, NodeFigures | str]) -> Found:
    """A cluster of two nodes in each partition: by its name their gres and what one of them answers."""
    text = "".join(NODES.format(name=name, part=name, gres=gres) for name, (gres, _) in nodes.items())
    found = [discover.of_slurm(group, nodes[group.partition][1]) for group in groups(parse(text))]
    return usable(Found(groups=tuple(found), executor="slurm", source="Slurm says"))


def node(*gpus: GpuFigures, gbit: float | None = None) -> NodeFigures:
    return NodeFigures(host="n", cpus=64, gpus=gpus, no_gpus=None if gpus else "no GPU", network_gbit_per_s=gbit)


def composed(found: Found) -> Experiment:
    """What the files say that are written of it."""
    for group, text in {
        "cluster": cluster_text("mine", found, "2026-01-31"),
        "parallel": plan_text(first_plan(found)),
        "experiment": experiment_text("mine", found),
    }.items():
        file = Path("config/tdpp", group, "mine.yaml")
        file.parent.mkdir(parents=True)
        file.write_text(text)
    return compose(["experiment=mine"])


def test_a_mixed_cluster_is_written_with_a_stage_on_each_kind() -> None:
    found = slurm(hgx=("gpu:a100:4", node(*[A100] * 4, gbit=200)), gpu2=("gpu:a10:4(S:0-1)", node(*[A10] * 4)))
    written = composed(found)
    hgx, gpu2 = written.cluster.groups["hgx"], written.cluster.groups["gpu2"]
    assert (hgx.count, hgx.gpus_per_node, hgx.gpu, hgx.gres) == (2, 4, "a100_40gb", "gpu:a100:4")
    assert (hgx.cpus_per_task, hgx.inter_gbit_per_s, hgx.intra_gbit_per_s) == (64, 200, 1800)
    assert (gpu2.gpu, gpu2.gres, gpu2.inter_gbit_per_s, gpu2.intra_gbit_per_s) == ("a10", "gpu:a10:4", 10, 128)
    assert (written.parallel.pipeline, written.parallel.data) == (2, 4)
    assert sorted(written.node_order.groups) == ["gpu2", "hgx"]


@pytest.mark.parametrize(
    ("nodes", "sizes"),
    [
        ({"a": ("gpu:4", node(*[A10] * 4))}, (4, 2)),
        ({"a": ("gpu:4", node(*[A10] * 4)), "b": ("gpu:a100:8", node(*[A100] * 8))}, (12, 1)),
        ({"a": ("(null)", node())}, (1, 2)),
        ({"a": ("gpu:l4:1", node(L4)), "b": ("(null)", node())}, (1, 2)),
        ({"a": ("gpu:titan:2", "nobody is free")}, (2, 2)),
        ({"a": ("gpu:a10:2,gpu:l4:1", node(A10, A10, L4))}, (2, 2)),
        ({name: ("gpu:a10:2", node(A10, A10)) for name in "abcdef"}, (2, 4)),
        ({"p": ("gpu:a100_1g.5gb:7,gpu:a100_3g.20gb:2", node(A100))}, (7, 2)),
        ({"p": ("gpu:1g.5gb:7", "nobody is free")}, (7, 2)),
        ({"p": ("gpu:a100_1g.5gb:28,gpu:a100:2", node(A100, A100)), "q": ("gpu:2g.10gb:3", node(A100))}, (2, 2)),
    ],
    ids=[
        "one kind",
        "unequal nodes",
        "no GPUs",
        "some without GPUs",
        "unknown",
        "two kinds in a node",
        "many groups",
        "MIG",
        "MIG without a model's name",
        "whole GPUs beside MIG",
    ],
)
def test_all_that_is_written_composes(nodes: dict[str, tuple[str, NodeFigures | str]], sizes: tuple[int, int]) -> None:
    written = composed(slurm(**nodes))
    assert (written.parallel.data, written.parallel.pipeline) == sizes


def test_what_is_not_known_is_said_in_the_file() -> None:
    found = slurm(a=("gpu:titan:2", "srun failed:\n nobody is free"), b=("(null)", node()))
    text = cluster_text("mine", found, "2026-01-31")
    assert "# no node answered: srun failed: nobody is free" in text
    assert "fp16_tflops: 40 # assumed: replace it with the figure of the data sheet" in text
    assert "# Note: b (2 nodes, CPU) is left out: ranks on CPUs cannot train together with ranks on GPUs" in text
    assert "# time_min: 60 # minutes, up to 1-00:00:00" in text


def test_nodes_that_slurm_may_give_instead_are_named_in_a_note() -> None:
    text = NODES.format(name="any", part="p", gres="gpu:2") + NODES.format(name="typed", part="p", gres="gpu:a10:2")
    found = [discover.of_slurm(group, node(A10, A10)) for group in groups(parse(text))]
    note = "Slurm may start jobs of this group on other nodes of the partition, too: typed-1, typed-2"
    assert [note in group.notes for group in found] == [group.gres == "gpu:2" for group in found]


def test_a_part_of_a_gpu_is_not_taken_for_the_whole() -> None:
    (gpu,) = composed(slurm(a=("gpu:a100_1g.5gb:7", node(A100)))).cluster.gpus.values()
    assert (gpu.name, gpu.memory_gib) == ("a100_1g.5gb", 5)


def test_parts_of_gpus_are_left_alone_where_there_are_whole_ones() -> None:
    found = slurm(
        both=("gpu:a100_1g.5gb:28,gpu:a10:4,gpu:a100:2", node(A10, A10, A10, A10, A100, A100)),
        parts=("gpu:a100_2g.10gb:3", node(A100)),
    )
    (group,) = composed(found).cluster.groups.values()
    assert (group.gres, group.gpus_per_node, group.gpu) == ("gpu:a100:2", 2, "a100_40gb")
    text = cluster_text("mine", found, "2026-01-31")
    assert "its nodes also have gpu:a10:4, gpu:a100_1g.5gb:28, which the group does not use" in text
    assert "# Note: parts (2 nodes of 3 x a100_2g.10gb) is left out: NCCL does not connect several parts" in text


def test_account_and_qos_are_written() -> None:
    found = slurm(a=("gpu:a10:4", node(*[A10] * 4)))
    charged = replace(found, groups=tuple(replace(group, account="lab", qos="long") for group in found.groups))
    group = composed(charged).cluster.groups["a"]
    assert (group.account, group.qos) == ("lab", "long")


def test_hosts_are_named_in_the_experiment() -> None:
    (group,) = groups(parse(NODES.format(name="x", part="x", gres="gpu:2")))
    a10 = discover.of_slurm(group, node(A10, A10))
    found = Found(
        groups=(a10,), executor="hosts", hosts=("1.2.3.4:2", "b:gpu0+3"), order=("x", "x"), source="hosts say"
    )
    written = composed(found)
    assert [host.name for host in written.executor.reached] == ["1.2.3.4", "b"]
    assert (written.parallel.data, written.parallel.pipeline) == (2, 2)


def test_this_machine_is_written_and_the_next_commands_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "--local"]) == 0
    told = capsys.readouterr().out
    assert "written: " + str(Path("config/tdpp/cluster/mine.yaml").absolute()) in told
    assert [line.split()[:2] for line in told.rpartition("next:")[2].strip().splitlines()] == [
        ["tdpp", "data"],
        ["tdpp", "doctor"],
        ["tdpp", "launch"],
    ]
    assert compose(["experiment=mine"]).parallel.world_size == 4


def test_who_forgot_to_load_slurm_hears_that_only_this_machine_is_described(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["init"]) == 0
    assert "(only this machine is described, because Slurm's sinfo is not on PATH;" in capsys.readouterr().err
    assert "# Note: only this machine" in Path("config/tdpp/cluster/mine.yaml").read_text()
    assert cli.main(["init", "--local", "--force"]) == 0
    assert capsys.readouterr().err == ""  # it was asked for


@pytest.mark.parametrize(("limit", "words"), [("infinite", "minutes; without"), ("30:00", "minutes, up to 30:00; w")])
def test_a_partition_without_a_time_limit_names_none(limit: str, words: str) -> None:
    (group,) = groups(parse(NODES.format(name="x", part="x", gres="gpu:2").replace("1-00:00:00", limit)))
    found = Found(groups=(discover.of_slurm(group, node(A10, A10)),), executor="slurm", source="Slurm says")
    assert f"# time_min: 60 # {words}" in cluster_text("mine", found, "2026-01-31")


@pytest.mark.parametrize("price", ["a100", "a100=-3", "=3", "a100="])
def test_a_price_that_is_none_is_shown_with_its_form(price: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["init", "--local", "--price", price])
    assert f"--price: {price!r} must be NAME=DOLLARS with a price above 0, such as" in capsys.readouterr().err


def test_nothing_is_replaced_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    Path("conf/model").mkdir(parents=True)  # a folder of the user's own, which is written to
    assert cli.main(["init", "--local"]) == 0
    file = Path("conf/cluster/mine.yaml")
    file.write_text(file.read_text() + "# mine\n")
    assert cli.main(["init", "--local"]) == 1
    assert (
        "cluster/mine.yaml already exists; choose another NAME, or add --force to replace it" in capsys.readouterr().err
    )
    assert file.read_text().endswith("# mine\n")
    assert cli.main(["init", "--local", "--force"]) == 0
    assert not file.read_text().endswith("# mine\n")
    assert cli.main(["init", "local", "--local", "--force"]) == 1
    assert "cluster=local comes with tdpp (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["init", "--local", "1st"], "'1st' cannot name a configuration; a name is a letter"),
        (
            ["init", "--local", "--price", "a100=3"],
            "no group or GPU type a100; the known ones are local, cpu",
        ),
        (["init", "--hosts", "a:2", "b:2"], "'b:2' cannot name a configuration; if it is a host, give all hosts to "),
        (["init", "a:2,b:2"], "separated by commas without spaces: --hosts a:2,b:2"),
        (["init", "--hosts", "a"], "--hosts: 'a' is not a host; write NAME:RANKS, such as a:2"),
    ],
    ids=["name", "price", "a space between hosts", "hosts without --hosts", "hosts"],
)
def test_what_cannot_be_done_is_one_message(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 1
    error = capsys.readouterr().err
    assert (told in error, error.count("\n")) == (True, 1)
    assert not Path("config/tdpp/cluster/mine.yaml").exists()


def test_a_person_is_asked_for_prices_and_the_network_and_may_say_nothing() -> None:
    found = slurm(hgx=("gpu:a100:4", node(*[A100] * 4)), gpu2=("gpu:a10:4", node(*[A10] * 4)))
    answers = iter(["much", "8.144", "", "40"])
    questions: list[str] = []

    def ask(question: str) -> str:
        questions.append(question)
        return f"{next(answers)}\n"

    groups = {group.name: group for group in answered(found, ask).groups}
    assert (groups["gpu2"].price_per_hour, groups["hgx"].price_per_hour) == (8.144, None)
    assert groups["hgx"].network_gbit_per_s == groups["gpu2"].network_gbit_per_s == 40
    assert questions[-1] == "network between nodes, Gbit/s [10]: "
    costed = priced(found, {"a100": 12.24, "gpu2": 3})
    assert {group.name: group.price_per_hour for group in costed.groups} == {"hgx": 12.24, "gpu2": 3}
    assert answered(costed, lambda _: "").groups == costed.groups  # the end of input is not an endless loop


def test_the_fastest_way_out_of_a_node_is_read(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert network_gbit_per_s(tmp_path) is None
    for card, speed, device in [("eth0", "25000\n", True), ("eth1", "-1\n", True), ("docker0", "100000\n", False)]:
        write(f"net/{card}/speed", speed)
        if device:
            write(f"net/{card}/device/x", "")
    assert network_gbit_per_s(tmp_path) == 25
    for name, state in [("mlx5_0", "4: ACTIVE"), ("mlx5_1", "4: ACTIVE"), ("mlx5_2", "1: DOWN")]:
        write(f"infiniband/{name}/ports/1/rate", "200 Gb/sec (4X HDR)")
        write(f"infiniband/{name}/ports/1/state", state)
    assert network_gbit_per_s(tmp_path) == 400


@pytest.mark.parametrize(
    "value", ["a", "gpu:a10:4", "1:30", "no", "x y", "NVIDIA L4", "a:", "", 1e-6, 0.5, 1e30, 3, True, None]
)
def test_a_value_is_read_as_it_was_written(value: object) -> None:
    assert OmegaConf.create(f"key: {scalar(value)}").key == value


def test_gpus_of_this_machine_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(tmp_path, monkeypatch)
    known = {"capability": [8, 9], "cores": 7424, "clocks": {1: 2040, 2: 6251}, "bus": 192, "nvlinks": 0}
    memory = [0, 23034 << 20]
    machine.nvml(*(nvml_gpu(number, name="NVIDIA L4", memory=memory, **known) for number in range(4)))
    assert cli.main(["init", "--local"]) == 0, capsys.readouterr().err
    written = compose(["experiment=mine"])
    (gpu,) = written.cluster.gpus.values()
    assert (gpu.name, gpu.memory_gib, gpu.fp16_tflops, gpu.memory_gb_per_s) == ("NVIDIA L4", 22.49, 121, 300)
    assert written.parallel.world_size == 4


def test_a_closed_folder_of_configurations_has_a_way_out_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TDPP_CONFIG", "closed")
    Path("closed").mkdir(mode=0o555)
    tmp_path.chmod(0o755)  # also `./conf` is looked for
    with ordinary_user():
        assert cli.main(["init", "--local"]) == 1
    told = capsys.readouterr().err
    assert "Permission denied; create a folder that you may write to, and name it in TDPP_CONFIG" in told
    (tmp_path / "own").mkdir()
    monkeypatch.setenv("TDPP_CONFIG", str(tmp_path / "own"))
    assert cli.main(["init", "--local"]) == 0
    assert (tmp_path / "own" / "cluster" / "mine.yaml").exists()
