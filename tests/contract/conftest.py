"""What several contracts of the bus are tested against."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cosmos_core.bus import RedisServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[RedisServer]":
    """The bundled Redis, for one module; imported here, as packages are tested alone too."""
    from cosmos_core.bus import RedisServer

    server = RedisServer.start(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()
