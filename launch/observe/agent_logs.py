"""What the agents of a run printed themselves, or what could not start them: submitit's files."""

from __future__ import annotations

from pathlib import Path

from conf.run_folder.run_files import entries
from conf.run_folder.rundir import RunDir
from launch.files.records import Submitted
from megatron_ext.contract.plan import Plan


def agent_logs(run: RunDir, plan: Plan, submitted: Submitted) -> dict[str, list[Path]]:
    """The files by node, and by job those of its script; `submitted` is jobs.json.

    `<job>_<task>_log.out` is an agent's; of a heterogeneous job each component has an id of its own, counted on from
    the whole job's, while tasks are counted through. Without Slurm its errors are in a file of their own, and where ssh
    reaches the nodes each has a folder.

    Raises:
        RunFolderError: the folder of these files cannot be listed.
    """
    names = plan.node_names
    if submitted.on_hosts:
        own = {name: [path for path in entries(run.submitit_of(name)) if _is_printed(path.name)] for name in names}
        return {name: paths for name, paths in own.items() if paths}
    paths = [path for path in entries(run.submitit) if "." in path.name]
    found: dict[str, list[Path]] = {name: [] for name in names}
    for job, record in submitted.by_id.items():
        components = len({plan.nodes[node_rank].group for node_rank in record.nodes})
        ids = {str(int(job) + component) for component in range(components)}
        tasks = {str(task): names[node_rank] for task, node_rank in enumerate(record.nodes)}
        for path in paths:
            number, _, rest = path.name.partition("_")
            task, _, kind = rest.partition("_")
            if number in ids and task in tasks and kind in ("log.out", "log.err"):
                found[tasks[task]].append(path)
            elif number in ids and rest == "batch.out":
                found.setdefault(f"job {job}", []).append(path)
    return {source: paths for source, paths in found.items() if paths}


def _is_printed(name: str) -> bool:
    return name.endswith(("_log.out", "_log.err"))
