"""What puts the parts of a program together: schemas, rules across groups, and functions that build."""

import runtime.openmp  # noqa: F401 before torch
