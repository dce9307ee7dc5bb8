"""Where prepared data go: damaged data are mended, a place that cannot take any is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import rich.progress  # noqa: F401 - as an ordinary user the test may not read it any more

from data_prep import cli, prepare_cli
from data_prep.corpus import Corpus, stdlib_corpus
from data_prep.errors import DataPrepError
from data_prep.prepare import Request, prepare
from data_prep.tokenizer import ByteTokenizer
from launch.cli import main as tdpp
from megatron_ext.indexed_dataset import IndexedDataset, data_file
from tests.ordinary_user import ordinary_user

PREPARE = ["prepare", "--source", "stdlib", "--output", "out/text"]
PREFIX = Path("out/text_text_document")


@pytest.fixture
def prepared(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What `tdpp data` writes for a small library: bytes by suffix."""
    monkeypatch.setattr(prepare_cli, "stdlib_corpus", lambda _: corpus)
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
    assert "there already, unchanged" in capsys.readouterr().err


@pytest.mark.parametrize("output", ["", ".", "..", "/", "out/.."], ids=repr)
def test_an_output_that_names_no_file_is_refused(output: str) -> None:
    with pytest.raises(DataPrepError, match=r"--output .*: not a name for files; give a folder and a name"):
        cli.main(["prepare", "--source", "stdlib", "--output", output])


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
