"""`tdpp profile`: measured on this machine, merged over nodes, imported; and what cannot be, in one message."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.compose import compose, compose_unchecked
from conf.errors import TdppError
from conf.run_folder.rundir import RunDir
from conf.schema.experiment import Model, Precision
from fasop.costs.measured_module import LOSS
from fasop.costs.network.links import Link
from fasop.costs.profiles import files as profiles
from fasop.costs.profiles.files import read_profile
from fasop.costs.profiles.steps import Operation
from fasop.shares.public_folders import read_folders
from fasop.simulation.predict import predict
from launch.cli import main
from launch.commands import profile
from launch.commands.launching.resolve_auto import resolve_auto
from launch.machine import processes
from launch.profile.findings import Found, buckets, merged, too_large, unsettled
from launch.profile.link_fit import all_reduce_times, p2p_times
from launch.profile.measured import doing
from megatron_ext.contract.worker import PROFILE
from tests.support.launch.live import token
from tests.support.megatron_ext.images import make_images
from tests.support.megatron_ext.users_files import users_file
from tests.support.ordinary_user import ordinary_user

SMALL = ("model.hidden=32", "model.heads=2", "model.layers=2", "model.sequence_length=16", "model.vocab_size=101")
RATES = (st.floats(0, 1e4), st.floats(0.01, 1e4))
SIZES = [1024 * 4**power for power in range(8)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where profiles are; the working folder, too."""
    monkeypatch.setattr(profiles, "FOLDER", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_this_machine_is_measured_and_a_search_reads_what_was_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two nodes of two ranks: tensor groups and links within nodes, and links between them."""
    nodes = ("cluster.groups.local.count=2", "cluster.groups.local.gpus_per_node=2")
    wanted = ("micro_batches=2", "streams=2", "seconds=0.02", "profile=mine", "page=page.html")
    assert main(["profile", *SMALL, *nodes, *wanted]) == 0
    told = capsys.readouterr()
    written = read_profile("mine")
    (steps,) = written.steps
    assert (steps.model, steps.precision, steps.micro_batch_size, steps.most_workers) == ("tiny", Precision.fp32, 2, 2)
    assert [times.workers for times in steps.times] == [1, 2]
    places = {(one.operation, one.ranks, one.nodes, one.sharing) for one in written.collectives}
    assert places == {(one, 2, nodes, nodes) for one in Operation for nodes in (1, 2)}
    assert all([*one.us_by_bytes] == SIZES for one in written.collectives)
    assert "on a CPU they are threads" in told.out
    assert "Gradient buckets of tiny" in (folder / "page.html").read_text()
    assert main(["profile", "export=ours", "profile=mine"]) == 0
    public = read_folders([Path("ours")])
    assert {workers for *_, workers in public.steps} == {1, 2}
    assert public.buckets == {"tiny": tuple(written.buckets_mib["tiny"])}
    assert {where: len(points) for where, points in public.all_reduces.items()} == {"within": 3, "between": 3}
    assert [limit.most_workers for limit in public.limits.values()] == [2]
    capsys.readouterr()
    assert [(one.tensor, one.micro_batch_size) for one in written.costs] == [(1, 2), (2, 2)]
    alone, two = (one.layer for one in written.costs)
    assert two.activation_bytes is not None and alone.activation_bytes is not None
    assert alone.activation_bytes / 2 < two.activation_bytes < alone.activation_bytes
    for links in (written.within, written.between):
        assert links.p2p is not None and links.all_reduce is not None
        assert len(links.p2p.us_by_bytes) == len(links.all_reduce.us_by_bytes) == 8
        assert (links.p2p.ranks, links.all_reduce.ranks) == (2, 2)
    assert Precision.fp32 in written.optimizer_ns_per_parameter
    assert f"cluster.groups.local.inter_gbit_per_s={written.between.p2p.gbit_per_s:g}" in told.out  # type: ignore[union-attr]
    (run,) = folder.glob("runs/profile/tiny/*/jobs.json")
    assert not processes.find(token(RunDir(run.parent)))
    searched = ["search", *SMALL, *nodes, "cluster.gpus.cpu.profile=mine", "parallel.global_batch_size=4", "top=1"]
    assert main(searched) == 0
    table = capsys.readouterr()
    assert "not measured" not in table.out + table.err


@pytest.mark.slow
def test_a_module_is_measured_by_kind_of_block_and_its_plan_is_one_that_launch_takes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An LSTM encoder and decoder, captured: states and a mask cross its cuts."""
    module = ["model=module", f"model.code={users_file(folder, 'Seq2Seq')}:Seq2Seq", "model.capture=true"]
    assert main(["profile", *module, "micro_batches=1,2", "seconds=0.02", "profile=mine"]) == 0
    shown = capsys.readouterr().out
    written = read_profile("mine")
    found = written.modules["module"]
    assert [block.name for block in found.blocks][:3] == ["source", "encoder1", "encoder2"]
    assert {costs.micro_batch_size for costs in written.costs} == {1, 2}
    for costs in written.costs:
        assert costs.parts.keys() == {*(block.kind for block in found.blocks), LOSS}
        assert costs.sequence is not None
        assert costs.sequence.crossing[0] == 0 < min(costs.sequence.crossing[1:])
    assert written.within.p2p is not None
    assert all(block.name in shown for block in found.blocks)
    sizes = ["cluster.groups.local.gpus_per_node=2", "parallel.global_batch_size=4", "parallel.pipeline=2"]
    searched = ["search", *module, *sizes, "profile=mine", "top=1", "explain=1", "page=page.html", "plan=./best.yaml"]
    assert main(searched) == 0
    assert " source" in capsys.readouterr().out
    page = (folder / "page.html").read_text()
    assert "samples/s" in page
    assert "tokens/s" not in page
    assert main(["launch", *module, "parallel=./best.yaml", "train.iterations=6"]) == 0
    assert main([*searched[:-1], "tokens=5"]) == 1
    assert "have no tokens; give the training's length with train.iterations=N" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_of_images_is_measured_by_kind_of_block_and_its_plan_is_one_that_launch_takes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_images(folder, 8)
    model = ["model=vgg-tiny", f"data.prefix={data}"]
    assert main(["profile", *model, "micro_batches=1,2", "seconds=0.02", "profile=mine"]) == 0
    shown = capsys.readouterr().out
    found = read_profile("mine").modules["vgg-tiny"]
    assert [block.name for block in found.blocks] == compose([*model, "parallel=single"]).model.block_names()
    assert sum(block.parameters for block in found.blocks) == compose([*model, "parallel=single"]).model.parameters()
    assert all(block.name in shown for block in found.blocks)
    sizes = ["cluster.groups.local.gpus_per_node=2", "parallel.global_batch_size=4", "parallel.pipeline=2"]
    searched = ["search", *model, *sizes, "profile=mine", "top=1", "plan=./best.yaml"]
    assert main(searched) == 0
    assert main(["launch", *model, "parallel=./best.yaml", "train.iterations=6"]) == 0
    capsys.readouterr()
    assert main([*searched[:-1], "model.width=8"]) == 1
    assert "model=vgg-tiny: profile 'mine' is for a model.family=vgg of other sizes" in capsys.readouterr().err
    assert main(["profile", *model, "tensor_sizes=2", "profile=other"]) == 1
    assert "model.family=vgg has no tensor parallelism" in capsys.readouterr().err


def test_a_module_that_cannot_be_measured_is_one_message_before_anything_is_started(folder: Path) -> None:
    file = users_file(folder, "convnet")
    words = ["model=module", f"model.code={file}:convnet"]
    with pytest.raises(TdppError, match=r"tensor_sizes=2: model.family=module has no tensor parallelism"):
        profile.main([*words, "tensor_sizes=2"])
    with pytest.raises(TdppError, match=rf"model.code={file}:nothing: .* has no nothing; it defines"):
        profile.main(["model=module", f"model.code={file}:nothing"])
    file.write_text("def data(split, seed):\n    return [(1.0, 1.0)]\n\n\ndef convnet():\n    return 1 / 0\n")
    with pytest.raises(TdppError, match=r"line 6, in convnet: return 1 / 0: ZeroDivisionError"):
        profile.main([*words, "train.seed=5"])
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("note", "told"),
    [
        (None, "getting ready"),
        ({"device": "CPU"}, "getting ready"),
        ({"doing": "the largest micro-batch, 64 now"}, "measuring the largest micro-batch, 64 now"),
        (
            {"doing": "tensor 2, micro-batch 4", "number": 3, "of": 7, "left_s": 250},
            "measuring tensor 2, micro-batch 4 (3 of 7, about 4 min left)",
        ),
        ({"doing": None, "done": True}, "done"),
    ],
    ids=["no-note", "beginning", "trying", "measuring", "done"],
)
def test_what_is_measured_is_told_from_what_the_first_rank_notes(
    tmp_path: Path, note: dict[str, object] | None, told: str
) -> None:
    """Which the one who waits looks at from time to time only."""
    run = RunDir(tmp_path / "run")
    if note is not None:
        run.profile_rank(0).parent.mkdir(parents=True)
        run.write_json(run.profile_rank(0), note)
    assert doing(run) == told


