"""Folders of IIDP's and JABAS's profilers: read, merged, kept as profiles, and written again."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from conf.errors import TdppError
from fasop.costs.profiles.files import read_profile
from fasop.shares.public_files import read_cluster
from fasop.shares.public_folders import PublicFolders, read_folders
from launch.cli import main
from launch.commands.profile import main as profile
from tests.support.fasop import quickstart

NAMES = ("q_tesla_p100_pcie_16gb.yaml", "q_tesla_v100_pcie_16gb.yaml")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "theirs").mkdir()
    quickstart.write(tmp_path / "theirs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def measured(folder: str) -> PublicFolders:
    """Without servers, which theirs have by other names than the hosts that were measured."""
    return replace(read_folders([Path(folder)]), servers={})


def split(folder: Path) -> tuple[Path, Path]:
    """As every server has its own."""
    for server, other in (("V100", "P100"), ("P100", "V100")):
        shutil.copytree(folder / "theirs", folder / server)
        for of_other in (folder / server).glob(f"*/*/server-{other}"):
            shutil.rmtree(of_other)
    return folder / "V100", folder / "P100"


def test_what_is_imported_is_exported_again(folder: Path) -> None:
    assert profile(["import=theirs", "profile=./q.yaml"]) == 0
    assert sorted(path.name for path in folder.glob("q_*.yaml")) == [*NAMES]
    assert profile(["export=ours", f"profile=./{NAMES[0]},./{NAMES[1]}"]) == 0
    assert measured("ours") == measured("theirs")
    step = json.loads(
        Path("ours/comp_profile_data/32/server-V100/server-V100_resnet50_32_4_comp_profile.json").read_text()
    )
    times = quickstart.STEPS["V100", 32, 4]
    assert step == {
        **{"model": "resnet50", "gpu_type": quickstart.GPUS["V100"], "lbs": 32, "num_models": 4},
        **dict(zip(("data_time", "fwd_time", "bwd_time", "update_time", "copy_time"), times, strict=True)),
        "bn_sync_time": quickstart.STATISTICS_MS,
    }
    assert profile(["import=ours", "profile=./again.yaml"]) == 0
    for name in NAMES:
        again = read_profile(f"./{name.replace('q_', 'again_')}")
        assert again.steps == read_profile(f"./{name}").steps


def test_what_is_exported_has_the_configuration_that_solvers_start_from(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The public solver needs an entry of every host that was measured, with the name of its folder."""
    (folder / "elsewhere").mkdir()
    for way in (["import=theirs"], [f"profile=./{NAMES[0]},./{NAMES[1]}"]):
        assert profile(["import=theirs", "profile=./q.yaml", "overwrite=true"]) == 0
        shutil.rmtree("ours", ignore_errors=True)
        assert profile([*way, "export=ours"]) == 0
        config = json.loads(Path("ours/config.json").read_text())
        assert config["available_servers"] == ["server-P100", "server-V100"]
        assert all(Path(config[key]).exists() for key in config.keys() - {"available_servers"})
        info = json.loads(Path(config["gpu_cluster_info"]).read_text())
        assert info["server-V100"] == {
            **{"type": quickstart.GPUS["V100"], "number": 4, "tfplos": 1},
            **{"intra_network_bandwidth": 15_750_000_000, "inter_network_bandwidth": 12_500_000_000},
        }
        ours, theirs = (read_cluster(Path(folder) / "config.json") for folder in ("ours", "theirs"))
        assert {**ours.__dict__, "servers": 0, "measured": 0} == {**theirs.__dict__, "servers": 0, "measured": 0}
    (folder / "theirs/cluster.json").unlink()
    capsys.readouterr()
    assert profile(["import=theirs", "export=less"]) == 0
    assert "(no config.json for IIDP's solver: the number of GPUs of host server-P100 is not" in capsys.readouterr().err
    assert not Path("less/config.json").exists()


def test_what_is_exported_is_solved_as_before(folder: Path) -> None:
    assert profile(["import=theirs", "export=ours"]) == 0
    config = json.loads(Path("theirs/config.json").read_text())
    kinds = {"memory": "mem", "comp": "comp", "bucket": "bucket", "comm": "comm"}
    config |= {f"{long}_profile_dir": f"ours/{short}_profile_data" for long, short in kinds.items()}
    Path("theirs/ours.json").write_text(json.dumps(config))
    ours, theirs = (read_cluster(Path("theirs") / name) for name in ("ours.json", "config.json"))
    assert ours == theirs
    assert main(["search", "iidp=theirs/ours.json", "parallel.global_batch_size=1024"]) == 0


