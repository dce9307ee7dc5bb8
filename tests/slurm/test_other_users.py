"""Jobs of another user on a real Slurm cluster."""

from __future__ import annotations

import os
from pathlib import Path

from launch import stop
from launch.slurm_commands import comment_of
from launch.verdict import State, judge
from tests.launch.test_verdict import Case
from tests.ordinary_user import NOBODY, only_root_is_two_users
from tests.slurm.cluster import Cluster


@only_root_is_two_users
def test_root_ends_the_jobs_of_another_users_run(slurm: Cluster, tmp_path: Path) -> None:
    """One waits for the other; no agents are in them, since the other user may not read this Python."""
    token, ids = "0123456789abcdef", []
    for more in ([], ["--dependency=after:{}", "--kill-on-invalid-dep=yes"]):
        words = [word.format(*ids) for word in [*more, f"--uid={NOBODY}", f"--comment={comment_of(token)}"]]
        job = slurm.run("sbatch", "--parsable", "-o", "/dev/null", "--chdir=/", *words, "--wrap", "sleep 300")
        assert job.returncode == 0, job.stderr
        ids.append(job.stdout.strip())
    run = Case(nodes=[None, None]).make(tmp_path / "runs" / "tiny" / "20260101-000000-a")
    jobs = [{"id": job, "role": role, "nodes": [node]} for node, (role, job) in enumerate(zip("ms", ids, strict=True))]
    run.write_json(run.jobs, {"token": token, "executor": "slurm", "submission": 0, "jobs": jobs})
    os.chown(run.path, NOBODY, NOBODY)
    assert stop.main([str(run.path)]) == 0
    assert not slurm.jobs()
    assert judge(run).state is State.stopped
