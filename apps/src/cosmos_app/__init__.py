"""The packages joined into roles, a launcher and a command line."""

__all__: list[str] = []
