"""Who may import whom, and what may lie where: the rules that keep the rooms apart."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from graphlib import TopologicalSorter

import pytest

from launch.cli import COMMANDS
from tests.support import ROOT

CONTRACT = "megatron_ext.contract"
"""What crosses rooms, for all of them."""

FAMILIES = "megatron_ext.families"
"""The folders of model families, which are found by their names: descriptions by the contract, tasks by `tasks.py`."""

ROOMS = {
    "conf": [CONTRACT],
    "megatron_ext": [],
    "data_prep": ["conf", CONTRACT, "megatron_ext.data"],
    "fasop": ["conf", CONTRACT],
    "launch": ["conf", "fasop", CONTRACT],
    "reports": ["conf", "fasop", CONTRACT],
    "tdpp": ["conf", "fasop", "launch", "reports", CONTRACT],
}
"""What a room may import of the others: whole rooms, or sub-packages."""

FLOORS = {
    "conf": [
        *(
            "visible plain",
            "errors",
            "utf8 torch_answers",
            "run_folder",
            "reading",
            "schema",
            "composition_cache",
            "hydra_files",
            "hydra_errors identity blocks_of_module engine_choice pipedream",
            "foreign_files",
            "compose",
        ),
        "origins reference",
    ],
    "conf/schema": [
        "values",
        "adapt cluster data engine executor model parallel profile train",
        "containers",
        "rules",
        "experiment",
    ],
    "megatron_ext": [
        *("contract", "timeline", "data", "parallel", "tasks", "families", "engine", "core", "checkpoints"),
        *("inference measuring learning", "rank_processes", "train", "worker"),
        "doctor profile hf schedule blocks translate memory check",
    ],
    "megatron_ext/engine": [
        *("goal gradients results", "batches executor optimizer", "interface islands workers"),
        *("engine", "evaluation", "log", "streams", "adaptation", "rehearsal"),
    ],
    "megatron_ext/tasks": [
        *("task", "cut linear dropout repeatable", "stage", "language"),
        "images translation",
    ],
    "data_prep": [
        "errors",
        "files",
        "kinds tokenizers",
        "indexed text",
        "making",
        "images pairs preparation",
        "chats videos",
        "training",
    ],
    "fasop": [
        "errors bits frozen garbage",
        "costs",
        "compiled",
        "simulation",
        "partition",
        "search shares",
        "graphs trainings",
        "tables",
    ],
    "fasop/graphs": [
        "graph",
        "graph_text",
        "division",
        "public",
        "own",
        "arguments of_model",
    ],
    "launch": [
        *("errors", "machine", "screen", "files", "tracking", "node", "observe", "judge", "history", "control"),
        *("doctor profile sweep learning init", "commands", "cli start_agent on_host on_end"),
    ],
    "reports": ["errors", "readers", "sources", "facts", "path", "figures", "sections", "pages", "exports", "notebook"],
}
"""By folder, from the bottom up: what lies in it imports of it only what lies on floors below its own."""

COMMANDS_OF_ALL = "launch/commands/"
"""The commands alone know every room, and this package finds every command."""
DISPATCHER = "launch/commands/__init__.py"

HEAVY = ["torch", "pandas", "plotly"]

TOP_LEVEL = {
    *ROOMS,
    *("tests", "docs", "benchmarks", ".ci"),
    *("pyproject.toml", "constraints.txt", "Makefile", "README.md", "LICENSE", ".gitignore"),
    *("CONTRIBUTING.md", "CHANGELOG.md", ".pre-commit-config.yaml"),
}

FILES = sorted(str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*.py"))
RANK_FILES = [file for file in FILES if file.startswith("megatron_ext/")]


def imports(tree: ast.Module) -> Iterator[str]:
    """Every module that the file imports, also inside functions and for type checking, as dotted names.

    `from a.b import c` counts as `a.b.c`, for c may be a module.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                assert level == 0, f"line {node.lineno}: a relative import hides the room"
                yield from (f"{module}.{name.name}" for name in names)
            case ast.Call(func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module")):
                argument = node.args[0]
                if isinstance(argument, ast.JoinedStr) and ast.unparse(argument.values[0]) == repr(f"{FAMILIES}."):
                    continue
                assert isinstance(argument, ast.Constant), f"line {node.lineno}: an import nobody can check"
                yield str(argument.value)


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


@cache
def imported(file: str) -> frozenset[str]:
    return frozenset(imports(parsed(file)))


def imported_paths(file: str) -> set[str]:
    return {name.replace(".", "/") for name in imported(file)}


def within(module: str, allowed: list[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_it_may(room: str) -> None:
    files = [file for file in FILES if file.startswith(f"{room}/") and not file.startswith(COMMANDS_OF_ALL)]
    forbidden = {
        (file, module)
        for file in files
        for module in imported(file)
        if module.split(".")[0] in ROOMS and not within(module, [room, *ROOMS[room]])
    }
    assert forbidden == set()


@pytest.mark.parametrize("folder", FLOORS)
def test_imports_lead_downwards(folder: str) -> None:
    floors = {name: number for number, names in enumerate(FLOORS[folder]) for name in names.split()}

    def part_of(path: str) -> str:
        return path.removeprefix(f"{folder}/").split("/")[0]

    upwards = {
        (file, name)
        for file in FILES
        if file.startswith(f"{folder}/") and file not in (DISPATCHER, f"{folder}/__init__.py")
        for name in (part_of(path) for path in imported_paths(file) if path.startswith(f"{folder}/"))
        if name != part_of(file.removesuffix(".py")) and floors[name] >= floors[part_of(file.removesuffix(".py"))]
    }
    assert upwards == set()


def test_a_family_is_described_by_what_the_contract_has() -> None:
    """A description is part of the contract: it imports that, its own options and the standard library."""
    described = [
        file
        for file in FILES
        if file.startswith("megatron_ext/families/") and file.endswith(("/__init__.py", "/options.py"))
    ]
    other = {
        (file, name)
        for file in described
        for name in imported(file)
        if not name.startswith((f"{CONTRACT}.", f"{file.rpartition('/')[0].replace('/', '.')}.options."))
        and name.split(".")[0] not in sys.stdlib_module_names
    }
    assert described
    assert other == set()


@pytest.mark.parametrize("room", ROOMS)
def test_modules_import_each_other_in_one_direction(room: str) -> None:
    """Also for type checking: who reads one of two modules that need each other has to read both."""
    modules = {
        file.removesuffix(".py").replace("/", "."): file
        for file in FILES
        if file.startswith(f"{room}/") and file != DISPATCHER
    }
    needs: dict[str, set[str]] = {}
    for module, file in modules.items():
        needs[module] = {
            name if name in modules else name.rpartition(".")[0] for name in imported(file)
        } & modules.keys()
    TopologicalSorter(needs).prepare()


def test_the_page_about_the_architecture_shows_the_floors() -> None:
    """From the top down, as houses are drawn."""
    drawn = "\n".join(
        f"{folder if number == 0 else '':<20}{names}"
        for folder, floors in FLOORS.items()
        for number, names in enumerate(reversed(floors))
    )
    assert f"```text\n{drawn}\n```" in (ROOT / "docs" / "architecture.md").read_text()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import a.b, c", ["a.b", "c"]),
        ("from a import b", ["a.b"]),
        ("def f():\n    from a.b import c", ["a.b.c"]),
        ("if TYPE_CHECKING:\n    import a", ["a"]),
        ("import_module('a.b')", ["a.b"]),
        ("importlib.import_module('a')", ["a"]),
    ],
)
def test_every_way_to_import_is_seen(source: str, found: list[str]) -> None:
    assert list(imports(ast.parse(source))) == found


@pytest.mark.parametrize("source", ["from . import a", "import_module(name)"])
def test_an_import_that_cannot_be_checked_is_refused(source: str) -> None:
    with pytest.raises(AssertionError, match="line 1"):
        list(imports(ast.parse(source)))


USED_IF_INSTALLED = {
    "megatron_ext/inference/text.py": {"tokenizers"},
    "megatron_ext/families/huggingface/library.py": {"transformers"},
    "megatron_ext/families/huggingface/weights.py": {"transformers", "safetensors"},
    **{file: {"megatron"} for file in RANK_FILES if file.startswith("megatron_ext/core/")},
    # Comes with torch's CUDA builds, and is asked for there alone.
    **{f"megatron_ext/tasks/language/{name}.py": {"triton"} for name in ("attention", "dropped_flash")},
}


def test_a_rank_needs_only_torch_numpy_and_the_standard_library() -> None:
    there = {"megatron_ext", "torch", "numpy"} | sys.stdlib_module_names - {"graphlib", "tomllib", "zoneinfo"}
    missing = {
        (file, root)
        for file in RANK_FILES
        for root in {module.split(".")[0] for module in imported(file)} - USED_IF_INSTALLED.get(file, set())
        if root not in there
    }
    assert missing == set()


PICKLES = {
    *("pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"),
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "rpc"),
}


