"""Machines that are reached by IPv6 alone; `tests/dist/test_app_machines.py` has two of them."""

import threading
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
import torch
import uvicorn
from with_ipv6 import WITH_IPV6

pytest.importorskip("diffusers")
pytest.importorskip("cosmos_weightsync")

from cosmos_app.dashboard.gate import TokenGate
from cosmos_app.dashboard.server import bind, url_of
from cosmos_app.listening import http_url
from cosmos_app.recipe import Recipe
from cosmos_app.wfm.disaggregated.meeting import read_places
from cosmos_app.wfm.disaggregated.replica import connect
from cosmos_app.wfm.disaggregated.trainer import ReplicaRollouts
from cosmos_core.addresses import listen_on
from cosmos_core.config import load_config
from cosmos_core.serving_config import DashboardConfig
from cosmos_parallel import (
    Attendee,
    ElasticConfig,
    Meeting,
    MeetingPlace,
    ParallelConfig,
    build_mesh,
)
from cosmos_wfm import DiffusionRlConfig, DisaggregatedConfig, StepParts, parse_order

DEADLINE_S = 60.0


pytestmark = WITH_IPV6


def test_the_head_s_address_is_given_as_an_override() -> None:
    assert load_config(Recipe, {}, ["bus.host=fd00::2"]).bus.host == "fd00::2"


def test_a_dashboard_answers_at_the_url_that_it_prints() -> None:
    async def answer(scope, receive, send) -> None:
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    with bind(DashboardConfig(host="::1")) as taken:
        gate = TokenGate(answer, "secret")
        server = uvicorn.Server(uvicorn.Config(gate, lifespan="off", log_level="warning"))
        serving = threading.Thread(target=server.run, kwargs={"sockets": [taken]})
        serving.start()
        try:
            url = url_of(taken, "secret")
            assert url.startswith("http://[::1]:")
            opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            with opener.open(url, timeout=DEADLINE_S) as response:
                assert response.read() == b"ok"
        finally:
            server.should_exit = True
            serving.join(DEADLINE_S)


def test_the_url_of_a_listening_socket_has_brackets() -> None:
    with listen_on("::1", 0) as taken:
        assert http_url(taken) == f"http://[::1]:{taken.getsockname()[1]}"


def test_elastic_replicas_meet() -> None:
    pytest.importorskip("torchft")
    config = ElasticConfig(lease_s=5.0, join_s=1.0, timeout_s=DEADLINE_S)
    with (
        closing(MeetingPlace(config, host="::1")) as place,
        closing(Meeting(place.address, "policy-0", config)) as meeting,
    ):
        attendance = meeting.attend(Attendee(name="policy-0", step=3))
        assert attendance.attendees == (Attendee(name="policy-0", step=3),)


def test_rollouts_of_a_world_model_reach_the_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COSMOS_HOST", "::1")
    recipe = DiffusionRlConfig(
        model="",
        prompts="",
        output=str(tmp_path),
        rewards={"brightness": 1.0},
        num_steps=3,
        disaggregated=DisaggregatedConfig(start=False, deadline_s=DEADLINE_S),
    )
    parts = StepParts(num_samples=4, samples_per_group=2, micro_batch_size=2, num_ranks=1)
    weights = {"w": torch.zeros(2)}
    mesh = build_mesh(ParallelConfig())
    rank = ReplicaRollouts(weights, parts, recipe=recipe, mesh=mesh, token="secret")
    try:
        rank.publish(0)
        (place,) = read_places(tmp_path, DEADLINE_S)
        with connect(place) as link:
            link.send_bytes(b"")
            assert link.poll(DEADLINE_S)
            assert parse_order(link.recv_bytes()).numbers == (0, 1)
    finally:
        rank.close()
