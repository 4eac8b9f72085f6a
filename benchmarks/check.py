"""The stage `check` of `python -m benchmarks.gpu`: the tests that need a GPU, one row for each check.

A test records a check with its error and bound (fixture `check` in tests/gpu/conftest.py), and pytest writes
it to its XML report. Without a GPU, or with `--tiny`, the same tests run on the CPU at small sizes.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import torch

from benchmarks.results import Rows
from runtime.provenance import PROJECT

COLUMNS = {"setting": "{}", "what": "{}", "error": "{:.2g}", "bound": "{:.2g}", "failed": "{}"}
# From short to long.
SETTINGS = {
    "skipped step": ["tests/gpu/test_trainings.py::test_a_step_of_nan_is_skipped"],
    "no host synchronisation": ["tests/gpu/test_trainings.py::test_no_step_waits_for_the_device"],
    "scores": ["tests/gpu/test_precision.py::test_scores"],
    "precision": ["tests/gpu/test_precision.py::test_precision"],
    "compiled": ["tests/gpu/test_precision.py::test_compiled_blocks"],
    "kill and resume": ["tests/gpu/test_trainings.py::test_a_killed_run_resumes"],
}


def plan(device: torch.device, tiny: bool) -> dict[str, Callable[[], Rows]]:
    """Plan a measurement of each setting; see `benchmarks.gpu`."""
    on_gpu, settings = device.type == "cuda" and not tiny, SETTINGS
    if on_gpu:
        tests = sorted((PROJECT / "tests").rglob("test_*.py"))
        others = [str(file) for file in tests if "mark.gpu" in file.read_text() and file.parent.name != "gpu"]
        settings = SETTINGS | {"gpu tests": others}
    return {name: partial(run_tests, ids, on_gpu) for name, ids in settings.items()}


def run_tests(tests: list[str], on_gpu: bool) -> Rows:
    """Run tests in a separate process. Return a row for each check, and for each failed test."""
    with tempfile.TemporaryDirectory() as folder:
        report, selected = Path(folder) / "report.xml", "gpu" if on_gpu else "not gpu"
        command = [sys.executable, "-m", "pytest", "-q", "-m", selected, "-p", "no:cacheprovider", *tests]
        result = subprocess.run([*command, f"--junitxml={report}"], cwd=PROJECT)
        if not report.exists():
            return [{"what": "pytest", "failed": f"exit status {result.returncode}"}]
        return rows_of(ElementTree.parse(report))


def rows_of(report: ElementTree.ElementTree) -> Rows:
    """Return the checks of a pytest report as rows; if it has none, one row that counts its tests."""
    rows, counts = [], {"passed": 0, "skipped": 0}
    for test in report.iter("testcase"):
        checks = [
            json.loads(node.get("value")) for node in test.iterfind("properties/property[@name='check']")
        ]
        rows += checks
        failure = next((node for node in test if node.tag in ("failure", "error")), None)
        if failure is not None and not any(row["failed"] for row in checks):
            rows.append({"what": test.get("name"), "failed": " ".join(failure.get("message").split())[:300]})
        counts["skipped" if test.find("skipped") is not None else "passed"] += failure is None
    if not rows:
        failed = "" if counts["passed"] else "no test passed"
        rows = [{"what": ", ".join(f"{count} {what}" for what, count in counts.items()), "failed": failed}]
    return rows
