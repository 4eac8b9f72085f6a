"""What made a result: commit, code, versions, device, processor and command of a program."""

import hashlib
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from joblib import cpu_count

from runtime.launcher import recorded_variables
from runtime.machine import bf16_instructions

OWN_PACKAGES = ("builders", "data", "diffusion", "evaluation", "models", "routing", "runtime", "training")
PROJECT = Path(__file__).resolve().parents[1]
SOURCES = ("*.py", "configs/**/*.yaml", *(f"{package}/**/*.py" for package in OWN_PACKAGES))
PACKAGES = ("torch", "torchvision", "timm", "accelerate", "hydra-core", "numpy", "scipy", "torch-fidelity")
PACKAGES += ("pillow",)
RECORDS = (":!benchmarks/results", ":!study/results")  # results, not code


def environment(device: torch.device) -> dict[str, Any]:
    """Return commit, versions, device, processor and command of this process."""
    return {
        "command": " ".join([os.path.relpath(sys.argv[0], PROJECT), *sys.argv[1:]]),
        "commit": _git("rev-parse", "HEAD"),
        "source_sha256": source_sha256(),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", ".", *RECORDS)),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "tf32": device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32,  # but for scores
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "variables": recorded_variables(),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    bf16 = "".join(f", {flag}" for flag in sorted(bf16_instructions()))
    return f"{names[0] if names else platform.processor()}, {cpu_count()} cores{bf16}"


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", *arguments], cwd=PROJECT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None  # not a git checkout
    return result.stdout.strip()


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dictionaries by their dotted keys."""
    if not isinstance(config, dict):
        return {prefix: config}
    flat = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else key)
    return flat


def source_sha256() -> str:
    """Return a hash of the code and configurations of this project, committed or not."""
    digest = hashlib.sha256()
    for file in sorted({file for pattern in SOURCES for file in PROJECT.glob(pattern)}):
        name, content = file.relative_to(PROJECT).as_posix(), hashlib.sha256(file.read_bytes())
        digest.update(f"{name} {content.hexdigest()}\n".encode())
    return digest.hexdigest()
