"""Build the parts of a program from its configuration: schemas, rules across groups, builders."""

import runtime.openmp  # noqa: F401 before torch
