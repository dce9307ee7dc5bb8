"""Where prepared data go: damaged data are mended, a place that cannot take any is named."""

from __future__ import annotations

import errno
from pathlib import Path
from unittest.mock import patch

import pytest
import rich.progress  # noqa: F401 - as an ordinary user the test may not read it any more
from rich.progress import Progress

from data_prep.errors import DataPrepError
from data_prep.files.journal import WITHOUT_LOCKS
from data_prep.preparation import options
from data_prep.preparation.prepare import Request, prepare
from data_prep.text.corpus import Corpus, stdlib_corpus
from data_prep.tokenizers.tokenizer import ByteTokenizer
from launch.cli import main as tdpp
from launch.commands import data as cli
from megatron_ext.data.index_maps import build_or_load, saved_maps
from megatron_ext.data.indexed_dataset import IndexedDataset, data_file
from tests.support.ordinary_user import ordinary_user

PREPARE = ["prepare", "--source", "stdlib", "--output", "out/text"]
PREFIX = Path("out/text_text_document")


@pytest.fixture
def prepared(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What `tdpp data` writes for a small library: bytes by suffix."""
    monkeypatch.setattr(options, "stdlib_corpus", lambda _: corpus)
    monkeypatch.chdir(tmp_path)
    assert cli.main(PREPARE) == 0
    return files()


def files() -> dict[str, bytes]:
    return {path.suffix: path.read_bytes() for path in PREFIX.parent.iterdir()}


@pytest.mark.parametrize(
    ("suffix", "content"),
    [(".bin", None), (".bin", b""), (".idx", None), (".idx", b"MMID"), (".json", b""), (".json", b"{}")],
    ids=["no tokens", "empty tokens", "no index", "an index cut short", "an empty manifest", "a manifest of nothing"],
)
def test_prepare_makes_damaged_data_anew(prepared: dict[str, bytes], suffix: str, content: bytes | None) -> None:
    data_file(PREFIX, suffix).unlink()
    if content is not None:
        data_file(PREFIX, suffix).write_bytes(content)
    assert cli.main(PREPARE) == 0
    assert files() == prepared


def test_prepare_touches_no_file_of_sound_data(prepared: dict[str, bytes], capsys: pytest.CaptureFixture[str]) -> None:
    before = [(path.name, path.stat()) for path in sorted(PREFIX.parent.iterdir())]
    assert cli.main(PREPARE) == 0
    assert [(path.name, path.stat()) for path in sorted(PREFIX.parent.iterdir())] == before
    assert "exists already, unchanged" in capsys.readouterr().err


def test_a_process_killed_while_the_files_took_their_names_is_gone_on_with(prepared: dict[str, bytes]) -> None:
    for suffix in (".idx", ".json"):
        data_file(PREFIX, suffix).unlink()
    PREFIX.with_name(f".{PREFIX.name}.partial").mkdir()
    assert cli.main(PREPARE) == 0
    assert files() == prepared


@pytest.mark.parametrize("code", WITHOUT_LOCKS, ids=errno.errorcode.get)
def test_a_file_system_without_locks_takes_data(corpus: Corpus, tmp_path: Path, code: int) -> None:
    with patch("fcntl.flock", side_effect=OSError(code, "no locks")):
        assert prepare(Request(corpus=corpus, tokenizer=ByteTokenizer()), tmp_path / "text").documents == 3


def test_index_maps_of_replaced_data_go_away_and_no_others(prepared: dict[str, bytes]) -> None:
    def maps(prefix: Path) -> list[Path]:
        data = IndexedDataset(prefix)
        build_or_load(prefix, data, range(len(data)), "train", 5, 16, 1)
        return saved_maps(prefix)

    other = PREFIX.with_name("text_text_document_2")
    for suffix in (".bin", ".idx"):
        data_file(other, suffix).write_bytes(prepared[suffix])
    own, others = maps(PREFIX), maps(other)
    assert len(own) == len(others) == 3
    assert cli.main([*PREPARE, "--max-chars", "30"]) == 0
    assert not any(path.exists() for path in own)
    assert all(path.exists() for path in others)
    assert len(maps(PREFIX)) == 3


@pytest.mark.parametrize("output", ["", ".", "..", "/", "out/.."], ids=repr)
def test_an_output_that_names_no_file_is_refused(output: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["prepare", "--source", "stdlib", "--output", output])
    assert f"--output: {output!r} is a folder; add a name for the data, such as " in capsys.readouterr().err


def test_hashing_finished_data_tells_how_far_it_is(prepared: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    monkeypatch.setattr(Progress, "advance", lambda self, task, advance: hashed.append(advance))
    assert cli.main(["check", str(PREFIX)]) == 0
    assert sum(hashed) == len(prepared[".bin"]) + len(prepared[".idx"])


@pytest.mark.parametrize("prefix", ["text", "new/text"], ids=["a file in it", "a folder in it"])
def test_a_folder_of_others_is_named_and_stays_as_it_was(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    request = Request(corpus=stdlib_corpus(folder=Path(library.name)), tokenizer=ByteTokenizer())
    before = sorted(tmp_path.rglob("*"))
    tmp_path.chmod(0o555)
    with (
        ordinary_user(),
        pytest.raises(DataPrepError, match=r"(text\.partial|new): cannot be written \(Permission"),
    ):
        prepare(request, Path(prefix))
    assert sorted(tmp_path.rglob("*")) == before


def test_tdpp_data_tells_its_errors_in_a_line_and_ends_with_1(
    prepared: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tdpp(["data", "check", str(PREFIX)]) == 0
    data_file(PREFIX, ".idx").write_bytes(prepared[".idx"][:-1])
    capsys.readouterr()
    assert tdpp(["data", "check", str(PREFIX)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"tdpp: error: data.prefix={PREFIX}: {PREFIX}.idx: expected ")
    assert err.count("\n") == 1


def test_the_real_library_comes_through_whole(tmp_path: Path) -> None:
    corpus = stdlib_corpus()
    manifest = prepare(Request(corpus=corpus, tokenizer=ByteTokenizer()), tmp_path / "text")
    data = IndexedDataset(tmp_path / "text")
    sources = [path.read_text(encoding="utf-8") for path in corpus.files]
    texts = [ByteTokenizer().decode(data[document]) for document in range(data.documents)]
    assert texts == [source for source in sources if source]
    assert (manifest.documents, manifest.tokens) == (data.documents, len(data.tokens))


@pytest.mark.parametrize("planted", ["link", "dangling", "file", "group-writable", "foreign"])
def test_a_trap_in_a_shared_folder_is_refused_and_empties_nothing(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What others may put where the data in the making go."""
    monkeypatch.setattr(options, "stdlib_corpus", lambda _: corpus)
    monkeypatch.chdir(tmp_path)
    victim = tmp_path / "victim"
    victim.mkdir()
    for name in ("lock", "tokens", "thesis"):
        (victim / name).write_text("precious")
    partial = PREFIX.with_name(f".{PREFIX.name}.partial")
    partial.parent.mkdir()
    if planted == "link":
        partial.symlink_to(victim)
    elif planted == "dangling":
        partial.symlink_to(tmp_path / "gone")
    elif planted == "file":
        partial.write_text("no folder")
    else:
        partial.mkdir()
        (partial / "lock").symlink_to(victim / "thesis")
        partial.chmod(0o775 if planted == "group-writable" else 0o755)
    if planted == "foreign":
        monkeypatch.setattr("os.geteuid", lambda: partial.lstat().st_uid + 1)
    assert tdpp(["data", *PREPARE]) == 1
    assert {path.name: path.read_text() for path in victim.iterdir()} == dict.fromkeys(
        ("lock", "tokens", "thesis"), "precious"
    )
    assert not (tmp_path / "gone").exists()
    message = capsys.readouterr().err
    assert str(partial) in message
    assert "Traceback" not in message
