"""Kill many runs at random moments and count the losses: make soak.

    python -m tests.faults.soak --kills 100

benchmarks/RESULTS.md shows the table that it prints.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.results import markdown
from runtime.provenance import environment
from tests.faults.killing import MOMENTS, VARIANTS, Outcome, kill_often


def main() -> None:
    """Run all variants, two at a time, and print a table; fail if something was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="kills per variant")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="of moments")
    options = parser.parse_args()
    folder, start = Path(tempfile.mkdtemp(prefix="soak_")), time.time()
    print(f"seed {options.seed}, runs and their output in {folder}", flush=True)
    bar = tqdm(total=options.kills * len(VARIANTS), desc="kill", unit="kill")
    with bar, ThreadPoolExecutor(2) as pool:
        running = {
            name: pool.submit(
                kill_often, folder / name.replace(" ", "_"), name, options.kills, options.seed + i, bar.update
            )
            for i, name in enumerate(VARIANTS)
        }
        outcomes = {name: future.result() for name, future in running.items()}
    here = environment(torch.device("cpu"))
    changed = " with uncommitted changes" if here["uncommitted_changes"] else ""
    print(table(outcomes))
    print(
        f"{time.strftime('%Y-%m-%d')}, commit {here['commit'][:7]}{changed}, seed {options.seed}, "
        f"{(time.time() - start) / 60:.0f} minutes, {here['processor']}, torch {here['versions']['torch']}"
    )
    lost = [f"{name}: {what}" for name, outcome in outcomes.items() for what in outcome.lost]
    if lost:
        sys.exit("\n".join([*lost, f"error: {len(lost)} losses; the runs are in {folder}"]))
    shutil.rmtree(folder)


def table(outcomes: dict[str, Outcome]) -> str:
    """Format the numbers of faults, survived runs and losses."""
    rows = []
    for name, outcome in outcomes.items():
        faults, lost = outcome.kills.total(), len(outcome.lost)
        row = {"variant": name, **{moment: outcome.kills[moment] for moment in MOMENTS}, "faults": faults}
        rows.append(row | {"survived": faults - lost, "lost": lost, "runs compared": outcome.compared})
    return markdown(rows)


if __name__ == "__main__":
    main()
