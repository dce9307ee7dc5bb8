"""Every word with which a container runtime is called."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from conf.schema.containers import ImageReference, Mount
from conf.schema.experiment import ContainerKind
from launch.control.planning.plan import make_plan
from launch.machine.container_commands import run_container
from launch.machine.container_runtimes import (
    Apptainer,
    Command,
    Enroot,
    RunContainer,
    SlurmStep,
    Worker,
    container_name,
)

NGC = ImageReference.parse("nvcr.io/nvidia/pytorch:23.04-py3")
WORKER = ("python3", "-u", "-m", "megatron_ext.worker", "/runs/xl/1/plan.json", "3")
GIVEN = {"PYTHONPATH": "/tdpp", "NODE_RANK": "3"}
STEP = SlurmStep(node="n063", cpus=16, het_group=None)

CPU = RunContainer(
    kind=ContainerKind.enroot,
    image=NGC,
    file=Path("/images/nvcr.io+nvidia+pytorch+23.04-py3.sqsh"),
    digest=None,
    mounts=(Mount(Path("/tdpp"), Path("/tdpp")), Mount(Path("/raid/data"), Path("/data"), read_only=True)),
    folder=Path("/tdpp"),
    python="python3",
    gpus=False,
    reload=False,
    scratch=Path("/tmp"),
    run="xl/1",
)
GPU = replace(CPU, gpus=True)
APPTAINER = replace(CPU, kind=ContainerKind.apptainer, file=Path("/images/nvcr.io+nvidia+pytorch+23.04-py3.sif"))
PYXIS = replace(CPU, kind=ContainerKind.pyxis, file=None)


def line(words: Sequence[str]) -> str:
    return shlex.join(words)


def started(container: RunContainer, environment: dict[str, str] | None = None) -> Command:
    return container.runtime.start(
        Worker(container, "tdpp-box", GIVEN if environment is None else environment, WORKER, STEP)
    )


def test_enroot_imports_an_image_of_a_registry() -> None:
    assert line(Enroot().fetch(CPU, Path("/images/x.sqsh"))) == (
        "enroot import -o /images/x.sqsh 'docker://nvcr.io#nvidia/pytorch:23.04-py3'"
    )


def test_enroot_creates_a_container_of_the_file() -> None:
    assert line(Enroot().create(CPU, "tdpp-box")) == (
        "enroot create -n tdpp-box /images/nvcr.io+nvidia+pytorch+23.04-py3.sqsh"
    )
    assert line(Enroot().create(CPU, "tdpp-box", anew=True)) == (
        "enroot create --force -n tdpp-box /images/nvcr.io+nvidia+pytorch+23.04-py3.sqsh"
    )


def test_enroot_starts_a_worker_with_its_mounts_and_environment() -> None:
    command = started(GPU)
    assert line(command.argv) == (
        "enroot start -m /tdpp:/tdpp:none:x-create=auto,rbind -m /raid/data:/data:none:x-create=auto,rbind,ro "
        "-e NVIDIA_VISIBLE_DEVICES -e NVIDIA_DRIVER_CAPABILITIES -e PYTHONPATH "
        "-e NODE_RANK tdpp-box python3 -u -m megatron_ext.worker /runs/xl/1/plan.json 3"
    )
    assert command.environment == {
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        **GIVEN,
    }


def test_enroot_shows_no_gpu_to_a_worker_without() -> None:
    command = started(CPU)
    assert line(command.argv).startswith(
        "enroot start -m /tdpp:/tdpp:none:x-create=auto,rbind -m /raid/data:/data:none:x-create=auto,rbind,ro "
        "-e NVIDIA_VISIBLE_DEVICES -e PYTHONPATH"
    )
    assert command.environment["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_what_the_cluster_says_of_gpus_wins() -> None:
    command = started(GPU, {"NVIDIA_VISIBLE_DEVICES": "2,3"})
    assert command.environment["NVIDIA_VISIBLE_DEVICES"] == "2,3"


def test_apptainer_pulls_an_image_of_a_registry() -> None:
    assert line(Apptainer().fetch(APPTAINER, Path("/images/x.sif"))) == (
        "apptainer pull /images/x.sif docker://nvcr.io/nvidia/pytorch:23.04-py3"
    )


def test_apptainer_starts_a_worker_with_its_mounts_and_environment() -> None:
    command = started(replace(APPTAINER, gpus=True))
    assert line(command.argv) == (
        "apptainer exec --cleanenv --no-eval --no-mount=home,cwd --pwd=/tdpp --nv "
        "--mount type=bind,source=/tdpp,destination=/tdpp --mount type=bind,source=/raid/data,destination=/data,ro "
        "/images/nvcr.io+nvidia+pytorch+23.04-py3.sif "
        "python3 -u -m megatron_ext.worker /runs/xl/1/plan.json 3"
    )
    assert command.environment == {
        **GIVEN,
        "APPTAINERENV_PYTHONPATH": "/tdpp",
        "APPTAINERENV_NODE_RANK": "3",
    }


def test_apptainer_shows_no_gpu_to_a_worker_without() -> None:
    assert "--nv" not in started(APPTAINER).argv


def test_apptainer_hands_in_nothing_that_nobody_gave() -> None:
    assert Apptainer().inherited({"A": "1", "APPTAINERENV_B": "2", "SINGULARITYENV_C": "3", "APPTAINER_D": "4"}) == {
        "A": "1",
        "APPTAINER_D": "4",
    }


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/a b", "source=/a b"),
        ("/größe", "source=/größe"),
        ("/-dash", "source=/-dash"),
        ("/a:b", "source=/a:b"),
        ("/a,b", '"source=/a,b"'),
        ('/a"b,c', '"source=/a""b,c"'),
        ("/it's $x", "source=/it's $x"),
    ],
    ids=["space", "unicode", "dash", "colon", "comma", "quote", "shell"],
)
def test_apptainer_mounts_a_path_with_any_name(path: str, field: str) -> None:
    command = started(replace(APPTAINER, mounts=(Mount(Path(path), Path("/x")),)))
    assert f"type=bind,{field},destination=/x" in command.argv


def test_pyxis_starts_a_worker_as_a_step_on_its_own_node() -> None:
    command = started(replace(PYXIS, gpus=True))
    assert line(command.argv) == (
        "srun --overlap --mem=0 --nodes=1 --ntasks=1 --nodelist=n063 --export=ALL --cpus-per-task=16 "
        "'--container-image=nvcr.io#nvidia/pytorch:23.04-py3' --container-name=tdpp-box:no_exec "
        "--container-mounts=/tdpp:/tdpp,/raid/data:/data:ro --container-workdir=/tdpp --no-container-mount-home "
        "--container-env=NVIDIA_VISIBLE_DEVICES,NVIDIA_DRIVER_CAPABILITIES,PYTHONPATH,NODE_RANK "
        'sh -c \'trap "" USR2; exec "$@"\' sh '
        "python3 -u -m megatron_ext.worker /runs/xl/1/plan.json 3"
    )
    assert command.environment.items() >= GIVEN.items()


def test_pyxis_names_the_component_of_a_heterogeneous_job() -> None:
    step = SlurmStep.own({"SLURMD_NODENAME": "n063"}, het_group=1)
    assert step == SlurmStep(node="n063", cpus=None, het_group=1)
    words = PYXIS.runtime.start(Worker(PYXIS, "tdpp-box", {}, WORKER, step)).argv
    assert line(words).startswith(
        "srun --overlap --mem=0 --nodes=1 --ntasks=1 --nodelist=n063 --export=ALL --het-group=1 '--container-image="
    )


def test_pyxis_takes_an_image_file_as_it_is() -> None:
    own = Path("/images/my image.sqsh")
    assert f"--container-image={own}" in started(replace(PYXIS, image=own, file=own)).argv


def test_pyxis_makes_a_container_without_a_name_anew() -> None:
    assert not any(word.startswith("--container-name") for word in started(replace(PYXIS, reload=True)).argv)


@pytest.mark.parametrize("container", [CPU, APPTAINER, PYXIS], ids=["enroot", "apptainer", "pyxis"])
@pytest.mark.parametrize(
    "value", ["", "a b", "a,b:c=d", "größe", "-dash", "$x `y`", 'in"side', "it's"], ids=lambda value: value or "empty"
)
def test_a_value_of_the_environment_is_in_no_word_that_others_can_read(container: RunContainer, value: str) -> None:
    command = started(container, {"VALUE": value})
    assert command.environment["VALUE"] == value
    assert not any(f"VALUE={value}" in word for word in command.argv)
    assert command.environment.get("APPTAINERENV_VALUE", value) == value


@pytest.mark.parametrize("container", [CPU, APPTAINER, PYXIS], ids=["enroot", "apptainer", "pyxis"])
def test_the_worker_s_own_words_come_last_and_unchanged(container: RunContainer) -> None:
    words = ["python3", "-u", "a b", 'q"', "--mount", ""]
    assert container.runtime.start(Worker(container, "tdpp-box", {}, words, STEP)).argv[-len(words) :] == tuple(words)


def test_a_node_is_prepared_by_bringing_the_image_and_creating_the_container() -> None:
    created = "enroot create -n '<container>' /images/nvcr.io+nvidia+pytorch+23.04-py3.sqsh"
    assert [line(words) for words in CPU.runtime.preparation(CPU, 0)] == [
        "enroot import -o /images/nvcr.io+nvidia+pytorch+23.04-py3.sqsh 'docker://nvcr.io#nvidia/pytorch:23.04-py3'",
        created,
    ]
    assert [line(words) for words in CPU.runtime.preparation(CPU, 1)] == [created]
    own = Path("/images/own.sqsh")
    assert [line(words) for words in CPU.runtime.preparation(replace(CPU, image=own, file=own), 0)] == [
        "enroot create -n '<container>' /images/own.sqsh"
    ]
    assert [words[0] for words in APPTAINER.runtime.preparation(APPTAINER, 0)] == ["apptainer"]
    assert APPTAINER.runtime.preparation(APPTAINER, 1) == []
    assert PYXIS.runtime.preparation(PYXIS, 0) == []


def test_a_container_is_named_after_its_image_and_told_apart() -> None:
    name = container_name("größe/of: it", "/images/a.sqsh", 1, 2)
    assert name.startswith("tdpp-gr--e-of--it-")
    assert len({name, container_name("x", "/images/a.sqsh", 1, 2), container_name("x", "/images/a.sqsh", 1, 3)}) == 3
    assert len(container_name("x" * 300)) < 110


def described(*overrides: str) -> RunContainer | None:
    experiment = compose(["container=enroot", *overrides])
    return run_container(experiment, make_plan(experiment, "tiny/1"), Path("/runs/tiny/1"), Path("/tdpp"))


def test_no_container_is_described_as_none() -> None:
    assert described("container=none") is None


def mounted(*overrides: str) -> list[str]:
    container = described(*overrides)
    assert container is not None
    return [str(mount.target) for mount in container.mounts]


def test_the_source_the_run_and_the_data_are_mounted_where_they_lie() -> None:
    assert mounted("data.prefix=/data/gpt/text") == ["/data/gpt", "/runs/tiny/1", "/tdpp"]
    blended = mounted("data.prefix=/data/gpt/text", "data.blend=[{prefix:/books/text}]")
    assert blended == ["/books", "/data/gpt", "/runs/tiny/1", "/tdpp"]


def test_a_checkpoint_to_go_on_from_is_mounted() -> None:
    assert mounted("data.prefix=/data/x", "train.load=/old/run") == ["/data", "/old/run", "/runs/tiny/1", "/tdpp"]


def test_a_rehearsal_mounts_no_data() -> None:
    rehearsal = ("experiment=seed_a10x8", "executor=local", "executor.rehearse=virtual")
    assert mounted(*rehearsal) == ["/runs/tiny/1", "/tdpp"]


def test_own_mounts_come_in_the_place_where_they_hide_nothing() -> None:
    own = "container.mounts=[/scratch:/tdpp/data,'/raid:/data:ro',/tdpp]"
    container = described("data.prefix=/data/x", own)
    assert container is not None
    assert container.mounts == (
        Mount(Path("/raid"), Path("/data"), read_only=True),
        Mount(Path("/runs/tiny/1"), Path("/runs/tiny/1")),
        Mount(Path("/tdpp"), Path("/tdpp")),
        Mount(Path("/scratch"), Path("/tdpp/data")),
    )


@pytest.mark.parametrize(
    ("overrides", "file"),
    [
        (["runs_dir=/home/me/runs"], "/home/me/images/nvcr.io+nvidia+pytorch+23.04-py3.sqsh"),
        (["container.image_dir=/shared"], "/shared/nvcr.io+nvidia+pytorch+23.04-py3.sqsh"),
        (["container=apptainer", "container.image_dir=/shared"], "/shared/nvcr.io+nvidia+pytorch+23.04-py3.sif"),
        (["container.image=/shared/own.sqsh"], "/shared/own.sqsh"),
        (["container.image=own.sqsh"], str(Path("own.sqsh").absolute())),
        (["container=pyxis"], None),
        (["container=pyxis", "container.image=/shared/own.sqsh"], "/shared/own.sqsh"),
    ],
    ids=["beside the runs", "in a folder", "apptainer", "own", "own, relative", "pyxis", "pyxis, own"],
)
def test_an_image_s_file_lies(overrides: list[str], file: str | None) -> None:
    container = described(*overrides)
    assert container is not None
    assert container.file == (None if file is None else Path(file))


def test_gpus_are_those_of_the_plan() -> None:
    experiment = compose(["experiment=seed_a10x8"])
    seed = run_container(experiment, make_plan(experiment, "xl/1"), Path("/runs/xl/1"), Path("/tdpp"))
    tiny = described()
    assert seed is not None
    assert tiny is not None
    assert (seed.gpus, tiny.gpus) == (True, False)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["data.prefix='/my data/text'"],
            "data.prefix=/my data/text: enroot cannot mount '/my data', because it accepts no",
        ),
        (
            ["train.load='/a:b'"],
            "train.load=/a:b: enroot cannot mount '/a:b', because it accepts no path with spaces, ':'",
        ),
        (["container=pyxis", "data.prefix='/a,b/text'"], "data.prefix=/a,b/text: pyxis cannot mount '/a,b'"),
    ],
    ids=["data", "checkpoint", "pyxis"],
)
def test_a_folder_that_the_runtime_cannot_mount_is_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        described(*overrides)
    assert str(error.value).startswith(told)
