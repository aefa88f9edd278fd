"""The bus of a run that goes on, as its processes reach it."""

import click

from cosmos_core.bus import Bus

_CONNECT_S = 60.0


async def connect_to_run(url: str, namespace: str) -> Bus:
    """Reach a run's server, which may be about to be started again, as for any later call.

    That it is waited for is written to standard error, the log of the process.

    Raises:
        BusUnreachableError: if it does not answer for a minute, or refuses the password.
        BusRefusedError: if it has no such database.
    """
    return await Bus.connect(url, namespace, connect_s=_CONNECT_S, say=_say)


def _say(text: str) -> None:
    click.echo(text, err=True)
