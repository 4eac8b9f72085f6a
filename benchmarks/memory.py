"""What a process holds in memory, as Linux tells it."""

from pathlib import Path


def memory_gib(field: str) -> float:
    """Return the resident memory of this process (VmRSS), its anonymous part (RssAnon), or its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 2**20
