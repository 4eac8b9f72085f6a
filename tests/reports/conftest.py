"""The runs that reports are written of, trained once."""

import pytest

from tests.runs import runs_to_compare


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """Dense and routed runs, of two seeds each; a test leaves them as they were."""
    return runs_to_compare(tmp_path_factory.mktemp("compared"))