def test_a_profile_may_lie_anywhere_and_a_rehearsal_reads_it_there(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an installation that others own, where nobody may write."""
    there = tmp_path_factory.mktemp("any where")
    monkeypatch.chdir(there)
    published(there, 1)
    assert main(["profile", *KNOWN, "import=gpt_A10", "profile=./mine.yaml"]) == 0
    assert not list(folder.glob("*.yaml"))
    assert read_profile("./mine.yaml") == read_profile(str(there / "mine.yaml"))
    words = ["experiment=seed_a10x8", "cluster.gpus.a10.profile=mine.yaml"]
    experiment = compose(words)
    assert experiment.cluster.gpus["a10"].profile == str(there / "mine.yaml")
    local = ["executor=local", "container=none", "executor.rehearse=virtual", "dry_run=true"]
    assert main(["launch", *words, *local]) == 0
    assert main(["search", *words, "parallel.schedule=one_f_one_b", "parallel.tensor=1", "top=1"]) == 0
    monkeypatch.chdir(folder)  # a run is looked at from anywhere
    assert predict(experiment).iteration_s > 0
    with pytest.raises(TdppError, match=r"no profile '.*/mine\.yaml'; 'tdpp profile' makes one"):
        predict(compose(words))


def test_of_several_gpus_every_file_has_a_name_of_its_own(folder: Path) -> None:
    words = ["experiment=seed_a100x1_a10x7", "container=none"]
    names = profile.prepare(profile.parse([*words, "profile=here/mine.yaml"])).names
    assert names == {"a100_40gb": "here/mine_a100_40gb.yaml", "a10": "here/mine_a10.yaml"}
    assert profile.prepare(profile.parse([*words, "profile=mine"])).names == {
        "a100_40gb": "mine_a100_40gb",
        "a10": "mine_a10",
    }


def test_a_profile_that_cannot_be_written_is_told_before_anything_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.chmod(0o555)
    monkeypatch.setattr(profiles, "FOLDER", Path())
    with ordinary_user(), pytest.raises(TdppError) as caught:
        profile.main(["profile=mine"])
    assert str(caught.value) == (
        "profile=mine: you may not write to .; give the path of a file instead, such as ./mine.yaml"
    )
    with ordinary_user(), pytest.raises(TdppError, match=r"profile=./mine.yaml: permission denied; choose a folder"):
        profile.main(["profile=./mine.yaml"])


def test_a_worker_that_cannot_run_is_told_with_its_reason_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *SMALL, "+cluster.environment.PYTHONHOME=/nonexistent", "profile=mine"]) == 1
    assert (
        "the worker of node local-0 exited with 1: ModuleNotFoundError: No module named 'encodings'"
        in capsys.readouterr().err
    )
    assert not (folder / "mine.yaml").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["profile=taken"],
            r"profile=taken: .*taken\.yaml already exists; choose another name, or use add=true to add .*",
        ),
        (["profile=../x"], "profile='../x' cannot name a profile"),
        (
            ["profile=nowhere/x.yaml"],
            "profile=nowhere/x.yaml: no folder nowhere; create it, or choose another",
        ),
        (
            ["engine=megatron_core", "micro_batches=4+"],
            r"micro_batches=4\+ trains the whole model with tdpp's engine: leave it out, or use engine=tdpp",
        ),
        (
            ["engine=megatron_core", "cluster.groups.local.gpus_per_node=3", "tensor_sizes=2"],
            "tensor_sizes=2 must divide the ranks of every node with engine=megatron_core, .*, but a node has 3; leave",
        ),
        (["overwrite=true", "add=true"], "these exclude each other"),
        (["tensor_sizes=0"], "tensor_sizes=0 must be a whole number, at least 1; separate several"),
        (["tensor_sizes=3"], "tensor_sizes=3 does not divide model.heads=4"),
        (["micro_batches=a"], "micro_batches=a must be a whole number, at least 1; separate several"),
        (["seconds=nan"], "seconds=nan must be a number above 0"),
        (["cluster=nope"], "Could not find 'cluster/nope'"),
        (
            ["cluster=a10x8", "tensor_sizes=8"],
            "tensor_sizes=8: a tensor group must fit in one node, and the largest has 4 GPUs",
        ),
        (["executor.rehearse=virtual"], "executor.rehearse=virtual: a rehearsal measures nothing"),
        (
            ["import=x", "gpu=A10"],
            r"import=x, gpu=A10: an import needs precision=…, micro_batch_size=…, backward_ratio",
        ),
    ],
    ids=[
        "taken",
        "name",
        "no-folder",
        "core-room",
        "core-groups",
        "both",
        "tensor",
        "heads",
        "batch",
        "seconds",
        "choice",
        "node",
        "rehearsal",
        "import",
    ],
)
def test_what_cannot_be_is_one_message_before_anything_is_started(folder: Path, words: list[str], message: str) -> None:
    (folder / "taken.yaml").touch()
    with pytest.raises(TdppError, match=message):
        profile.main(words)
    assert not (folder / "runs").exists()


def test_a_dry_run_shows_the_short_job_on_all_gpus_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["experiment=seed_a100x1_a10x7", "container=none", "dry_run=true", "micro_batches=1,2", "seconds=5"]
    assert profile.main(words) == 0
    out = capsys.readouterr().out
    assert "-u -m megatron_ext.profile" in out
    assert '"padded_vocab_sizes":{"1":50304,"2":50432,"4":50688},"micro_batch_sizes":[1,2],"seconds":5.0' in out
    assert "#SBATCH --time=22\n" in out  # 10 to wait; 6 sizes of 70 s and 300 s for links
    assert not list(folder.iterdir())


@given(*RATES)
def test_latency_and_bandwidth_are_those_of_the_times(latency_us: float, gbit_per_s: float) -> None:
    link = Link(latency_s=latency_us * 1e-6, s_per_byte=8e-9 / gbit_per_s)
    alone = p2p_times({size: link.takes(float(size)) * 1e6 for size in SIZES}, sharing=1)
    shared = p2p_times({size: link.takes(4.0 * size) * 1e6 for size in SIZES}, sharing=4)
    for found in (alone, shared):
        assert found.gbit_per_s == pytest.approx(gbit_per_s, rel=1e-3)
        assert found.latency_us == pytest.approx(latency_us, rel=1e-3, abs=1e-3 + 8 / gbit_per_s)


@given(*RATES, st.integers(2, 16))
def test_an_all_reduce_tells_the_link_of_its_ring(latency_us: float, gbit_per_s: float, ranks: int) -> None:
    link = Link(latency_s=latency_us * 1e-6, s_per_byte=8e-9 / gbit_per_s)
    ring = link.all_reduce(ranks)
    found = all_reduce_times({size: ring.takes(float(size)) * 1e6 for size in SIZES}, ranks, sharing=1)
    assert found.gbit_per_s == pytest.approx(gbit_per_s, rel=1e-3)
    assert found.latency_us == pytest.approx(latency_us, rel=1e-3, abs=1e-3 + 8 / gbit_per_s)


def point(tensor: int, ms: float, **more: Any) -> dict[str, Any]:
    part = {"forward": ms, "backward": 2 * ms, "forward_spread": 0.01, "backward_spread": 0.01, "activation_bytes": 8}
    parts = dict.fromkeys(("embedding", "layer", "head"), part)
    told = {"too_large": None, "known": True, "disturbed": 0.0, "peak_bytes": 100, "peak_layers": 2}
    return {"tensor": tensor, "micro_batch_size": 1, "parts": parts, **told, **more}


def rank(*points: dict[str, Any], to: Sequence[int] = (), us: float = 10.0) -> dict[str, Any]:
    times = {str(size): us + size * 1e-3 for size in SIZES}
    p2p = [{"to": other, "us_by_bytes": times} for other in to]
    told = {"device": "device", "versions": {"torch": "2"}, "optimizer_ns": [0.5, 0.01], "all_reduces": []}
    return {**told, "points": list(points), "p2p": p2p}


def mixed() -> Found:
    """A node of two A100, then two of two A10, the second one slower and with too little memory for tensor 1."""
    full = point(1, 1.0, too_large="CUDA out of memory", parts={})
    ranks = [
        rank(point(1, 0.5), point(2, 0.3), to=[1, 2], us=5.0),
        rank(point(1, 0.5), point(2, 0.3), to=[3], us=5.0),
        rank(point(1, 1.0), point(2, 0.6), to=[3, 4], us=20.0),
        rank(point(1, 1.0), point(2, 0.6), to=[5], us=20.0),
        rank(full, point(2, 0.8), to=[5], us=20.0),
        rank(full, point(2, 0.8, known=False, disturbed=0.25), us=20.0),
    ]
    one = compose(["experiment=seed_a100x1_a10x7"])
    nodes = (("a100_40gb", (0, 1)), ("a10", (2, 3)), ("a10", (4, 5)))
    return Found(experiment=one, nodes=nodes, ranks=dict(enumerate(ranks)))


def test_nodes_of_a_type_are_merged_and_types_are_not() -> None:
    a10, a100 = (merged(mixed(), gpu, "a test", "2026-01-01") for gpu in ("a10", "a100_40gb"))
    assert (a10.gpu, a100.gpu) == ("A10", "A100-40GB")
    (two,) = a10.costs
    assert (two.tensor, two.parts["layer"].forward, two.parts["layer"].forward_spread) == (
        2,
        0.7,
        0.1,
    )  # median, half the range
    assert [(one.tensor, one.layer.forward) for one in a100.costs] == [(1, 0.5), (2, 0.3)]
    assert a10.optimizer_ns_per_parameter == {Precision.fp16: 0.5}
    assert two.peak_bytes == 100
    assert too_large(mixed(), "a10") == ["tensor 1, micro-batch 1"]
    assert unsettled(mixed(), "a10") == ["tensor 2, micro-batch 1 (25% of it, disturbed by other processes)"]


def test_links_are_those_of_the_type_and_from_a_single_node_those_to_others() -> None:
    a10, a100 = (merged(mixed(), gpu, "a test", "2026-01-01") for gpu in ("a10", "a100_40gb"))
    assert a10.within.p2p is not None and a10.between.p2p is not None and a100.between.p2p is not None
    assert (a10.within.p2p.latency_us, a100.between.p2p.latency_us) == (20, 5)
    assert (a10.within.p2p.gbit_per_s, a10.between.p2p.gbit_per_s) == (8, 16)  # two ranks of a node sent at once


KNOWN = ["gpu=A10", "precision=fp16", "micro_batch_size=1", "backward_ratio=1.6", "model=xl", "profile=old"]


def published(folder: Path, tensor: int, layer: float = 2.342229e-3, layers: int = 48) -> None:
    np.save(folder / f"gpt_A10_{tensor}.npy", np.array([0.297e-3, *[layer] * layers, 2.1184e-3]))


def test_published_costs_are_imported_with_the_ratio_that_was_given(folder: Path) -> None:
    published(folder, 1)
    published(folder, 2, 1.644721e-3)
    assert profile.main([f"import={folder}/gpt_A10", *KNOWN]) == 0
    xl: Model = compose(["experiment=seed_a10x8"]).model
    old = read_profile("old")
    one, two = old.points(xl, Precision.fp16)
    assert (one.tensor, one.head.forward, two.tensor) == (1, 2.118, 2)
    assert (two.parts["layer"].forward, two.parts["layer"].backward) == (1.645, 2.632)
    assert "backward = 1.6 x forward, as given to the import" in old.source
    assert one.layer.forward_spread is None


@pytest.mark.slow
def test_a_doubt_about_a_figure_is_a_warning_and_the_profile_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published(folder, 1)
    assert profile.main(["import=gpt_A10", *KNOWN, "backward_ratio=8.8"]) == 0
    told = capsys.readouterr()
    assert "(old: model=xl parallel.tensor=1 " in told.err
    assert "head.backward=18.64 ms is 8.8 times forward (2.118 ms), but usual is 0.125 to 8" in told.err
    assert read_profile("old").costs[0].parts["head"].backward == 18.64
    words = ("cluster=a10x8", "cluster.groups.gpu2.count=2", "model=xl", "train.precision=fp16")
    searched = (*words, "parallel.global_batch_size=16", "parallel.schedule=one_f_one_b", "top=1")
    assert main(["search", *searched, "cluster.gpus.a10.profile=old"]) == 0
    assert "(profile 'old': model=xl parallel.tensor=1 " in capsys.readouterr().err
    plan = ("parallel=single", "parallel.pipeline=8", "parallel.micro_batch_size=1", "train=demo")
    rehearsed = ("executor.rehearse=virtual", "train.iterations=6", "cluster.gpus.a10.profile=old")
    assert main(["launch", *words, *plan, *rehearsed]) == 0
    assert "(profile 'old': model=xl parallel.tensor=1 " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["import=nope/gpt_A10"], r"nope has no files gpt_A10_<tensor size>\.npy; it has no \.npy files"),
        (["import=gpt_A100"], r"no files gpt_A100_<.*; it has import=.*gpt_A10"),
        (["import=gpt_A10", "model=small"], r"shape \(50,\), but model=small of 24 layers needs 26 numbers"),
        (["import=damaged_A10"], r"damaged_A10_1\.npy: cannot be read as a numpy array"),
        (["import=pipe_A10"], r"pipe_A10_1\.npy: cannot be read as a numpy array: not a regular file"),
        (["import=text_A10"], r"text_A10_1\.npy: cannot be read as a numpy array"),
        (
            ["import=slip_A10"],
            r"slip_A10_1\.npy: value 7 \(counted from 0, the embedding\) is -0\.01 s; times must be above 0",
        ),
    ],
    ids=["no-folder", "no-files", "another-model", "damaged", "pipe", "no-array", "one-negative-layer"],
)
def test_what_cannot_be_imported_is_one_message(folder: Path, words: list[str], message: str) -> None:
    published(folder, 1)
    (folder / "text_A10_1.npy").write_text("no array")
    os.mkfifo(folder / "pipe_A10_1.npy")
    np.save(folder / "damaged_A10_1.npy", np.ones(50))
    damaged = (folder / "damaged_A10_1.npy").read_bytes().replace(b"(50,)", b"(50 (")
    (folder / "damaged_A10_1.npy").write_bytes(damaged)
    np.save(folder / "slip_A10_1.npy", np.where(np.arange(50) == 7, -0.01, 0.01))
    with pytest.raises(TdppError, match=message):
        profile.main([*KNOWN, *words])
    assert not (folder / "old.yaml").exists()


def test_what_is_added_joins_what_is_there_and_replaces_the_same_sizes(folder: Path) -> None:
    published(folder, 1)
    assert profile.main([*KNOWN, "import=gpt_A10"]) == 0
    published(folder, 1, 2.5e-3)
    assert profile.main([*KNOWN, "import=gpt_A10", "precision=bf16", "add=true"]) == 0
    assert profile.main([*KNOWN, "import=gpt_A10", "add=true"]) == 0
    both = {str(one.precision): one.layer.forward for one in read_profile("old").costs}
    assert both == {"bf16": 2.5, "fp16": 2.5}
    text = (folder / "old.yaml").read_text()
    assert text.count("# Made by: tdpp profile") == 3
    assert text.count("interval. docs/profile.md") == 1
    with pytest.raises(TdppError, match="add=true: the profile is for gpu A10, but the new measurements are for A100"):
        profile.main([*KNOWN, "import=gpt_A10", "gpu=A100", "add=true"])
    with pytest.raises(TdppError, match="add=true: the profile already has another model named 'xl'"):
        profile.main([*KNOWN, "import=gpt_A10", "model.heads=20", "add=true"])


def test_the_request_reaches_the_ranks_as_it_was_made(folder: Path) -> None:
    job = profile.prepare(profile.parse(["tensor_sizes=2", "micro_batches=4"]))
    request = json.loads(job.experiment.cluster.environment[PROFILE])
    assert request == {"padded_vocab_sizes": {"2": 512}, "micro_batch_sizes": [4], "seconds": 10.0}
    assert job.experiment.parallel.world_size == 2
    assert job.names == {"cpu": "cpu"}


@pytest.mark.slow
def test_larger_micro_batches_are_tried_until_there_is_no_room(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU its declared memory is the limit; a launch that chooses the micro-batch keeps to it."""
    words = [*SMALL, "cluster.groups.local.gpus_per_node=2", "cluster.gpus.cpu.memory_gib=0.01", "seconds=0.1"]
    assert main(["profile", *words, "micro_batches=4+", "tensor_sizes=1", "profile=mine"]) == 0
    profile = read_profile("mine")
    (room,) = profile.room
    assert room.model == "tiny"
    assert room.micro_batch_size % 4 == 0
    sizes = [one.micro_batch_size for one in profile.costs]
    assert sizes[:3] == [4, 8, 16]
    assert sizes[-1] == room.micro_batch_size
    captured = capsys.readouterr()
    assert f"with the whole model tiny on one GPU: {room.micro_batch_size}, " in captured.out
    assert "(mine: no larger micro-batch of the whole model fits: out of memory: " in captured.err
    assert len(profile.buckets_mib["tiny"]) == 1
    batch = 64 * room.micro_batch_size
    auto = [
        "parallel=single",
        "parallel.data=2",
        f"parallel.global_batch_size={batch}",
        "parallel.micro_batch_size=auto",
    ]
    chosen, said = resolve_auto(compose_unchecked([*words[:-1], *auto, "cluster.gpus.cpu.profile=mine"]))
    assert chosen.parallel.micro_batch_size <= room.micro_batch_size
    assert f" {room.micro_batch_size} were compared" in str(said)


KILLED_PROFILE = "tests.support.launch.killed_profile"
TWO = (*SMALL, "cluster.groups.local.gpus_per_node=2", "seconds=0.05", "tensor_sizes=1", "profile=mine")


def killed_at(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setenv("KILLED_AT", what)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


@pytest.mark.slow
def test_a_size_with_which_linux_kills_a_rank_does_not_fit_and_the_rest_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It once took all measurements with it, after 9 minutes."""
    killed_at(monkeypatch, "room:16,streams:8,point:8")
    assert profile.main([*TWO, "micro_batches=4+", "streams=1,2"], worker=KILLED_PROFILE) == 0
    told = capsys.readouterr().err
    for size in ("micro-batch 16 of the whole model", "2 streams with micro-batch 4", "tensor 1, micro-batch 8"):
        assert f"{size} does not fit into memory: Linux killed a rank; going on without it" in told
    written = read_profile("mine")
    assert [room.micro_batch_size for room in written.room] == [12]
    assert {steps.micro_batch_size: [one.workers for one in steps.times] for steps in written.steps} == {4: [1]}
    assert [costs.micro_batch_size for costs in written.costs] == [4]
    assert written.within.p2p is not None


@pytest.mark.slow
def test_what_was_finished_is_written_where_the_rest_cannot_be_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed_at(monkeypatch, "links:0")
    with pytest.raises(TdppError, match="killed by SIGKILL"):
        profile.main([*TWO, "micro_batches=1,2"], worker=KILLED_PROFILE)
    assert "(incomplete: mine; repeat with add=true to measure the rest)" in capsys.readouterr().err
    written = read_profile("mine")
    assert [costs.micro_batch_size for costs in written.costs] == [1, 2]
    assert written.within.p2p is None


def test_gradients_that_come_first_are_in_the_first_bucket() -> None:
    million = 2**20 // 4
    assert buckets([("last", million // 2), ("head", million), ("layer", 20 * million), ("first", 10 * million)]) == [
        *(1.5, 30.0),
    ]
    assert buckets([("a", million), ("b", 25 * million), ("c", 3)]) == pytest.approx([1.0, 25.0, 12 / 2**20], rel=1e-3)
    assert buckets([]) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["micro_batches=0+"], "micro_batches=0+"),
        (["micro_batches=4+,8"], "micro_batches=4+,8"),
        (["micro_batches=4+", "tensor_sizes=2"], "tries the whole model on one GPU: add 1 to tensor_sizes"),
    ],
)  # fmt: skip
def test_room_that_cannot_be_tried(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["profile", *words, "profile=mine", "dry_run=true"]) != 0
    assert message in capsys.readouterr().err
