"""Stands in for SGLang where it is not installed; see `launch_server`."""
