"""Settings of a server under which a run is lost, or fails late, and what mends them.

Most servers that are managed for their users evict keys unless told otherwise, and all keys of a
run have a time to live, so that ``volatile-lru`` takes them too.
"""

from collections.abc import Mapping
from typing import Any

from redis import exceptions

OLDEST = (6, 2)
"""Version of the first Redis that has all that is asked of one; what Valkey says fits."""


async def server_facts(client: Any) -> dict[str, Any]:
    """Return what a server tells of itself: nothing where its users are not allowed to ask."""
    facts: dict[str, Any] = {}
    try:
        facts |= await client.info()
        if facts.get("cluster_enabled"):
            facts |= await client.execute_command("CLUSTER INFO")
    except exceptions.ResponseError:  # an access list, a renamed command
        return facts
    return facts


def problems_of(facts: Mapping[str, Any]) -> list[str]:
    """Return why no run may begin on a server, and what mends it; what it does not tell is right.

    Args:
        facts: fields of INFO, and of CLUSTER INFO in a cluster.
    """
    problems = [_too_old(facts), _a_replica(facts), _a_cluster(facts), _evicting(facts)]
    return [problem for problem in problems if problem]


def warnings_of(facts: Mapping[str, Any]) -> list[str]:
    """Return what a run can do with that somebody should know.

    Args:
        facts: fields of INFO.
    """
    if str(facts.get("aof_enabled", 1)) != "0":
        return []
    return [
        "it logs nothing to disk (appendonly is no): should it restart, the run ends, and --resume "
        "goes on from its newest checkpoint; CONFIG SET appendonly yes has runs survive that"
    ]


def _too_old(facts: Mapping[str, Any]) -> str:
    found = str(facts.get("redis_version", ""))
    numbers = [int(part) for part in found.split(".") if part.isdecimal()]
    if not numbers or tuple([*numbers, 0][:2]) >= OLDEST:
        return ""
    return (
        f"its version is {found}, and runs want Redis {OLDEST[0]}.{OLDEST[1]} or Valkey: update it"
    )


def _a_replica(facts: Mapping[str, Any]) -> str:
    if facts.get("role", "master") == "master":
        return ""
    primary = f"{facts.get('master_host', '?')}:{facts.get('master_port', '?')}"
    return f"it is a replica of {primary}, which takes no writes or loses them: give that one's URL"


def _a_cluster(facts: Mapping[str, Any]) -> str:
    if not facts.get("cluster_enabled") or "cluster_size" not in facts:
        return ""
    size, state = int(facts["cluster_size"]), facts.get("cluster_state", "ok")
    if size > 1:
        return (
            f"it is one of {size} primaries of a cluster, which has a run's keys or not as chance "
            "has it: give a server that is no cluster, or the only primary of one"
        )
    if state != "ok":
        return f"it is of a cluster in the state {state!r}, which refuses keys: see CLUSTER INFO"
    return ""


def _evicting(facts: Mapping[str, Any]) -> str:
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy == "noeviction" or not int(facts.get("maxmemory", 0)):
        return ""
    limit_mib = int(facts["maxmemory"]) / 2**20
    return (
        f"its maxmemory-policy is {policy!r}, so that it drops keys of a run once it holds "
        f"{limit_mib:,.1f} MiB: CONFIG SET maxmemory-policy noeviction (a managed service has it "
        "among its parameters)"
    )
