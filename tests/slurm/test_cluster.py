"""The cluster that the other tests rely on is the one that it says it is."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import PATIENCE_S
from tests.support.ordinary_user import open_to_others
from tests.support.slurm import machines
from tests.support.slurm.cluster import Cluster
from tests.support.slurm.configuration import Partition

ALL_REDUCE = """
import os, socket, torch, torch.distributed as dist
rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", rank=rank, world_size=world)
total = torch.tensor(float(rank + 1))
dist.all_reduce(total)
print(socket.gethostname(), total.item())
"""
STRAY = "setsid sleep 1000 >/dev/null 2>&1 & sleep 0.2"
"""A job that leaves a process behind."""
A_CLUSTER = """
import sys
from pathlib import Path
from tests.support.slurm.cluster import Cluster
from tests.support.slurm.configuration import Partition
cluster = Cluster(Path(sys.argv[1]), [Partition(name="one", count=1, gpu="a10")], isolated=sys.argv[2] == "isolated")
cluster.start()
cluster.run("srun", "sh", "-c", sys.argv[3])
print("up", flush=True)
sys.stdin.read()
"""

LEAVERS = """
import pytest
def test_leaves(slurm):
    slurm.run("sbatch", "--hold", "--wrap=true")
@pytest.mark.leaves_jobs
def test_says_so(slurm):
    assert slurm.jobs() == []
    slurm.run("sbatch", "--hold", "--wrap=true")
"""


def submit(slurm: Cluster, folder: Path, script: str, *options: str) -> Path:
    """A batch job; `<id>.out`, where all its starts write."""
    arguments = ["sbatch", "--parsable", f"--output={folder}/%j.out", "--open-mode=append", *options]
    done = slurm.run(*arguments, stdin=f"#!/bin/sh\n{script}\n")
    assert done.returncode == 0, done.stderr
    return folder / f"{done.stdout.strip()}.out"


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def wait_for_text(path: Path, text: str) -> None:
    wait_for(lambda: path.exists() and text in path.read_text())


def wait_for_account(slurm: Cluster, job: str, state: str) -> None:
    wait_for(lambda: state in (account.state for account in slurm.sacct(job)))


def processes_of(base: Path) -> list[str]:
    """Command lines of the processes that know of the cluster in this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(base).encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found


def link_of(base: Path) -> list[str]:
    """The link to the cluster in this folder, with its number, which the kernel gives to no other; empty if gone."""
    addresses = re.findall(r"^10\.231\.(\d+)\.1 ", (base / "hosts").read_text(), re.MULTILINE)
    told = subprocess.run(["ip", "-oneline", "link"], capture_output=True, text=True, check=True).stdout
    return [link for number in addresses for link in re.findall(rf"^\d+: tdpp{number}(?=@)", told, re.MULTILINE)]


def test_every_node_is_a_host_of_its_own(isolated: Cluster):
    names = isolated.run("srun", "--partition=scavenge", "--nodes=8", "hostname").stdout.split()
    assert sorted(names) == sorted(isolated.nodes)


def test_a_job_sees_the_gpus_that_it_asked_for(slurm: Cluster):
    done = slurm.run("srun", "--partition=gpu2", "--gres=gpu:a10:4", "printenv", "CUDA_VISIBLE_DEVICES")
    assert done.stdout == "0,1,2,3\n"


def test_ranks_on_two_nodes_meet_by_host_name(isolated: Cluster, tmp_path: Path):
    program = tmp_path / "all_reduce.py"
    program.write_text(ALL_REDUCE)
    done = isolated.run(
        *("srun", "--partition=gpu2", "--nodelist=gpu2-006,gpu2-007", "--kill-on-bad-exit=1"),
        *("env", "MASTER_ADDR=gpu2-006", "MASTER_PORT=29500", sys.executable, program),
    )
    assert sorted(done.stdout.splitlines()) == ["gpu2-006 3.0", "gpu2-007 3.0"], done.stderr


