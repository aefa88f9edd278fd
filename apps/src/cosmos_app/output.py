"""What commands print for programs rather than people."""

import json
import sys


def print_json(value: object) -> None:
    """Write one JSON document to standard output; what JSON cannot say becomes text."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")
