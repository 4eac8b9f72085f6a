"""Run programs in forks of a process that has already imported the libraries, to save time.

Each fork has its own arguments, directory, environment and output. Tests that need a fresh process (signals,
kills, launchers) are in `tests/faults`.
"""

import atexit
import multiprocessing
import os
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRELOADED = ("accelerate", "diffusers", "hydra", "matplotlib.pyplot", "scipy.linalg", "sklearn.datasets")
PRELOADED += ("timm", "torchvision")
OUTPUTS = ("stdout", "stderr")
MAX_SEC, MAX_SEC_AFTER_FAILURE = 300, 30  # of all processes; of the others after one has failed
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(PRELOADED))


def start(
    program,
    *arguments,
    folder=ROOT,
    num_processes=1,
    check=True,
    variables=None,
    file_bytes=None,
    max_sec=MAX_SEC,
):
    """Run a program to its end, and return its exit code with the output of all its processes.

    Args:
        program: a file, or a module after `-m `, or code after `-c `.
        folder: the working directory.
        num_processes: how many to run at once, with the environment variables of a launcher.
        variables: further environment variables.
        file_bytes: largest size of a file, as if the disk were full.
        max_sec: of all processes.
    """
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "WANDB_MODE": "offline", **(variables or {})}
    if num_processes > 1:
        import torch.distributed as dist

        # Port 0: one that is free.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        environment |= {name: str(num_processes) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    with tempfile.TemporaryDirectory() as output:
        processes = []
        for rank in range(num_processes):
            place = {name: str(rank) for name in ("RANK", "LOCAL_RANK")} if num_processes > 1 else {}
            place |= variables or {}
            options = (str(folder), environment | place, file_bytes, f"{output}/{rank}")
            processes.append(
                _context.Process(target=_run, args=(program, [str(a) for a in arguments], *options))
            )
            processes[-1].start()
        in_time = _ended(processes, max_sec)
        stdout, stderr = (
            "".join(file.read_text() for file in sorted(Path(output).glob(f"*.{name}"))) for name in OUTPUTS
        )
    assert in_time, f"{program} timed out\n{stdout}{stderr}"
    code = next((process.exitcode for process in processes if process.exitcode), 0)
    result = subprocess.CompletedProcess([program, *arguments], code, stdout, stderr)
    assert not check or code == 0, stdout + stderr
    return result


def _ended(processes, max_sec):
    """Wait for all processes and kill the ones that time out; True if all ended, or one of them failed."""
    ends, running = time.monotonic() + max_sec, list(processes)
    while running and time.monotonic() < ends:
        wait([process.sentinel for process in running], ends - time.monotonic())
        if any(process.exitcode for process in processes):
            ends = min(ends, time.monotonic() + MAX_SEC_AFTER_FAILURE)
        running = [process for process in running if process.exitcode is None]
    for process in running:
        process.kill()
        process.join()
    return not running or any(process.exitcode for process in processes if process not in running)


def _run(program, arguments, folder, environment, file_bytes, output):
    for number, name in enumerate(OUTPUTS, start=1):
        os.dup2(os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT), number)
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    kind, _, what = program.partition(" ")
    sys.argv = [what if what else program, *arguments]
    sys.path[:0] = [str(ROOT), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif kind == "-c":
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(str(ROOT / program), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a fork ends without them
