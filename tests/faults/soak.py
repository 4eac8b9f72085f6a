"""Kill many runs at random moments, for hours if you like, and count what was lost: make soak.

    python -m tests.faults.soak --kills 100

The table that it prints is what RESULTS.md shows.
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

from runtime.provenance import environment
from tests.faults.killing import MOMENTS, VARIANTS, Outcome, kill_often


def main() -> None:
    """Run all variants, two at a time, and print a table; a loss is an error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="of each variant")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(2**31), help="of the moments"
    )
    arguments = parser.parse_args()
    folder, start = Path(tempfile.mkdtemp(prefix="soak_")), time.time()
    print(f"seed {arguments.seed}, runs and their output in {folder}", flush=True)
    with (
        tqdm(total=arguments.kills * len(VARIANTS), desc="kill", unit="kill") as bar,
        ThreadPoolExecutor(2) as pool,
    ):
        running = {
            name: pool.submit(
                kill_often,
                folder / name.replace(" ", "_"),
                variant,
                arguments.kills,
                arguments.seed + i,
                bar.update,
            )
            for i, (name, variant) in enumerate(VARIANTS.items())
        }
        outcomes = {name: future.result() for name, future in running.items()}
    print(table(outcomes))
    here = environment_line(arguments.seed, time.time() - start)
    lost = [f"{name}: {what}" for name, outcome in outcomes.items() for what in outcome.lost]
    print(here, *lost, sep="\n")
    if lost:
        sys.exit(f"error: {len(lost)} losses; the runs are in {folder}")
    shutil.rmtree(folder)


def table(outcomes: dict[str, Outcome]) -> str:
    """Lay out what was injected, survived and lost."""
    lines = [
        f"| variant | {' | '.join(MOMENTS)} | faults | survived | lost | runs compared |",
        f"|---|{'--:|' * (len(MOMENTS) + 4)}",
    ]
    for name, outcome in outcomes.items():
        faults = sum(outcome.kills.values())
        by_moment = " | ".join(str(outcome.kills[moment]) for moment in MOMENTS)
        survived = faults - len(outcome.lost)
        lines.append(
            f"| {name} | {by_moment} | {faults} | {survived} | {len(outcome.lost)} | {outcome.compared} |"
        )
    return "\n".join(lines)


def environment_line(seed: int, seconds: float) -> str:
    """Say what was run where."""
    found = environment(torch.device("cpu"))
    changed = " with uncommitted changes" if found["uncommitted_changes"] else ""
    return (
        f"{time.strftime('%Y-%m-%d')}, commit {found['commit'][:7]}{changed}, seed {seed}, "
        f"{seconds / 60:.0f} minutes, "
        f"{found['processor']}, torch {found['versions']['torch']}"
    )


if __name__ == "__main__":
    main()
