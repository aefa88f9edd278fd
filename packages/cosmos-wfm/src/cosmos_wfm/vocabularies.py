"""Whether a tokenizer's directory has a vocabulary, which transformers does without.

Where the files are missing, as after a download that was cut short, transformers 5 makes a
tokenizer that knows its special tokens only: all words of a prompt are the same unknown token.
"""

from pathlib import Path

_WHOLE = {"tokenizer.json", "vocab.txt"}
_HALVES = {"merges.txt", "vocab.json"}
_SENTENCE_PIECE = ".model"


def has_vocabulary(directory: Path) -> bool:
    """Return whether a directory has a vocabulary of the tokenizers that world models have."""
    if not directory.is_dir():
        return False
    names = {path.name for path in directory.iterdir()}
    pieces = any(name.endswith(_SENTENCE_PIECE) for name in names)
    return bool(names & _WHOLE) or names >= _HALVES or pieces
