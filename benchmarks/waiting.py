"""What it costs that threads spin while they wait, on a quiet machine and beside busy processes.

    python -m benchmarks.waiting

A training step of the demo's size (8 blocks of width 128, 64 tokens, batch 32) in fp32 with all cores, each
way of waiting in a process of its own, in turn. The ways are the variables of OpenMP that decide it.
"""

import os
import subprocess
import sys
from statistics import median

import torch
from joblib import cpu_count
from tqdm import tqdm

from benchmarks.results import Rows, markdown, write_results
from runtime.provenance import environment
from runtime.tables import aligned

WAYS = {
    "spinning (the default of OpenMP)": {},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    **{f"GOMP_SPINCOUNT={count}": {"GOMP_SPINCOUNT": str(count)} for count in (1000, 10_000, 100_000)},
}
NUM_BUSY, TURN_SEC, REPEATS = (0, 1, 4), 3.0, 3
COLUMNS = {"busy_processes": "{}", "waiting": "{}", "steps_per_sec": "{:.2f}", "ratio": "{:.2f}x", "n": "{}"}
STEPS = """
import sys, time, torch
layers = (torch.nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True) for _ in range(8))
blocks = torch.nn.Sequential(*layers)
optimizer, x = torch.optim.AdamW(blocks.parameters()), torch.randn(32, 64, 128)
def step():
    blocks(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
step(); count, start = 0, time.perf_counter()
while (passed := time.perf_counter() - start) < float(sys.argv[1]):
    step(); count += 1
print(count / passed)
"""
WAITING_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def main() -> None:
    """Measure, print and record."""
    rows = [row for num_busy in NUM_BUSY for row in measure(num_busy)]
    print(aligned(markdown(rows, COLUMNS)))
    write_results("waiting", rows, environment(torch.device("cpu")))


def measure(num_busy: int) -> Rows:
    """A row for each way of waiting, beside `num_busy` busy processes."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_busy)]
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    try:
        for _ in tqdm(range(REPEATS), desc=f"{num_busy} busy processes", unit="turn"):
            for way, variables in WAYS.items():
                rates[way].append(_steps_per_sec(variables))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    spinning, *_ = rates.values()
    return [
        {
            "busy_processes": num_busy,
            "waiting": way,
            "steps_per_sec": median(found),
            "ratio": median(a / b for a, b in zip(found, spinning, strict=True)),
            "n": REPEATS,
        }
        for way, found in rates.items()
    ]


def _steps_per_sec(variables: dict[str, str]) -> float:
    kept = {name: value for name, value in os.environ.items() if name not in WAITING_VARIABLES}
    kept |= {"OMP_NUM_THREADS": str(cpu_count()), **variables}
    command = [sys.executable, "-c", STEPS, str(TURN_SEC)]
    return float(subprocess.run(command, env=kept, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
