"""What dashboards answer over HTTP is what their description at /api says, whatever is asked."""

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from cosmos_app.dashboard.api import Served, make_app
from cosmos_app.dashboard.example import START_S, write_example_run
from cosmos_app.dashboard.feed import RunFeed
from cosmos_core.bus import BusError
from cosmos_core.messages import Event
from cosmos_core.rundir import RunDirectory

httpx = pytest.importorskip("httpx")
jsonschema = pytest.importorskip("jsonschema")

TOKEN = "a-token-of-our-own"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
Ask = Callable[..., Awaitable[int]]


class Described:
    """Asks an application, and holds each answer against what is said of it.

    Attributes:
        schema: that the application gives at ``/api``.
        seen: routes, methods and status codes of the answers so far.
    """

    def __init__(self, client: Any, schema: Mapping[str, Any]) -> None:
        self.schema, self.seen = schema, set[tuple[str, str, int]]()
        self._client = client

    async def ask(self, route: str, method: str = "get", known: bool = True, **asked: Any) -> Any:
        """Ask a route, the names in which are filled from ``named``; return the answer."""
        address = route.format(**asked.pop("named", {}))
        headers = {**(BEARER if known else {}), **asked.pop("headers", {})}
        answer = await self._client.request(method, address, headers=headers, **asked)
        said = self.schema["paths"][route][method]["responses"]
        assert str(answer.status_code) in said, f"{method} {route} answered {answer.status_code}"
        content = said[str(answer.status_code)].get("content", {})
        if not content:
            assert answer.content == b""
        else:
            kind = answer.headers["content-type"].partition(";")[0]
            assert kind in content, f"{method} {route}: {kind}"
            if kind == "application/json":
                self._assert_of(content[kind]["schema"], answer.text)
        self.seen.add((route, method, answer.status_code))
        return answer

    def _assert_of(self, schema: Mapping[str, Any], text: str) -> None:
        """Hold a JSON document against its schema; what no schema speaks of must not be there."""
        named = {
            name: {**of, **({"additionalProperties": False} if "properties" in of else {})}
            for name, of in self.schema["components"]["schemas"].items()
        }
        whole = {**schema, "components": {"schemas": named}}
        jsonschema.Draft202012Validator(whole).validate(json.loads(text))

    def unseen(self) -> set[tuple[str, str, int]]:
        """Return what is described and has not been answered."""
        described = {
            (route, method, int(status))
            for route, methods in self.schema["paths"].items()
            for method, of in methods.items()
            for status in of["responses"]
        }
        return described - self.seen


async def described(app: Any) -> Described:
    transport = httpx.ASGITransport(app)
    client = httpx.AsyncClient(transport=transport, base_url="http://here")
    found = Described(client, (await client.get("/api", headers=BEARER)).json())
    for route, methods in found.schema["paths"].items():
        for method, of in methods.items():
            assert of["security"] == [{"HTTPBearer": []}]
            await found.ask(route, method, known=False, named={"name": "x", "step": 0})
    return found


async def test_every_answer_of_a_run_is_as_it_is_described(tmp_path: Path) -> None:
    write_example_run(tmp_path / "example")
    feed = RunFeed(RunDirectory.open(tmp_path / "example"))
    await feed.look()
    away = False

    async def send(event: Event) -> None:
        if away:
            raise BusError("Redis is away")

    api = await described(make_app(Served(feed=feed, clock=lambda: START_S, send=send), TOKEN))
    for route in ("/metrics", "/api/run", "/api/replicas", "/api/curves"):
        await api.ask(route)
    samples = (await api.ask("/api/samples")).json()
    name = next(sample["pictures"][0] for sample in samples if sample["pictures"])
    await api.ask("/api/pictures/{name}", named={"name": name})
    await api.ask("/api/pictures/{name}", named={"name": "0123"})
    for route, wrong in (("timeline", "window_s"), ("events", "most"), ("page", "window_s")):
        answer = await api.ask(f"/api/{route}")
        await api.ask(f"/api/{route}", params={wrong: -1})
    await api.ask("/api/page", headers={"If-None-Match": answer.headers["etag"]})
    for route, asked in (("stop", {"reason": "enough"}), ("scale", {"rollouts": 2})):
        await api.ask(f"/api/{route}", "post", params=asked)
        await api.ask(f"/api/{route}", "post", params=dict.fromkeys(asked, ""))
        away = True
        await api.ask(f"/api/{route}", "post", params=asked)
        away = False
    # any text may be asked for as the name of a picture
    assert api.unseen() == {("/api/pictures/{name}", "get", 422)}


async def test_so_is_one_of_a_run_of_which_nothing_is_known(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "new", config_json="{}", now_s=START_S)
    feed = RunFeed(run)
    api = await described(make_app(Served(feed=feed, clock=lambda: START_S), TOKEN))
    for route in ("run", "replicas", "curves", "timeline", "samples", "events", "page"):
        await api.ask(f"/api/{route}")
    run.close()


async def test_so_is_every_answer_of_a_world_models_run(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    import torch

    from cosmos_app.wfm.dashboard.api import make_world_model_app
    from cosmos_app.wfm.dashboard.feed import WorldModelFeed
    from cosmos_app.wfm.dashboard.recorded import open_world_model_run
    from cosmos_wfm import ValidationConfig, write_samples
    from cosmos_wfm.gallery import write_gallery
    from cosmos_wfm.sample_rewards import SampleRewards

    path = tmp_path / "shapes"
    path.mkdir()
    (path / "recipe.json").write_text(json.dumps({"kind": "wfm_rl", "num_steps": 4}))
    (path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5, "reward": 1.0}\n')
    shown = ValidationConfig(prompts=("a red square",))
    drawn = path / "validation" / "step_2"
    write_samples(torch.zeros(1, 1, 3, 16, 16), drawn)
    earned = SampleRewards(rewards={"brightness": 0.5}, reward=1.0)
    write_gallery(torch.zeros(1, 1, 3, 16, 16), drawn, shown, step=2, rewards=[[earned]])
    feed = WorldModelFeed(open_world_model_run(path), is_live=False)
    await feed.look()

    api = await described(make_world_model_app(feed, TOKEN))
    for route in ("/metrics", "/api/run", "/api/curves"):
        await api.ask(route)
    page = await api.ask("/api/page")
    await api.ask("/api/page", headers={"If-None-Match": page.headers["etag"]})
    gallery = (await api.ask("/api/gallery")).json()
    media, name = "/api/gallery/{step}/{name}", gallery[0]["samples"][0]["picture"]
    for part in ("", "bytes=0-3", "bytes=9999999-", "lines=1"):
        headers = {"Range": part} if part else {}
        await api.ask(media, named={"step": 2, "name": name}, headers=headers)
    await api.ask(media, named={"step": 7, "name": name})
    await api.ask(media, named={"step": -1, "name": name})
    # nothing can be asked in a wrong way of a page without parameters
    assert api.unseen() == {("/api/page", "get", 422)}
