"""Publishes to a file system of 4 MiB until it is full, then with room again; tells what it saw.

Run by ``unshare -rm``, so that it may mount. Its argument is a directory to mount on.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch

from cosmos_weightsync import FileReceiver, FileSender, StorageFullError, shards_of

folder = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], check=True)
held = {"small": torch.ones(64, 8), "wide": torch.ones(512, 512)}  # A version has a mebibyte.
served = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
sender = FileSender(shards_of(held.items()), folder / "versions")
sender.publish(1)
receiver = FileReceiver(folder / "versions", wanted=shards_of(served.items()))
receiver.stage(1)
receiver.commit()
(folder / "ballast").write_bytes(bytes(5 << 19))  # Half a mebibyte is left.
for tensor in held.values():
    tensor.fill_(3.0)
told = ""
try:
    sender.publish(2)
except StorageFullError as error:
    told = str(error)
left = sorted(path.name for path in (folder / "versions").iterdir())
before = [receiver.version, receiver.stage().version, served["wide"].unique().tolist()]
(folder / "ballast").unlink()
sender.publish(3)
receiver.stage(3)
after = [receiver.commit(), served["wide"].unique().tolist()]
sys.stdout.write(json.dumps({"told": told, "left": left, "before": before, "after": after}))
