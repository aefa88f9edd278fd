"""What the dashboard says of each replica."""

from pathlib import Path

import pytest

from cosmos_app.dashboard.example import write_example_run
from cosmos_app.dashboard.feed import RunFeed
from cosmos_app.dashboard.prometheus import exposition
from cosmos_app.dashboard.view import replica_views
from cosmos_core.rundir import RunDirectory


async def test_each_says_what_its_last_new_weights_cost(tmp_path: Path) -> None:
    write_example_run(tmp_path / "run")
    feed = RunFeed(RunDirectory.open(tmp_path / "run"))
    await feed.look()
    replicas = {view.name: view for view in replica_views(feed)}
    policy, rollout = replicas["policy-0"], replicas["rollout-0"]
    assert (policy.publish_ms, policy.served_s) == (pytest.approx(4.0), None)
    assert (policy.num_skipped, rollout.num_skipped) == (3, 0)
    assert (rollout.publish_ms, rollout.served_s) == (None, 0.25)


async def test_prometheus_is_told_how_many_publications_were_skipped(tmp_path: Path) -> None:
    write_example_run(tmp_path / "run")
    feed = RunFeed(RunDirectory.open(tmp_path / "run"))
    await feed.look()
    said = exposition(feed, 0.0).decode().splitlines()
    assert 'cosmos_publications_skipped_total{replica="policy-0",role="policy"} 3.0' in said
