"""An archive that is made to fill memory or disk is one message; nothing of it reaches the disk."""

from __future__ import annotations

import io
import lzma
import tarfile
from pathlib import Path

import pytest

from data_prep.errors import DataPrepError
from data_prep.files import archives
from data_prep.files.archives import members
from tests.data_prep.pairs.test_sources import package


def tar(*infos: tarfile.TarInfo, content: bytes = b"x") -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as file:
        for info in infos:
            info.size = info.size or (len(content) if info.isreg() else 0)
            file.addfile(info, io.BytesIO(content))
    return made.getvalue()


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def deb(size: str) -> bytes:
    return b"!<arch>\n" + f"{'data.tar.xz':16}{'0':12}{'0':6}{'0':6}{'100644':8}{size:10}`\n".encode() + b"x"


HOSTILE = {
    "large-member": ("a.tar", lambda: header("a.po", 1 << 30), "a.po in it has 1073741824 bytes, more than"),
    "large-skipped": ("a.tar", lambda: header("b.bin", 1 << 50), "bytes when it is unpacked, more than"),
    "long-name": ("a.tar", lambda: header("././@LongLink", 1 << 40, tarfile.GNUTYPE_LONGNAME), "a header in it has"),
    "pax": ("a.tar", lambda: header("x", 1 << 33, tarfile.XHDTYPE), "a header in it has 8589934592 bytes"),
    "endless-names": (
        "a.tar",
        lambda: (header("././@LongLink", 5, tarfile.GNUTYPE_LONGNAME) + b"name\0".ljust(512, b"\0")) * 3000,
        "cannot be read as an archive",
    ),
    "zeros": ("a.tar.xz", lambda: lzma.compress(header("x", 1 << 33, tarfile.XGLTYPE) + bytes(1 << 22)), "a header"),
    "deb-size": ("a.deb", lambda: deb("9999999999"), "data.tar.xz in it has 9999999999 bytes, more than"),
    "deb-negative": ("a.deb", lambda: deb("-5"), "data.tar.xz in it has -5 bytes"),
    "deb-text": ("a.deb", lambda: deb("many"), "cannot be read as an archive"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_it_is_refused(tmp_path: Path, case: str) -> None:
    name, made, message = HOSTILE[case]
    (tmp_path / name).write_bytes(made())
    with pytest.raises(DataPrepError, match=message) as error:
        list(members(tmp_path / name, lambda name: name.endswith(".po")))
    assert str(error.value).startswith(str(tmp_path / name))


def test_paths_links_and_devices_lead_nowhere(tmp_path: Path) -> None:
    kinds = [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE]
    odd = [tarfile.TarInfo(f"odd{number}.po") for number in range(len(kinds))]
    for info, kind in zip(odd, kinds, strict=True):
        info.type, info.linkname = kind, "/etc/passwd"
    outside = [tarfile.TarInfo(name) for name in ("/etc/cron.d/x.po", "../../x.po", "a\n\x1b[31m.po")]
    (tmp_path / "a.tar").write_bytes(tar(*odd, *outside))
    found = dict(members(tmp_path / "a.tar", lambda name: name.endswith(".po")))
    assert set(found.values()) <= {b"x"}
    assert not any(name.startswith("odd") for name in found)
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


def test_a_bomb_is_not_unpacked_beyond_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MOST_UNPACKED", 1 << 20)
    (tmp_path / "a.deb").write_bytes(package({f"{number}.bin": bytes(1 << 18) for number in range(9)}))
    with pytest.raises(DataPrepError, match="when it is unpacked, more than 1048576"):
        list(members(tmp_path / "a.deb", lambda name: False))
