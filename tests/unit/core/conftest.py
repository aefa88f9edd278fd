"""What the tests of cosmos_core share."""

import os
import sys

import pytest
from hypothesis import settings

# The machine may be busy: an example that takes long is no failure.
settings.register_profile("core", deadline=None)
settings.load_profile("core")


@pytest.fixture
def child_environment() -> dict[str, str]:
    """An environment in which a child process finds what this one imports."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
