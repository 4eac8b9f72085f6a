import runtime.openmp  # noqa: F401 before torch