def test_a_heterogeneous_job_starts_at_once(slurm: Cluster, tmp_path: Path):
    script = """\
#SBATCH --partition=hgx --gres=gpu:a100:4
#SBATCH hetjob
#SBATCH --partition=gpu2 --nodes=7 --gres=gpu:a10:4
srun --het-group=0,1 printenv SLURMD_NODENAME"""
    output = submit(slurm, tmp_path, script)
    wait_for(lambda: not slurm.jobs())
    assert sorted(output.read_text().split()) == sorted(slurm.nodes)


def test_a_job_whose_node_goes_down_starts_again_elsewhere(slurm: Cluster, tmp_path: Path):
    output = submit(slurm, tmp_path, "echo on $SLURMD_NODENAME.; sleep 60", "--partition=gpu2", "--requeue")
    wait_for_text(output, "on gpu2-001.")
    slurm.set_node("gpu2-001", "down")
    wait_for_text(output, "on gpu2-002.")
    wait_for_account(slurm, output.stem, "NODE_FAIL")
    slurm.cancel_all()


def test_a_job_is_warned_before_another_takes_its_place(slurm: Cluster, tmp_path: Path):
    script = "trap 'echo warned' USR2; echo begun; while :; do sleep 0.1; done"
    where = ("--partition=scavenge", "--nodelist=hgx-001", "--exclusive")
    output = submit(slurm, tmp_path, script, *where, "--signal=B:USR2@90", "--requeue")
    wait_for_text(output, "begun")
    slurm.run("srun", "--partition=hgx", "--gres=gpu:a100:4", "true")
    begun, warned, end = output.read_text().splitlines()[:3]
    assert (begun, warned) == ("begun", "warned")
    assert "DUE TO PREEMPTION" in end
    wait_for(lambda: [job.state for job in slurm.jobs()] == ["PENDING"])
    wait_for_account(slurm, output.stem, "PREEMPTED")
    slurm.cancel_all()


def test_a_time_limit_ends_a_job(slurm: Cluster, tmp_path: Path):
    output = submit(slurm, tmp_path, "echo begun; sleep 300", "--time=5")
    wait_for_text(output, "begun")
    slurm.set_end(output.stem, 1)
    wait_for_text(output, "DUE TO TIME LIMIT")
    wait_for_account(slurm, output.stem, "TIMEOUT")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        pytest.param(["--partition=nowhere"], "invalid partition", id="unknown partition"),
        pytest.param(["--nodes=8"], "node configuration is not available", id="more nodes than there are"),
        pytest.param(["--gres=gpu:h100:1"], "node configuration is not available", id="a gpu that no node has"),
        pytest.param(["--nodes=7", "--gres=gpu:a10:4"], "", id="what the cluster has"),
    ],
)
def test_slurm_tells_what_it_would_not_run(slurm: Cluster, options: list[str], complaint: str):
    done = slurm.run("sbatch", "--test-only", *options, "--wrap=true")
    assert complaint in done.stderr
    assert (done.returncode == 0) == (not complaint)


def test_a_node_without_power_has_no_processes_and_comes_back(slurm: Cluster, tmp_path: Path):
    output = submit(slurm, tmp_path, "echo begun; sleep 1000", "--nodelist=gpu2-003", "--no-requeue")
    wait_for_text(output, "begun")
    assert "sleep 1000" in slurm.processes("gpu2-003").values()
    slurm.kill_node("gpu2-003")
    assert "sleep 1000" not in slurm.processes().values()
    slurm.set_node("gpu2-003", "down")
    wait_for_account(slurm, output.stem, "NODE_FAIL")
    slurm.start_node("gpu2-003")
    slurm.set_node("gpu2-003", "resume")
    # A job that starts before the node has answered is lost with it.
    wait_for(lambda: slurm.states()["gpu2-003"] == "idle")
    done = slurm.run("srun", "--nodelist=gpu2-003", "echo", "back")
    assert done.stdout == "back\n", done.stderr


