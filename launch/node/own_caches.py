"""Folders whose content a worker executes: those that it writes are the user's own, and others may write to none.

torch.compile, Triton and torch's C++ extensions keep what they have compiled, and load it again the next time. Their
defaults (/tmp/torchinductor_<user>) can be made by anybody before.
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from conf.errors import reworded
from conf.run_folder.rundir import RunDir
from launch.errors import LaunchError
from launch.files.own_path import require_not_everybodys, require_own_file, require_own_folder

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "TORCH_EXTENSIONS_DIR": "extensions"}
"""Set for every worker, unless they are given: folders in the run's own."""
WRITTEN = (*CACHES, "PYTHONPYCACHEPREFIX", "CUDA_CACHE_PATH", "TRITON_HOME", "TRITON_OVERRIDE_DIR", "NUMBA_CACHE_DIR")
"""A worker writes what it executes to these folders: nobody else may write there at all."""
READ = (
    *("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONSTARTUP"),
    *("LD_PRELOAD", "LD_AUDIT", "LD_LIBRARY_PATH", "GCONV_PATH", "PATH", "BASH_ENV"),
    *("NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN", "NCCL_ENV_PLUGIN", "NCCL_GIN_PLUGIN"),
    *("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NCCL_CONF_FILE", "FI_PROVIDER_PATH", "UCX_MODULE_DIR"),
    *("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "OMP_TOOL_LIBRARIES"),
    *("OPENSSL_CONF", "OPENSSL_MODULES", "OPENSSL_ENGINES"),
    *("CUDA_HOME", "CUDA_PATH", "CC", "CXX", "GCC_EXEC_PREFIX", "COMPILER_PATH", "LIBRARY_PATH"),
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"),
    *("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_CUOBJDUMP_PATH", "TRITON_NVDISASM_PATH"),
    *("TRITON_LIBCUDA_PATH", "TRITON_CUDACRT_PATH", "TRITON_CUDART_PATH", "TRITON_CUPTI_PATH"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR", "TORCH_HOME", "HF_HOME", "HF_MODULES_CACHE"),
    "HOME",
)
"""Files, folders and lists of folders that others may have written for the user, but not everybody."""
_LISTS_WITH_BLANKS = ("LD_PRELOAD",)
_LISTS = (
    *_LISTS_WITH_BLANKS,
    *("PYTHONPATH", "PATH", "LD_AUDIT", "LD_LIBRARY_PATH", "GCONV_PATH", "FI_PROVIDER_PATH", "OMP_TOOL_LIBRARIES"),
    *("COMPILER_PATH", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"),
)
"""Entries are separated by colons; an empty one is the folder where the worker starts."""


def own_caches(run: RunDir, node: str) -> dict[str, str]:
    """The variables by which a node's worker keeps what it compiles in the run's folder."""
    return {variable: str(run.cache(node) / name) for variable, name in CACHES.items()}


def with_own_caches(given: Mapping[str, str], run: RunDir, node: str, *, inherits: bool) -> dict[str, str]:
    """Returns a worker's `given` environment with folders for what it compiles, which are made, for nobody else.

    Where it `inherits` this process's environment, folders that are named there stay.

    Raises:
        LaunchError: a variable leads to what others may write, and the worker would execute.
    """
    inherited = without_torchs_default(os.environ) if inherits else {}
    own = {variable: inherited.get(variable, path) for variable, path in own_caches(run, node).items()}
    make_own_caches(run, node)
    check_environment({**inherited, **own, **given}, make=inherits)
    return {**own, **given}


def without_torchs_default(environment: Mapping[str, str]) -> dict[str, str]:
    """An inherited environment without the folder that torch itself has named there: once a program has imported
    torch._dynamo, TORCHINDUCTOR_CACHE_DIR is its default (torch/_inductor/runtime/cache_dir_utils.py), which nobody
    chose, and which anybody can make before."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    user = re.sub(r'[\\/:*?"<>|]', "_", user)
    default = ("TORCHINDUCTOR_CACHE_DIR", str(Path(environment.get("TMPDIR", "/tmp")) / f"torchinductor_{user}"))
    return {name: value for name, value in environment.items() if (name, value) != default}


def make_own_caches(run: RunDir, node: str) -> None:
    """Makes the folders, for nobody else; raises LaunchError where somebody else has made one."""
    with reworded(LaunchError, f"{run.cache(node)} cannot be created (", ")"):
        run.cache(node).parent.mkdir(mode=0o700, exist_ok=True)
        for folder in (run.cache(node), *(run.cache(node) / name for name in CACHES.values())):
            folder.mkdir(mode=0o700, exist_ok=True)
            require_own_file(folder)


def check_environment(environment: Mapping[str, str], *, make: bool) -> None:
    """Raises LaunchError where a variable leads a worker to what others may write, and it would execute. `environment`:
    the worker's whole one. `make`: whether missing folders that it writes to are made, for nobody else."""
    for variable, path in _paths(environment):
        try:
            if variable in WRITTEN:
                require_own_folder(path, make=make)
            else:
                require_not_everybodys(path)
        except LaunchError as error:
            raise LaunchError(
                f"{variable}={environment.get(variable, path)}: {error}; what lies there would run as you, so give a "
                f"folder that only you may write to, or leave it out"
            ) from None


def _paths(environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """A name without a slash is looked for in the folders of LD_LIBRARY_PATH or PATH; an empty entry is the folder
    where the worker starts."""
    for variable in (*WRITTEN, *READ):
        value = environment.get(variable)
        if not value:
            continue
        if variable in _LISTS_WITH_BLANKS:
            value = value.replace(" ", os.pathsep)
        several = variable in _LISTS
        for entry in value.split(os.pathsep) if several else [value]:
            if os.sep in entry or (several and variable not in _LISTS_WITH_BLANKS):
                yield variable, Path(entry or ".").absolute()
    nccl = Path(environment.get("HOME", "/")) / ".nccl.conf"
    if os.path.exists(nccl):  # noqa: PTH110 (Path.exists raises where a home may not be entered)
        yield "HOME", nccl
