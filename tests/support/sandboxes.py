"""What the sandbox of generated programs finds on this machine."""

import pytest

from cosmos_rollout import SandboxError, SandboxLimits, run_program


def _namespaces_are_allowed() -> bool:
    try:
        run_program("pass", SandboxLimits(timeout_s=60.0, namespaces="required"))
    except SandboxError:
        return False
    return True


needs_namespaces = pytest.mark.skipif(
    not _namespaces_are_allowed(), reason="needs user name spaces of the kernel"
)
