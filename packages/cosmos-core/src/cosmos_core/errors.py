"""The root of the error tree of cosmos_core; each module declares its own leaves beside it."""


class CosmosError(Exception):
    """Parent of every error that cosmos_core raises by contract: catch it to catch them all."""