def test_a_node_that_is_cut_off_hears_nobody_until_it_is_mended(isolated: Cluster):
    def hears() -> bool:
        knock = "exec 3<>/dev/tcp/gpu2-001/6818"
        return isolated.run("srun", "--nodelist=gpu2-002", "timeout", "1", "bash", "-c", knock).returncode == 0

    assert hears()
    isolated.cut("gpu2-001")
    assert not hears()
    isolated.mend("gpu2-001")
    assert hears()


def test_nodes_and_jobs_that_a_test_leaves_are_cleared_up(slurm: Cluster, tmp_path: Path):
    slurm.run("srun", "sh", "-c", STRAY)
    job = submit(slurm, tmp_path, "true", "--hold", "--job-name=a|b").stem
    slurm.set_node("gpu2-005", "drain")
    wait_for(lambda: len(slurm.jobs()) == 1)
    left = slurm.jobs()[0]
    assert (left.id, left.state, left.name) == (job, "PENDING", "a|b")
    assert slurm.clear() == [str(left), "sleep 1000"]
    assert slurm.clear() == []
    assert set(slurm.states().values()) == {"idle"}


def test_a_test_that_leaves_something_fails_unless_it_says_so(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("t")
    (folder / "test_it.py").write_text(LEAVERS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.slurm.conftest",
        "-rA",
        f"--basetemp={folder}/b",
        str(folder),
    ]
    told = subprocess.run(command, env=slurm.env, capture_output=True, text=True, timeout=PATIENCE_S).stdout
    outcomes = re.findall(r"^(PASSED|FAILED|ERROR) .*::(\w+)", told, re.MULTILINE)
    assert sorted(outcomes) == [("ERROR", "test_leaves"), ("PASSED", "test_leaves"), ("PASSED", "test_says_so")], told


@pytest.mark.parametrize("kind", ["isolated", "plain"])
def test_a_cluster_beside_this_one_vanishes_when_its_process_is_killed(
    slurm: Cluster, tmp_path_factory: pytest.TempPathFactory, kind: str
):
    if kind == "isolated" and not machines.may_isolate():
        pytest.skip("namespaces need root")
    base = tmp_path_factory.mktemp("slurm")
    command = [sys.executable, "-c", A_CLUSTER, str(base), kind, STRAY]
    with subprocess.Popen(command, env=slurm.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert any("sleep" in line for line in processes_of(base))
        link = link_of(base)
        assert len(link) == (kind == "isolated")
        process.kill()
    wait_for(lambda: processes_of(base) == [] and (link_of(base) == [] or link_of(base) != link))


CRASHES_ONCE = """\
#!/bin/sh
if mkdir "{base}/crashed"; then
    {mariadbd} "$@" & {until}; kill -SEGV $!; wait $!
else
    exec {mariadbd} "$@"
fi
"""


@pytest.mark.parametrize(
    "until", ["sleep 0.1", 'until grep -q "ready for" {base}/log/mariadbd.log; do :; done'], ids=["early", "ready"]
)
def test_a_database_that_ends_is_started_again(until: str):
    with open_to_others() as base:
        cluster = Cluster(base, [Partition(name="one", count=1, gpu="a10")], isolated=machines.may_isolate())
        shim = base / "bin" / "mariadbd"
        shim.parent.mkdir()
        real = shutil.which("mariadbd", path=cluster.env["PATH"])
        shim.write_text(CRASHES_ONCE.format(base=base, mariadbd=real, until=until.format(base=base)))
        shim.chmod(0o755)
        cluster.env["PATH"] = f"{shim.parent}:{cluster.env['PATH']}"
        try:
            cluster.start()
            assert (base / "crashed").exists()
            assert cluster.sacct() == []
        finally:
            cluster.stop()
