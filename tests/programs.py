"""Start programs of the project as a user does, but from a process that has the heavy libraries already.

To import them anew for each program was most of what the tests took. Signals, kills, and launchers have tests that start
real ones: see `tests/faults`.
"""

import multiprocessing
import os
import resource
import runpy
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.runs import ROOT

PRELOADED = ("accelerate", "diffusers", "hydra", "matplotlib.pyplot", "scipy.linalg", "sklearn.datasets", "timm", "torchvision")
LONGEST_SEC = 300
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(PRELOADED))


def start(program, *arguments, folder=ROOT, num_processes=1, check=True, variables=None, file_bytes=None):
    """Run a program to its end, and return it with what it printed, of all its processes.

    Args:
        program: a file, or a module after `-m `, or code after `-c `.
        folder: the current directory.
        num_processes: so many at once, with the environment that a launcher gives them.
        variables: of the environment, beside those of the tests.
        file_bytes: a file may hold no more, as if the disk were full.
    """
    environment = {"ACCELERATE_USE_CPU": "true", "WANDB_MODE": "offline", **(variables or {})}
    with socket.socket() as free, tempfile.TemporaryDirectory() as said:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        processes = []
        for rank in range(num_processes):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            own = environment | ({key: str(value) for key, value in place.items()} if num_processes > 1 else {})
            job = (program, [str(argument) for argument in arguments], str(folder), own, file_bytes, f"{said}/{rank}")
            processes.append(_context.Process(target=_run, args=job))
            processes[-1].start()
        for process in processes:
            process.join(LONGEST_SEC)
            assert process.exitcode is not None, f"{program} does not end"
        stdout, stderr = ("".join(file.read_text() for file in sorted(Path(said).glob(f"*.{name}"))) for name in OUTPUTS)
    code = next((process.exitcode for process in processes if process.exitcode), 0)
    result = subprocess.CompletedProcess([program, *arguments], code, stdout, stderr)
    assert not check or code == 0, stdout + stderr
    return result


OUTPUTS = ("stdout", "stderr")


def _run(program, arguments, folder, environment, file_bytes, said):
    for number, name in enumerate(OUTPUTS, start=1):
        os.dup2(os.open(f"{said}.{name}", os.O_WRONLY | os.O_CREAT), number)
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))
    os.chdir(folder)
    os.environ.update(environment)
    kind, _, what = program.partition(" ")
    sys.argv = [what if what else program, *arguments]
    sys.path[:0] = [str(ROOT), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(str(ROOT / program), run_name="__main__")
