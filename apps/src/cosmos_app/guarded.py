"""One place where errors that a user can act on become a message and an exit code."""

import asyncio
import sys
from collections.abc import Callable

import click

from cosmos_app.kept_modules import end_imports


def guarded(function: Callable[[], int]) -> None:
    """Run a command and exit; known errors become one message and a non-zero exit code.

    Called when the command has imported what it needs to begin.
    """
    end_imports()
    try:
        code = function()
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo("killed; --resume goes on from the newest checkpoint", err=True)
        sys.exit(130)
    except Exception as error:  # told apart here, as naming the classes imports every package
        from cosmos_app.errors import exit_code_of, expected_errors, said_of_files

        said = str(error) if isinstance(error, expected_errors()) else said_of_files(error)
        if not said:
            raise
        click.echo(click.style("error: ", fg="red", bold=True) + said, err=True)
        sys.exit(exit_code_of(error))
    sys.exit(code)
