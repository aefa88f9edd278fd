"""The group of commands."""

import click

from cosmos_weightsync.command_line.benching import bench
from cosmos_weightsync.command_line.copying import pull, push, verify
from cosmos_weightsync.command_line.output import examples
from cosmos_weightsync.command_line.planning import plan
from cosmos_weightsync.command_line.simulating import simulate_command

__all__ = ["main"]


@click.group(
    epilog=examples(
        "cosmos-weightsync push ./model                      serve a checkpoint to other machines",
        "cosmos-weightsync pull 10.0.0.5:4321 ./model        fetch it there; run again to resume",
        "cosmos-weightsync verify ./model ./copy             are they the same, bit for bit",
        "cosmos-weightsync plan ./model --senders fsdp=8 --receivers tp=2,replicas=4",
        "cosmos-weightsync simulate 140GB --senders fsdp=8 --receivers tp=8,replicas=16",
        "cosmos-weightsync bench                             how fast is each transport here",
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="cosmos-weightsync")
def main() -> None:
    """Move the weights of a model between any two sharded layouts."""


for _command in (plan, simulate_command, push, pull, verify, bench):
    main.add_command(_command)