def names_in(file: str) -> set[str]:
    """The names and attributes that a file uses; `torch.load` and `torch.save` by both words."""
    names = {part for module in imported(file) for part in module.split(".")}
    for node in ast.walk(parsed(file)):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="load" | "save" as name):
                names.add(f"torch.{name}")
            case ast.Attribute(attr=name) | ast.Name(id=name):
                names.add(name)
    return names


MEGATRONS = "megatron_ext/checkpoints/foreign/torch_dist.py"
"""Reads and writes what Megatron-Core pickles; it calls nothing that a pickle names (test_torch_dist)."""
RECORDINGS = "megatron_ext/timeline/flight.py"
"""Reads what torch's flight recorder pickles, in the same way (test_flight)."""


def test_nothing_that_a_rank_sends_or_reads_is_pickled() -> None:
    """Whoever can write a pickle runs any code in the process that loads it."""
    pickles = {*PICKLES, "torch.load", "torch.save"}
    found = {(file, name) for file in RANK_FILES for name in names_in(file) & pickles}
    assert found == {(MEGATRONS, "pickle"), (MEGATRONS, "torch.save"), (RECORDINGS, "pickle")}


def test_nothing_that_starts_or_looks_at_a_run_is_unpickled() -> None:
    """submitit starts agents on a machine, and its own way to start a job, which loads a pickle, is not used."""
    loads = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "process_job"}
    loads |= {"DelayedSubmission", "torch.load"}
    rooms = ("conf/", "launch/", "tdpp/", "reports/")
    files = [file for file in FILES if file.startswith(rooms) and file != DISPATCHER]
    assert {(file, name) for file in files for name in names_in(file) & loads} == set()


