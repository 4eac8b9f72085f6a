"""Random Inception weights and a network with them, shared by all tests of this folder."""

import pytest

from evaluation import InceptionDetector
from tests.inception import write_random_weights


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    return write_random_weights(tmp_path_factory.mktemp("weights") / "random.pth")


@pytest.fixture(scope="session")
def detector(weights):
    return InceptionDetector(weights, allow_unpublished=True)
