"""Memory of a process: on a GPU that of its allocator, else the resident set (Linux)."""

from pathlib import Path

import torch


def reset_peak(device: torch.device) -> float:
    """Reset the peak, and return the memory in use in GiB."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**30
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    return _resident_gib("VmRSS")


def peak_gib(device: torch.device) -> float:
    """Return the peak since it was reset, in GiB."""
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else _resident_gib("VmHWM")


def _resident_gib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    found = [int(line.split()[1]) for line in lines if line.startswith(field)]
    if not found:
        raise OSError(f"/proc/self/status has no {field}")
    return found[0] / 2**20
