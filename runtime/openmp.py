"""How threads of OpenMP wait for each other. Import it before torch, which reads the variables once."""

import os

# Threads that spin take the core that others need; a short spin costs nothing on a quiet machine
# (benchmarks/LOG.md). What the user has set stays.
SPIN_COUNT = "10000"
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
