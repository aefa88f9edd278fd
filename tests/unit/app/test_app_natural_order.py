"""Names of replicas as people count."""

from cosmos_app.natural_order import by_number


def test_the_tenth_comes_after_the_second():
    names = ["rollout-10", "rollout-2", "policy-1", "rollout-0", "7", "rollout", "node-2-10"]
    ordered = ["7", "node-2-10", "policy-1", "rollout", "rollout-0", "rollout-2", "rollout-10"]
    assert sorted(names, key=by_number) == ordered
