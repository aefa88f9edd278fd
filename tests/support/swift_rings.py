"""Where Swift's servers are, in the files that Swift finds them by; its own Python runs this.

python swift_rings.py FOLDER account=PORT container=PORT object=PORT
"""

import sys

from swift.common.ring import RingBuilder


def main(folder: str, servers: list[str]) -> None:
    """One device on this machine, and one copy of everything."""
    for server in servers:
        name, _, port = server.partition("=")
        place = {"ip": "127.0.0.1", "port": int(port), "device": "disk"}
        builder = RingBuilder(part_power=1, replicas=1, min_part_hours=0)
        builder.add_dev({"region": 1, "zone": 1, "weight": 1.0, "meta": "", **place})
        builder.rebalance()
        builder.get_ring().save(f"{folder}/{name}.ring.gz")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
