"""One place where errors that a user can act on become a message and an exit code."""

import asyncio
import sys
from collections.abc import Callable

import click

from cosmos_app.kept_modules import end_imports
from cosmos_app.stop_signals import INTERRUPTED, interrupt_again

KILLED_RUN = "killed; --resume goes on from the newest checkpoint"
"""What is said of a run that a Ctrl-C has killed."""


def guarded(function: Callable[[], int], *, killed: str = "") -> None:
    """Run a command and exit; known errors become one message and a non-zero exit code.

    Called when the command has imported what it needs to begin.

    Args:
        function: what the command does; returns the exit code.
        killed: what to say when a Ctrl-C has ended it; nothing, of one that leaves nothing behind.
    """
    end_imports()
    interrupt_again()
    try:
        code = function()
    except (KeyboardInterrupt, asyncio.CancelledError):
        if killed:
            click.echo(killed, err=True)
        sys.exit(INTERRUPTED)
    except Exception as error:  # told apart here, as naming the classes imports every package
        from cosmos_app.errors import exit_code_of, expected_errors, said_of_files

        said = str(error) if isinstance(error, expected_errors()) else said_of_files(error)
        if not said:
            raise
        click.echo(click.style("error: ", fg="red", bold=True) + said, err=True)
        sys.exit(exit_code_of(error))
    sys.exit(code)
