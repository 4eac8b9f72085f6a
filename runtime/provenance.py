"""The environment of a result: commit, code, versions, device, processor and command."""

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from joblib import cpu_count

from runtime.files import hash_files
from runtime.launcher import recorded_variables

OWN_PACKAGES = ("builders", "data", "diffusion", "evaluation", "models", "routing", "runtime", "training")
PROJECT = Path(__file__).resolve().parents[1]
SOURCES = ("*.py", "configs/**/*.yaml", *(f"{package}/**/*.py" for package in OWN_PACKAGES))
PACKAGES = ("torch", "torchvision", "timm", "accelerate", "hydra-core", "numpy", "scipy", "torch-fidelity")
PACKAGES += ("pillow",)
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # in /proc/cpuinfo, on x86 and Arm
RECORDS = (":!benchmarks/results", ":!study/results")  # results, not code


def environment(device: torch.device) -> dict[str, Any]:
    """Record the commit, versions, device, processor and command of this process."""
    return {
        "command": " ".join([os.path.relpath(sys.argv[0], PROJECT), *sys.argv[1:]]),
        "commit": _git("rev-parse", "HEAD"),
        "source_sha256": source_sha256(),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", ".", *RECORDS)),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "tf32": device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32,  # scores turn it off
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "variables": recorded_variables(),
    }


def cpuinfo() -> str:
    """Read /proc/cpuinfo (name, vendor and flags of the processor); empty if it does not exist."""
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.exists() else ""


def _processor() -> str:
    text = cpuinfo()
    name = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
    bf16 = "".join(f", {flag}" for flag in sorted(BF16_FLAGS & {*text.split()}))
    return f"{name[1].strip() if name else platform.processor()}, {cpu_count()} cores{bf16}"


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", *arguments], cwd=PROJECT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None  # not a git checkout
    return result.stdout.strip()


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries to dotted keys."""
    if not isinstance(config, dict):
        return {prefix: config}
    flat = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else key)
    return flat


def source_sha256() -> str:
    """Hash the code and configurations of this project, with uncommitted changes."""
    files = {file.relative_to(PROJECT) for pattern in SOURCES for file in PROJECT.glob(pattern)}
    return hash_files(PROJECT, files)
