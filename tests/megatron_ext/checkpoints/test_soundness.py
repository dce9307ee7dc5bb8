"""A checkpoint knows what belongs to it: whatever was changed in it, in its place or in its description is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.compose import compose
from launch.control.planning.plan import make_plan
from megatron_ext.checkpoints import safetensors
from megatron_ext.checkpoints.header import LENGTH, of_part, part_name, read_header
from megatron_ext.checkpoints.kept_weights import kind_of
from megatron_ext.checkpoints.meta import Checkpoint, Meta
from megatron_ext.checkpoints.part_tensors import read_part
from megatron_ext.contract.errors import EngineError
from megatron_ext.families.tasks import task_of
from tests.support import ROOT
from tests.support.megatron_ext.checkpoints import save, save_run, without_checksums

NEWEST = "; the newest sound checkpoint there is"
EVERYTHING = {
    "scaler": {"scale": 65536.0, "good": 3.0, "patience": 20.0},
    "order": {"seed": 1234.0, "epochs": 1.5},
    "evaluation": {"loss": 0.1 + 0.2, "e5": 1.5e-05, "\u00ea": 1.0},
    "optimizer": "lamb",
}


def flipped(path: Path, first: int, last: int) -> Iterator[str]:
    """Each of the bits of these bytes of a file, flipped."""
    sound = path.read_bytes()
    for place in range(first, last):
        for bit in range(8):
            content = bytearray(sound)
            content[place] ^= 1 << bit
            path.write_bytes(content)
            yield f"byte {place}, bit {bit}: {bytes(content[max(place - 20, 0) : place + 20])!r}"
    path.write_bytes(sound)


@pytest.mark.slow
@pytest.mark.parametrize("known", [{}, pytest.param(EVERYTHING, marks=pytest.mark.slow)], ids=["least", "most"])
def test_each_flipped_bit_of_meta_json_is_refused(tmp_path: Path, known: dict) -> None:
    expected = save(tmp_path / "one", 5, {"layers": 1, "hidden": 8, "heads": 1, "vocab_size": 9}, **known)
    path = expected.folder / "meta.json"
    for where in flipped(path, 0, path.stat().st_size):
        with pytest.raises(EngineError):
            pytest.fail(f"{where}: {Checkpoint.read(expected.folder)}")
    assert Checkpoint.read(expected.folder) == expected


@pytest.mark.slow
def test_each_flipped_bit_of_a_part_s_header_is_refused(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "one", 5)
    path = checkpoint.part("layer-00001")
    for where in flipped(path, 0, read_header(path).start):
        for reading in (lambda: Checkpoint.read(checkpoint.folder), lambda: read_part(checkpoint, "layer-00001")):
            with pytest.raises(EngineError):
                pytest.fail(f"{where}: {reading()}")


@pytest.mark.slow
def test_each_flipped_bit_of_the_tensors_is_refused_by_who_reads_them(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "one", 5)
    path = checkpoint.part("layer-00001")
    for where in flipped(path, read_header(path).start, path.stat().st_size):
        Checkpoint.read(checkpoint.folder)  # does not read them
        with pytest.raises(EngineError, match="expected the CRC-32"):
            pytest.fail(f"{where}: {read_part(checkpoint, 'layer-00001')}")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def exchange(part: Path) -> None:
    """With the layer after it."""
    other, kept = part.with_name("layer-00002.safetensors"), part.with_name("kept")
    part.rename(kept)
    other.rename(part)
    kept.rename(other)


def of_other_iteration(part: Path) -> None:
    shutil.copy(part.parent.parent / "iter_0000005" / part.name, part)


def of_other_run(part: Path) -> None:
    """The same part at the same iteration."""
    safetensors.write(part, {"weights/w": torch.full((4, 4), 0.5)}, of_part(part.stem, 15))


def lengthened(part: Path) -> None:
    content = part.read_bytes()
    part.write_bytes(LENGTH.pack(2**62) + content[8:])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "cannot be read: No such file"),
    "empty": (lambda path: path.write_bytes(b""), "expected a header of some bytes, found an empty file"),
    "cut": (cut, r"damaged: expected \d+ bytes, found \d+"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), r"damaged: expected \d+ bytes, found \d+"),
    "of-zeros": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "damaged"),
    "cut-in-its-header": (lambda path: path.write_bytes(path.read_bytes()[:100]), "expected a header of"),
    "header-longer-than-all": (lengthened, "expected a header of 4611686018427387904 bytes"),
    "text": (lambda path: path.write_bytes(b"PK"), "not a safetensors file, or damaged"),
    "a-folder": (lambda path: (path.unlink(), path.mkdir()), "cannot be read: not a regular file"),
    "exchanged": (exchange, "expected layer-00001 of iteration 15, found layer-00002 of iteration 15"),
    "of-another-iteration": (
        of_other_iteration,
        "expected layer-00001 of iteration 15, found layer-00001 of iteration 5",
    ),
    "of-another-run": (of_other_run, "not the file that this checkpoint was saved with"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("old", [False, True], ids=["", "saved-without-checksums"])
def test_a_damaged_part_is_named_with_the_newest_sound_checkpoint(tmp_path: Path, damage: str, old: bool) -> None:
    *_, sound, worse, last = save_run(tmp_path, 5, 9, 12, 15)
    worse.part("head").unlink()
    if old:
        if damage.startswith(("exchanged", "of-")) and damage != "of-zeros":
            pytest.skip("parts that say nothing of themselves (docs/checkpoints.md)")
        for iteration in (5, 9, 15):
            without_checksums(tmp_path / "checkpoints" / f"iter_{iteration:07d}")
    change, message = DAMAGES[damage]
    change(last.part("layer-00001"))
    for path in (tmp_path, tmp_path / "checkpoints", last.folder, tmp_path / "checkpoints" / "latest"):
        file = last.part("layer-00001")
        with pytest.raises(EngineError, match=rf"^{file}: .*{message}.*{NEWEST} {sound.folder}$"):
            Checkpoint.at(path)


GONE = object()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"iteration": 14}, "damaged or edited: expected the checksum [0-9a-f]{32}, found [0-9a-f]{32}"),
        ({"consumed_samples": 0}, "damaged or edited"),
        ({"updates": 1}, "damaged or edited"),
        ({"checksum": GONE}, "damaged or edited: expected the checksum None"),
        ({"version": 2}, "version 2 has no checksums, but it has some"),
        ({"version": 2, "checksum": GONE}, "version 2 has no checksums, but it has some"),
        ({"version": 2, "checksum": GONE, "parts": GONE}, "embedding.safetensors: damaged: it is newer than"),
        ({"version": 4}, "expected a checkpoint of version 3, found version 4"),
    ],
    ids=["iteration", "samples", "updates", "no-checksum", "older", "older-with-parts", "older-without", "newer"],
)
def test_an_edited_description_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    """Also one that pretends to be from before there were checksums."""
    sound, last = save_run(tmp_path, 5, 15)
    path = last.folder / "meta.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not GONE}))
    with pytest.raises(EngineError, match=rf"{message}.*{NEWEST} {sound.folder}$"):
        Checkpoint.at(tmp_path)


def test_spaces_and_the_order_of_keys_in_meta_json_do_not_matter(tmp_path: Path) -> None:
    (saved,) = save_run(tmp_path, 5)
    path = saved.folder / "meta.json"
    path.write_text(json.dumps(dict(sorted(json.loads(path.read_text()).items()))))
    assert Checkpoint.at(tmp_path) == saved


def test_a_checkpoint_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    """A folder called otherwise may hold any."""
    saved, last = save_run(tmp_path, 5, 15)
    shutil.rmtree(last.folder)
    shutil.copytree(saved.folder, last.folder)
    with pytest.raises(EngineError, match=rf"of iteration 5, the folder of iteration 15{NEWEST} .*iter_0000005$"):
        Checkpoint.at(tmp_path)
    shutil.copytree(saved.folder, tmp_path / "kept")
    assert Checkpoint.at(tmp_path / "kept").meta == saved.meta


def test_where_none_is_sound_that_is_said(tmp_path: Path) -> None:
    checkpoints = save_run(tmp_path, 5, 15)
    for one in checkpoints:
        one.part("head").unlink()
    with pytest.raises(EngineError, match=r"no other checkpoint there is sound$"):
        Checkpoint.at(tmp_path)
    (tmp_path / "checkpoints" / "latest").unlink()
    with pytest.raises(EngineError, match=r"no checkpoint found; .*; no other checkpoint there is sound$"):
        Checkpoint.at(tmp_path)


def test_without_latest_the_newest_sound_one_is_named(tmp_path: Path) -> None:
    sound, _ = save_run(tmp_path, 5, 15)
    (tmp_path / "checkpoints" / "iter_0000015" / "meta.json").unlink()
    for content in (None, "iter_0000099\n"):
        latest = tmp_path / "checkpoints" / "latest"
        latest.unlink() if content is None else latest.write_text(content)
        with pytest.raises(EngineError, match=f"{NEWEST} {sound.folder}$"):
            Checkpoint.at(tmp_path)


def test_one_from_before_checksums_is_read_with_what_it_has(tmp_path: Path) -> None:
    (saved,) = save_run(tmp_path, 5)
    without_checksums(saved.folder)
    found = Checkpoint.at(tmp_path)
    assert found.meta == replace(saved.meta, parts=None)
    assert found.parts() == saved.parts()
    assert kind_of(found) == "weights"
    assert read_part(found, "head").keys() == {"weights/w"}


TINY = [path.stem for path in sorted((ROOT / "conf" / "model").glob("*tiny.yaml"))]


@pytest.mark.parametrize("name", TINY)
def test_the_parts_of_an_old_checkpoint_are_the_blocks_of_its_family(name: str) -> None:
    engine = ["engine=megatron_core"] if name.startswith("mixtral") else []  # which has experts
    plan = make_plan(compose([f"model={name}", "parallel=single", "data.prefix=any", *engine]), "test/run")
    meta = Meta(iteration=0, consumed_samples=0, updates=0, scaler=None, order=None, model=plan.model.identity())
    assert meta.part_names() == [part_name(block.name) for block in task_of(plan).blocks]