NEWER_THAN_3_8 = {
    "functools.cache",
    "itertools.pairwise",
    "enum.StrEnum",
    "datetime.UTC",
    "typing.Annotated",
    "typing.Concatenate",
    "typing.ParamSpec",
    "typing.Self",
    "typing.TypeAlias",
    "typing.TypeGuard",
    "typing.assert_never",
}


def newer_than_3_8(tree: ast.Module) -> Iterator[str]:
    """What Python 3.8 parses but does not run, or runs otherwise."""
    annotations = {
        id(part)
        for node in ast.walk(tree)
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if annotation is not None
        for part in ast.walk(annotation)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=ast.Name(id="dict" | "list" | "set" | "tuple" | "type" | "frozenset" as name)):
                if id(node) not in annotations:
                    yield f"line {node.lineno}: {name}[...] outside an annotation"
            case ast.Attribute(attr="removeprefix" | "removesuffix" | "bit_count" as name):
                yield f"line {node.lineno}: .{name}"
            case ast.Attribute(value=ast.Name(id=module), attr=name) if f"{module}.{name}" in NEWER_THAN_3_8:
                yield f"line {node.lineno}: {module}.{name}"
            case ast.ImportFrom(module=module, names=names):
                for name in names:
                    if f"{module}.{name.name}" in NEWER_THAN_3_8:
                        yield f"line {node.lineno}: {module}.{name.name}"
            case ast.Call(func=ast.Name(id="zip" | "dataclass" as name), keywords=keywords):
                for keyword in keywords:
                    if keyword.arg in ("strict", "slots", "kw_only"):
                        yield f"line {node.lineno}: {name}({keyword.arg}=)"


