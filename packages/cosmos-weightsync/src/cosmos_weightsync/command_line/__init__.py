"""``cosmos-weightsync``: plan, verify, push, pull and bench, for people and for scripts."""

from cosmos_weightsync.command_line.entry import main

__all__ = ["main"]
