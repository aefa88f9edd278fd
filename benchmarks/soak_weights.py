"""The weights that a run of the soak ended with, and whether they are any that it has learnt."""

from pathlib import Path

from safetensors.torch import load_file

_MOVED = 1e-3


def weights_of(output: Path) -> dict[str, bytes]:
    """Return the weights that a run ended with."""
    files = sorted((output / "export/model").glob("*.safetensors"))
    return {file.name: file.read_bytes() for file in files}


def has_learnt(output: Path) -> bool:
    """Whether some weight moved by more than 1e-3: if none did, any two runs end with the same."""
    begun = load_file(output / "model/model.safetensors")
    ended = load_file(output / "export/model/model.safetensors")
    return any(float((ended[name] - begun[name]).abs().max()) > _MOVED for name in begun)
