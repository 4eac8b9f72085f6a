"""Runs for the tests of reports, trained once."""

import pytest

from tests.runs import runs_to_compare


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """Dense and routed runs with two seeds each; tests must not change them."""
    return runs_to_compare(tmp_path_factory.mktemp("compared"))
