"""Builds the stand-in for CUDA: one library in the place of CUDA's driver and runtime, cuBLAS and NCCL."""

from __future__ import annotations

import fcntl
import hashlib
import re
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent
_LIBRARIES = ("cuda", "__cuda", "cublas", "cudnn", "nccl")
_NOTHING = ("Set", "Destroy", "Finalize", "Deregister", "Unregister", "Unload", "Restore", "Profiler")
"""In names of calls that need do nothing."""


def build(python: Path, folder: Path) -> Path:
    """The library for the torch of an interpreter, in `folder`; built anew where a source or torch has changed.

    Headers are those that come with Triton. What of CUDA torch calls, and the sources do not have, fails and logs its
    name, but for what sets or ends something.
    """
    site = next(python.parent.parent.glob("lib/python*/site-packages"))
    sources = sorted([*SOURCES.glob("*.cc"), *SOURCES.glob("*.hh"), Path(__file__)])
    torch = next(site.glob("torch-*.dist-info")).name
    mark = hashlib.sha256(b"".join(path.read_bytes() for path in sources) + torch.encode()).hexdigest()[:16]
    library = folder / mark / "libcuda.so.1"
    library.parent.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests that run beside each other build it once
        if not library.exists():
            _build(library, site)
    return library


def _build(library: Path, site: Path) -> None:
    objects = []
    for source in SOURCES.glob("*.cc"):
        objects.append(library.with_name(f"{source.stem}.o"))
        _compile(site, source, "-c", "-o", str(objects[-1]))
    rest = sorted(_wanted(site) - _given(objects))
    body = 'namespace machine { void log(const char*, ...); }\nextern "C" {\n'
    for name in rest:
        does = "return 0;" if any(word in name for word in _NOTHING) else f'return machine::log("? {name}"), 1;'
        body += f"int {name}(...) {{ {does} }}\n"
    (library.parent / "rest.cc").write_text(body + "}\n")
    draft = library.with_suffix(".draft")
    link = ("-shared", "-Wl,-soname,libcuda.so.1", *map(str, objects), "-lpthread", "-ldl", "-o", str(draft))
    _compile(site, library.parent / "rest.cc", *link)
    draft.rename(library)


def _compile(site: Path, source: Path, *words: str) -> None:
    include = site / "triton/backends/nvidia/include"
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-Wall", f"-I{include}", f"-I{SOURCES}", str(source), *words]
    subprocess.run(command, check=True)


def _wanted(site: Path) -> set[str]:
    """What torch and Triton take from CUDA's libraries."""
    lib = site / "torch/lib"
    users = [*lib.glob("libtorch_cuda*.so"), lib / "libc10_cuda.so", lib / "libtorch_python.so"]
    calls = (re.findall(r"\b(cu[A-Z]\w+)\(", path.read_text()) for path in site.glob("triton/backends/nvidia/*.c"))
    own = {name for name in _names(users, "-D", "--undefined-only") if name.startswith(_LIBRARIES)}
    return own.union(*calls)


def _given(objects: list[Path]) -> set[str]:
    return _names(objects, "--defined-only")


def _names(files: list[Path], *which: str) -> set[str]:
    out = subprocess.run(["nm", *which, *map(str, files)], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].partition("@")[0] for line in out.splitlines() if len(line.split()) > 1}
