"""Set how OpenMP threads wait. Import this before torch, which reads the variables once."""

import os

# Spinning threads block cores that others need; a short spin is free on an idle machine (benchmarks/LOG.md).
# Values of the user are kept.
SPIN_COUNT = "10000"
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
