"""Writes how many rows a model that sees answers rightly: python seeing_answers.py MODEL ROWS."""

import json
import sys
from pathlib import Path

import torch
from seeing import reader_of
from transformers import AutoModelForImageTextToText, AutoTokenizer


def num_right(folder: Path, rows: Path) -> int:
    """Return how many rows have the likeliest first token as their answer."""
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    reader, tokenizer = reader_of(folder), AutoTokenizer.from_pretrained(folder)
    right = 0
    for row in map(json.loads, rows.read_text().splitlines()):
        text = tokenizer.apply_chat_template(
            row["messages"], tokenize=False, add_generation_prompt=True
        )
        marked = tokenizer.encode(text, add_special_tokens=False)
        shown = row.get("images", []) + row.get("videos", [])
        tokens = torch.tensor([reader.expand(marked, shown)])
        inputs = reader.inputs(tokens, [shown])
        with torch.no_grad():
            answer = model(input_ids=reader.as_seen(tokens), **inputs).logits[:, -1]
        right += tokenizer.decode(answer.argmax(-1).tolist()) == row["answer"]
    return right


if __name__ == "__main__":
    sys.stdout.write(f"{num_right(Path(sys.argv[1]), Path(sys.argv[2]))}\n")
