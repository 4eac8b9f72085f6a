"""Step time of every class of diffusers that can be routed, at one width; see benchmarks/families.py.

python -m tests.routing.family_speed OUT    writes after every class; the same command resumes
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from tqdm import tqdm

from benchmarks.families import COLUMNS, DEPTH, NUM_TEXT, REPEATS, measure
from benchmarks.results import Record, markdown
from routing.adapters.families import FAMILIES
from runtime.machine import start_process
from runtime.provenance import environment
from runtime.tables import aligned
from tests.routing.models import Sizes, build


def main():
    parser = argparse.ArgumentParser("python -m tests.routing.family_speed", description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the record")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal, at sizes that take seconds")
    request = parser.parse_args()
    device = start_process().device
    request.out.mkdir(parents=True, exist_ok=True)
    record = Record("families_all", request.out, environment(device) | {"tiny": request.tiny})
    # What two cores do in minutes.
    sizes = Sizes(depth=DEPTH) if request.tiny else Sizes(512, 8, DEPTH, 32, 2, NUM_TEXT)
    repeats = 1 if request.tiny else REPEATS
    for name in tqdm([name for name in FAMILIES if name not in record.done()], unit="class"):
        try:
            record.add(name, measure(partial(build, name, sizes), sizes, repeats, device))
        except (RuntimeError, ValueError, TypeError) as error:  # the same command tries again
            record.add(name, [{"failed": f"{type(error).__name__}: {error}"}])
    print(aligned(markdown(record.rows, COLUMNS)))
    sys.exit(record.done() != record.started())


if __name__ == "__main__":
    main()
