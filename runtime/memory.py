"""Memory of a process: allocated on a GPU, or the resident set (Linux)."""

from pathlib import Path

import torch


def reset_peak(device: torch.device) -> None:
    """Reset the peak to the current use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM


def peak_gib(device: torch.device) -> float:
    """Return the peak since the last reset, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    lines = Path("/proc/self/status").read_text().splitlines()
    peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
    if not peaks:
        raise OSError("/proc/self/status has no VmHWM")
    return peaks[0] / 2**20
