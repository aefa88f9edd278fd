"""Addresses of hosts as text: where one of IPv6 stands in brackets, and where it does not."""


def in_url(host: str) -> str:
    """Return a host as it stands in a URL or before a port: an address of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host
