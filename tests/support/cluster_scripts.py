"""An sbatch script that bash really runs: the commands of the cluster are stand-ins."""

import os
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from cosmos_app.cli import main

_STAND_INS = {
    # as SLURM's: options are dropped, the rest runs once for each task
    "srun": """
all="$*"; tasks=1
while [[ "$1" == --* ]]; do
  case "$1" in --ntasks=*) tasks="${1#*=}";; esac; shift
done
if [[ "$1" == hostname ]]; then echo "10.0.0.1 "; exit; fi
if ((tasks == 1)); then SLURM_PROCID=0 exec "$@"; fi  # signals reach it
for ((i = 0; i < tasks; i++)); do SLURM_PROCID=$i "$@"; done
""",
    "scontrol": 'printf "node%s\\n" 0 1 2 3 4 5 6 7',
    "hostname": 'echo "10.0.0.9 "',
    # the run is over once the other 12 processes have been started
    "cosmos-app": """
echo "$COSMOS_HOST cosmos-app $*" >> calls
if [[ "$1" == run ]]; then
  for ((i = 0; i < 2000 && $(wc -l < calls) < 13; i++)); do sleep 0.1; done
fi
""",
    "python": 'echo "$COSMOS_HOST python $*" >> calls',
}
# what keeps replicas alive is the real one
_KEPT = f'if [[ "$2" == cosmos_app.kept ]]; then exec {sys.executable} "$@"; fi\n'


def rendered(launcher: str, *overrides: str) -> str:
    """Return what the recipe of this folder becomes for a cluster."""
    arguments = ["run", "recipe.toml", *overrides, "--launcher", launcher, "--dry-run"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def start_script(folder: Path, script: str, **changed: str) -> subprocess.Popen[str]:
    """Have bash really run it; the commands of the cluster are stand-ins that note what they do."""
    tools = folder / "tools"
    tools.mkdir()
    for name, text in {**_STAND_INS, **changed}.items():
        kept = _KEPT if name == "python" else ""
        (tools / name).write_text(f"#!/bin/bash\n{kept}{text}\n")
        (tools / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[0-7]",
    }
    return subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
