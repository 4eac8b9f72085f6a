"""What a process holds in memory: on a GPU as its allocator tells it, else as Linux does."""

from pathlib import Path

import torch


def reset_peak(device: torch.device) -> float:
    """Begin a new peak, and return what is held now in GiB."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**30
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    return _resident_gib("VmRSS")


def peak_gib(device: torch.device) -> float:
    """Return the most that was held since the peak was reset, in GiB."""
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else _resident_gib("VmHWM")


def _resident_gib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 2**20
