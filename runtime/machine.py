"""The device, threads, memory, precision and compilation of this machine."""

import ctypes
import logging
import os
import platform
import shutil
import socket
import sysconfig
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn as nn
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from joblib import cpu_count

from runtime.launch import Launch
from runtime.launcher import threads_are_chosen
from runtime.provenance import cpuinfo

# Parameters of glibc's mallopt, and the environment variables that set them.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_")
MALLOC_VARIABLES += ("MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
PATIENCE = timedelta(days=30)  # for ranks that have finished their share and wait for the others
COMPILATION_OFF = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")  # 1: off
LINKED_WITHIN_SEC = 10  # a library is empty for a moment while the linker writes it


def start_process(timeout: timedelta | None = None, tf32: bool = True) -> Launch:
    """Join the other processes of the launch, if any, on CUDA or on a share of the CPU's cores.

    Args:
        timeout: how long a process waits for the others; None: the default of torch.
        tf32: allow TF32 on CUDA.

    Raises:
        OSError: the launcher has died.
    """
    # PARITY: TF32 in training and sampling, as in the public code of the field; scores turn it off
    # (evaluation/precision.py).
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    _check_torchrun()
    options = {"timeout": timeout} if timeout else {}
    launch = Launch.of(PartialState(cpu=device_type() == "cpu", **options))
    # Launchers set one thread by default, which is right for a GPU only.
    if launch.device.type == "cpu" and not threads_are_chosen():
        torch.set_num_threads(max(1, cpu_count() // processes_here()))
    return launch


def processes_here() -> int:
    """Return the number of processes of the launch on this machine: the variable LOCAL_WORLD_SIZE, or 1."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not local.isdecimal() or local == "0":
        raise ValueError(f"the variable LOCAL_WORLD_SIZE={local} must be a positive number")
    return int(local)


def device_type() -> str:
    """Return the type of device that a process would use here, `cpu` or `cuda`, without starting it."""
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    return "cpu" if on_cpu else "cuda"


def _check_torchrun() -> None:
    """Raise an OSError if torchrun has ended: torch would try to reach its store for half an hour."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun listens before any rank starts
        host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        try:
            socket.create_connection((host, int(port))).close()
        except ConnectionRefusedError as error:
            raise OSError(f"the launcher at {host}:{port} has died: launch again") from error


def keep_freed_memory() -> None:
    """Let glibc retain freed memory for the rest of the process, as the allocator of a GPU does.

    By default glibc returns large tensors to the kernel and requests new pages (benchmarks/LOG.md).
    """
    # All tensors are allocated in the heap, and its free end is never returned.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only in glibc
    for parameter, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1)):
        if mallopt is None or not mallopt(parameter, value):
            raise OSError(f"mallopt({parameter}, {value}) failed: set train.keep_freed_memory=false")


def return_freed_memory() -> None:
    """Let glibc return freed memory to the kernel once, also after `keep_freed_memory`."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def has_fast_bf16(device: torch.device) -> bool:
    """True if a device is faster in bf16.

    On a CPU, its vendor and flags decide: measurements could give two runs of one seed different precisions.
    An Intel Xeon with avx512_bf16 and without AMX is slower in bf16 (benchmarks/LOG.md).
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    known = {*cpuinfo().split()}
    return device.type == "cpu" and ("amx_bf16" in known or {"avx512_bf16", "AuthenticAMD"} <= known)


def can_keep_freed_memory(device: torch.device) -> bool:
    """True if freed memory can be retained, and the user has not set variables of the C library."""
    chosen_by_user = any(os.environ.get(name) for name in MALLOC_VARIABLES)
    return device.type == "cpu" and platform.libc_ver()[0] == "glibc" and not chosen_by_user


def compile_blocks(blocks: Iterable[nn.Module], num_graphs: int) -> None:
    """Compile blocks in place, with at most `num_graphs` more graphs: one per input shape."""
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # instead of running uncompiled without a message
    torch._dynamo.config.recompile_limit += num_graphs
    if not torch.cuda.is_available():  # hide its warning, on a CPU, that CUDA is missing
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        discard_empty_libraries()
    for block in blocks:
        block.compile(dynamic=False)


def discard_empty_libraries() -> None:
    """Remove empty libraries of killed compilers from torch's cache: loading them would fail."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    for file in Path(cache_dir()).glob("*/*.so"):
        with suppress(FileNotFoundError):  # another process may remove them, too
            status = file.stat()
            if status.st_size == 0 and time.time() - status.st_mtime > LINKED_WITHIN_SEC:
                file.unlink()


def can_compile(device: torch.device) -> bool:
    """True if blocks can be compiled for a device, and no environment variable turns compilation off."""
    if any(os.environ.get(name) == "1" for name in COMPILATION_OFF):
        return False
    if device.type == "cuda":
        return find_spec("triton") is not None
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    return device.type == "cpu" and has_headers and shutil.which(os.environ.get("CXX", "g++")) is not None


def reset_peak(device: torch.device) -> None:
    """Reset the peak of the process's memory to its current use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM


def peak_gib(device: torch.device) -> float:
    """Return the peak memory since the last reset, in GiB: on a GPU allocated, else resident (Linux)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    lines = Path("/proc/self/status").read_text().splitlines()
    peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
    if not peaks:
        raise OSError("/proc/self/status has no VmHWM")
    return peaks[0] / 2**20
