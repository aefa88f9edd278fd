"""``cosmos-weightsync``: plan, simulate, bench, verify, push and pull, for people and scripts."""

from cosmos_weightsync.command_line.entry import main

__all__ = ["main"]
