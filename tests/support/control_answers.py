"""What rollout replicas answer, as a controller hears it."""

from cosmos_core.messages import Generate, GroupFinished, SampleRef


def answered(name: str, order: Generate, version: int, *, reward: float = 0.0) -> GroupFinished:
    """Return the answer to an order, all of whose tokens are of one version."""
    samples = tuple(
        SampleRef(
            sibling=sibling,
            status="completed",
            key=f"{order.group}/{order.attempt}/{sibling}",
            num_tokens=1,
            reward=reward,
            oldest_version=version,
            newest_version=version,
        )
        for sibling in range(order.num_samples)
    )
    return GroupFinished(replica=name, group=order.group, attempt=order.attempt, samples=samples)
