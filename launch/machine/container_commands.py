"""The container of a run: what its workers are to find there, by the configuration and the plan."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from conf.run_folder.rundir import RunDir
from conf.schema.containers import IMAGE_SUFFIX, ImageReference, Mount, mountable, recipe_script
from conf.schema.experiment import Container, ContainerKind, Experiment, RunsMode
from launch.machine.container_runtimes import RUNTIMES, RunContainer
from megatron_ext.contract.plan import Plan


def run_container(experiment: Experiment, plan: Plan, run: Path, project: Path) -> RunContainer | None:
    """The container of a run, as configured; None without one. `project` is the folder with the rooms' sources. Raises
    ConfigError: the runtime cannot mount a folder that the ranks need."""
    config = experiment.container
    if config.kind is ContainerKind.none:
        return None
    assert config.image is not None
    needed = {"the folder of tdpp": project, f"runs_dir={experiment.runs_dir}, name={experiment.name}": run}
    if plan.rehearsal is None:
        needed[f"data.prefix={experiment.data.prefix}"] = Path(plan.data_prefix).parent
        for corpus in plan.data_blend:
            needed[f"data.blend: {corpus.prefix}"] = Path(corpus.prefix).parent
        if plan.data_cache:  # an older run has none
            needed[f"data.cache={experiment.data.cache}"] = Path(plan.data_cache)
        if plan.train.load:
            needed[f"train.load={experiment.train.load}"] = Path(plan.train.load)
    originals = _originals(RunDir(run).code_tree)
    for key, path in [*needed.items(), *((f"model.code={experiment.model.code}", path) for path in originals)]:
        mountable(config.kind, path, key)
    configured = [Mount.parse(text) for text in config.mounts]
    image = _image(config.kind, config.image)
    return RunContainer(
        kind=config.kind,
        image=image,
        file=image if isinstance(image, Path) else _image_file(config, image),
        recipe=recipe_script(config),
        digest=config.digest,
        mounts=_in_order(
            [
                *(Mount(path, path, read_only=True) for path in originals),
                *(Mount(path, path) for path in needed.values()),
                *configured,
            ]
        ),
        folder=project,
        python=config.python,
        gpus=plan.device == "cuda",
        reload=config.reload,
        scratch=Path(experiment.cluster.scratch),
        run=plan.run,
        group_writes=experiment.runs_mode is RunsMode.group,
    )


def _originals(tree: Path) -> list[Path]:
    """The outermost folders that hold what a run's copy of the user's code has links to, which lead out of it."""
    entries = (Path(folder) / name for folder, folders, files in os.walk(tree) for name in (*folders, *files))
    held = {path.readlink().parent for path in entries if path.is_symlink()}
    return sorted(folder for folder in held if folder.is_absolute() and held.isdisjoint(folder.parents))


def found_image(config: Container) -> Path | None:
    """The file in `container.image_dir` that stands for an image of a registry, or for one built of a recipe; None
    where there can be none."""
    if config.kind is ContainerKind.none:
        return None
    assert config.image is not None
    image = _image(config.kind, config.image)
    return None if isinstance(image, Path) else _image_file(config, image)


def _image(kind: ContainerKind, text: str) -> ImageReference | Path:
    return Path(text).absolute() if Path(text).suffix == IMAGE_SUFFIX.get(kind) else ImageReference.parse(text)


def _image_file(config: Container, image: ImageReference) -> Path | None:
    """Returns the image file; that of a recipe is named by the digest of all that it is built of."""
    if not RUNTIMES[config.kind].has_file:
        return None
    stem = image.file_stem
    if script := recipe_script(config):
        built_of = f"{image}\n{script}"
        stem += f"+{hashlib.sha256(built_of.encode()).hexdigest()[:16]}"
    folder = Path(os.path.abspath(config.image_dir))  # noqa: PTH100  (as in plan.py)
    return folder / f"{stem}{IMAGE_SUFFIX[config.kind]}"


def _in_order(mounts: Sequence[Mount]) -> tuple[Mount, ...]:
    """Outer targets first, lest they hide inner ones; of several mounts with one target the last."""
    by_target = {mount.target: mount for mount in mounts}
    return tuple(by_target[target] for target in sorted(by_target))