def test_folders_of_several_servers_become_one(folder: Path) -> None:
    first, second = split(folder)
    assert profile([f"import={first},{second}", "export=ours"]) == 0
    assert measured("ours") == measured("theirs")


def test_a_conflict_is_named_and_nothing_is_written(folder: Path) -> None:
    first, second = split(folder)
    (file,) = second.rglob("*_bucket_size_profile.json")
    file.write_text(json.dumps({"bucket_size_distribution": [1.0]}))
    with pytest.raises(TdppError) as error:
        profile([f"import={first},{second}", "export=ours", "profile=./q.yaml"])
    assert "differ" in str(error.value)
    assert str(file) in str(error.value)
    assert str(first / "bucket") in str(error.value)
    assert not Path("ours").exists()
    assert [*folder.glob("q_*")] == []


def test_nothing_is_overwritten(folder: Path) -> None:
    assert profile(["import=theirs", "export=ours"]) == 0
    assert profile(["import=theirs", "export=ours"]) == 0  # the same
    (file,) = Path("ours").rglob("*_bucket_size_profile.json")
    file.write_text("{}")
    before = {path: path.read_text() for path in Path("ours").rglob("*") if path.is_file()}
    with pytest.raises(TdppError, match="already exists with other content; nothing was written"):
        profile(["import=theirs", "export=ours"])
    assert {path: path.read_text() for path in Path("ours").rglob("*") if path.is_file()} == before
    assert profile(["import=theirs", "profile=./q.yaml"]) == 0
    with pytest.raises(TdppError, match=f"{NAMES[0]} already exists; choose another name"):
        profile(["import=theirs", "profile=./q.yaml"])


def test_two_profiles_that_say_different_things_are_not_exported_together(folder: Path) -> None:
    assert profile(["import=theirs", "profile=./q.yaml"]) == 0
    text = Path(NAMES[0]).read_text()
    assert "resnet50: [7.81, " in text
    Path(NAMES[0]).write_text(text.replace("resnet50: [7.81, ", "resnet50: [7.8, "))
    with pytest.raises(TdppError, match="have different buckets of resnet50"):
        profile(["export=ours", f"profile=./{NAMES[0]},./{NAMES[1]}"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["import=theirs"], "give a destination: profile=NAME writes profiles"),
        (["export=ours"], "name the profiles to write with profile=NAME,NAME"),
        (["import=theirs,nowhere", "export=ours"], "nowhere: no such folder"),
        (["import=empty", "export=ours"], "empty: no profile of IIDP or JABAS in it"),
        (["import=nowhere", "profile=q"], "nowhere is not a folder of profiles of IIDP or JABAS"),
        (["import=theirs", "profile=a,b", "export=ours"], "profile=a,b: only export=DIR takes several"),
        (["export=ours", "profile=cpu"], "profile cpu: has no steps; measure them with 'tdpp profile streams=1,2"),
        (["export=ours", "profile=./none.yaml"], "no profile './none.yaml'"),
        (["import=theirs", "export=ours", "model=xl"], "model=xl: import=DIR and export=DIR take"),
        (["import=theirs/mem", "profile=./q.yaml"], "no steps (*_comp_profile.json)"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_message(folder: Path, words: list[str], message: str) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(TdppError) as error:
        profile(words)
    assert message in str(error.value)
    assert not Path("ours").exists()


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("comp/32/server-V100/resnet50_32_2_comp_profile.json", {"gpu_type": "P4"}, "there are files for "),
        ("comp/32/server-V100/resnet50_32_2_comp_profile.json", {"model": "../x"}, "without '/'"),
        ("comp/32/server-V100/resnet50_32_2_comp_profile.json", {"gpu_type": ""}, "gpu_type='' must be the name of"),
        ("comp/32/server-V100/resnet50_32_2_comp_profile.json", {"lbs": 64}, "lbs=64 must be 32"),
        ("mem/32/server-V100/max_memory_profile_info.json", {"total_memory": "all"}, "total_memory=all must be"),
    ],
)  # fmt: skip
def test_a_fault_of_a_file_is_named(folder: Path, file: str, change: dict[str, object], message: str) -> None:
    path = Path("theirs") / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(TdppError) as error:
        profile(["import=theirs", "profile=./q.yaml"])
    assert message in str(error.value)
    assert [*folder.glob("q_*")] == []
