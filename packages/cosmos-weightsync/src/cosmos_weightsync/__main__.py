"""``python -m cosmos_weightsync`` is ``cosmos-weightsync``."""

from cosmos_weightsync.command_line import main

if __name__ == "__main__":
    main(prog_name="cosmos-weightsync")