def test_a_rank_runs_on_python_3_8() -> None:
    faults = []
    for file in RANK_FILES:
        source = (ROOT / file).read_text()
        tree = ast.parse(source, file, feature_version=(3, 8))
        faults += [f"{file}, {fault}" for fault in newer_than_3_8(tree)]
        annotated = any(isinstance(node, ast.AnnAssign | ast.FunctionDef) for node in ast.walk(tree))
        if annotated and "from __future__ import annotations\n" not in source:
            faults.append(f"{file}: its annotations would be evaluated")
    assert faults == []


@pytest.mark.parametrize(
    "source",
    [
        "Sizes = tuple[int, int]",
        "x.removeprefix('a')",
        "from functools import cache",
        "functools.cache(f)",
        "zip(a, b, strict=True)",
        "@dataclass(frozen=True, slots=True)\nclass A: ...",
    ],
)
def test_what_python_3_8_cannot_run_is_seen(source: str) -> None:
    assert len(list(newer_than_3_8(ast.parse(source)))) == 1


def loaded_after(code: str, packages: Sequence[str] = HEAVY) -> set[str]:
    """Which of these packages a fresh interpreter has loaded after the code."""
    report = f"import json, sys; print(json.dumps([name for name in {packages} if name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_a_heavy_package_would_be_noticed() -> None:
    assert loaded_after("import sys; sys.modules['pandas'] = sys") == {"pandas"}


@pytest.mark.parametrize("room", ["conf", "launch"])
def test_a_login_node_loads_no_heavy_package_for(room: str) -> None:
    modules = [file.removesuffix(".py").replace("/", ".") for file in FILES if file.startswith(f"{room}/")]
    assert loaded_after("\n".join(f"import {module}" for module in modules)) == set()


@pytest.mark.parametrize("module", ["launch.start_agent", "launch.on_host"])
def test_what_every_node_starts_does_not_load_what_composes_a_configuration(module: str) -> None:
    """It would take as long as all else."""
    assert loaded_after(f"import {module}", ["hydra", "omegaconf", "yaml", *HEAVY]) == set()


@pytest.mark.parametrize("room", ["data_prep", "fasop"])
def test_what_others_use_of_the_engine_needs_no_torch(room: str) -> None:
    modules = [module for module in ROOMS[room] if module.startswith("megatron_ext.")]
    modules += ["megatron_ext.contract.plan_check"]  # which asks every family's description
    assert loaded_after("\n".join(f"import {module}" for module in modules)) == set()


def test_help_answers_without_heavy_packages() -> None:
    """That of each command in turn, in one process: the first that loads one is named."""
    code = f"""
import sys
from launch.cli import main
for command in {[[], *([name] for name in COMMANDS)]}:
    try:
        code = main([*command, "--help"])
    except SystemExit as exit:
        code = exit.code
    loaded = [name for name in {HEAVY} if name in sys.modules]
    assert not code and not loaded, (command, code, loaded)
"""
    loaded_after(code)


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="not a git checkout, or no git")
def test_docstrings_are_sentences() -> None:
    """One that begins "Of a stage" leaves a reader to guess what a function does with it, or what a field holds."""
    texts = [
        (file, node.lineno, str(node.value.value))
        for file in FILES
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    assert len(texts) > 5000
    assert [text for text in texts if text[2].startswith(("Of ", "By ", "As "))] == []


def test_every_tracked_file_has_its_place() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {name.split("/")[0] for name in listed.split("\0") if name} - TOP_LEVEL == set()
