"""A SLURM cluster of two nodes on this machine, for tests: its daemons run without systemd, as this user.

    with Cluster(folder) as cluster:
        job = cluster.submit("--partition=low", "job.sbatch", folder=Path("."))
        cluster.wait(job, ("COMPLETED",))

A job in the partition `high` preempts jobs in `low`, which SLURM then queues again.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel")
NODES, CPUS = ("n1", "n2"), 2
STARTED_WITHIN_SEC, POLL_SEC = 60, 0.5
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
SwitchType=switch/none
MpiDefault=none
GresTypes=gpu
ReturnToService=2
KillWait=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """Return the programs of SLURM that are not installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    return [program for program in PROGRAMS if shutil.which(program, path=path) is None]


class Cluster:
    """Start the daemons in a folder; `close` ends them by their ids."""

    def __init__(self, folder: Path):
        self.folder, self.daemons = folder, []
        self.environment = {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf"}
        self.environment["PATH"] = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])

    def __enter__(self) -> "Cluster":
        folder, ports = self.folder, free_ports(1 + len(NODES))
        (folder / "state").mkdir(parents=True)
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        host = socket.gethostname()
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} Gres=gpu:2"
            for node, port in zip(NODES, ports[1:], strict=True)
        )
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        names = {"host": host, "port": ports[0], "user": user, "folder": folder, "nodes": nodes}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**names))
        gpus = [f"NodeName=n[1-2] Name=gpu File={file}\n" for file in ("/dev/null", "/dev/zero")]
        (folder / "gres.conf").write_text("".join(gpus))  # claimed, not used
        try:
            munge = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munge.pid"}
            munge |= {"log-file": folder / "munge.log", "seed-file": folder / "munge.seed"}
            self._start("munged", "--foreground", "--force", *(f"--{k}={v}" for k, v in munge.items()))
            wait_until((folder / "munge.socket").exists, "munged")
            self._start("slurmctld", "-D")
            for node in NODES:
                self._start("slurmd", "-D", "-N", node)
            wait_until(lambda: self.ask("sinfo", "-h", "-p", "low", "-o", "%N|%T") == "n[1-2]|idle", "nodes")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all jobs, and end the daemons."""
        try:
            if len(self.daemons) > 1:
                self.ask("scancel", "--user", str(os.getuid()))
                wait_until(lambda: not self.ask("squeue", "-h"), "the end of all jobs")
        finally:
            self._end_daemons()

    def _end_daemons(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.send_signal(signal.SIGKILL)
                daemon.wait()

    def ask(self, *command: str) -> str:
        """Return the output of a command of SLURM; empty if it fails."""
        options = {"env": self.environment, "capture_output": True, "text": True, "timeout": 60}
        return subprocess.run(command, **options).stdout.strip()

    def submit(self, *arguments: str, folder: Path) -> str:
        """Submit a job in a folder; return its id."""
        options = {"env": self.environment, "capture_output": True, "text": True, "timeout": 60}
        result = subprocess.run(["sbatch", "--parsable", *arguments], cwd=folder, **options)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    def state(self, job: str) -> str:
        """Return the state of a job (RUNNING, PENDING, COMPLETED, ...)."""
        fields = dict(item.partition("=")[::2] for item in self.ask("scontrol", "show", "job", job).split())
        return fields.get("JobState", "UNKNOWN")

    def wait(self, job: str, states: tuple[str, ...], sec: float = 300) -> str:
        """Wait until a job is in one of some states, and return it."""
        wait_until(lambda: self.state(job) in states, f"job {job}: {states}", sec)
        return self.state(job)

    def _start(self, program: str, *arguments: str) -> None:
        with (self.folder / f"{program}.{len(self.daemons)}.log").open("ab") as log:
            options = {"env": self.environment, "stdout": log, "stderr": log, "start_new_session": True}
            self.daemons.append(subprocess.Popen([program, *arguments], **options))


def free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_until(holds, what: str, sec: float = STARTED_WITHIN_SEC) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + sec
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {sec:.0f} s"
        time.sleep(POLL_SEC)
