"""A small container image: the host's programs and this Python with torch, read-only, and nothing else of the host.

The root holds only what tells where to mount the rest from, in /etc/fstab, which enroot follows; so it is ready at
once, and a real enroot takes it too.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

WORKING_FOLDER = "/workspace"
VARIABLE = ("IMAGE_VERSION", "1")
"""In the environment of whatever runs in the image."""
NEW = f"new-{uuid.uuid4().hex}"
"""A name that nothing in the image has: it shows the folders of Python, which may lie in a clone of any name."""


def write_tar(path: Path, scratch: Path) -> None:
    """As the double's images are."""
    with tarfile.open(path, "w") as archive:
        archive.add(_root(scratch), arcname=".")


def write_squashfs(path: Path, scratch: Path) -> None:
    """As enroot's images are; needs Debian's package squashfs-tools."""
    subprocess.run(["mksquashfs", _root(scratch), path, "-all-root", "-quiet", "-no-progress"], check=True)


def _root(scratch: Path) -> Path:
    root = scratch / "root"
    for folder in ("etc", "tmp", "var", "proc", "sys", "dev", "root", WORKING_FOLDER.lstrip("/")):
        (root / folder).mkdir(parents=True)
    for name in ("bin", "lib", "lib32", "lib64", "sbin"):
        if Path("/", name).is_symlink():
            (root / name).symlink_to(Path("/", name).readlink())
    mounts = "".join(f"{folder} {folder} none x-create=dir,rbind,ro 0 -1\n" for folder in _host_folders())
    (root / "etc/fstab").write_text(mounts)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    (root / "etc/environment").write_text(f"PATH={path}\n{VARIABLE[0]}={VARIABLE[1]}\n")
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (root / "etc/rc").write_text(
        f'cd {WORKING_FOLDER} || exit 1\nif [ -s /etc/rc.local ]; then . /etc/rc.local; fi\nexec "$@"\n'
    )
    return root


def _host_folders() -> Iterator[str]:
    """Where programs, this Python and its packages lie."""
    yield "/usr"
    yield from (f"/{name}" for name in ("bin", "lib", "lib64", "sbin") if not Path("/", name).is_symlink())
    prefixes = {Path(prefix).resolve() for prefix in (sys.base_prefix, sys.prefix)} - {Path("/usr")}
    yield from map(str, prefixes)
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    packages = Path(torch.origin).parents[1]  # elsewhere where a .pth file leads there
    if not any(packages.is_relative_to(prefix) for prefix in prefixes | {Path("/usr")}):
        yield str(packages)
