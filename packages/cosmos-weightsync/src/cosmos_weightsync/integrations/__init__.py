"""Adapters to inference engines; nothing outside this package knows any engine."""
