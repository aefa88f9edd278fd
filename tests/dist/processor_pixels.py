"""Compares a reader of pictures with the model's own processor, where torchvision is there.

python processor_pixels.py MODEL TEXT OUT PICTURE...; TEXT shows the pictures.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoProcessor

from cosmos_core.images import read_image
from cosmos_parallel import PictureReader


def main(model: Path, text: str, out: Path, pictures: list[str]) -> None:
    processor = AutoProcessor.from_pretrained(model)
    theirs = processor(
        text=[text], images=[read_image(picture) for picture in pictures], return_tensors="pt"
    )
    reader = PictureReader.of(model)
    assert reader is not None
    token_ids = reader.expand(processor.tokenizer.encode(text), pictures)
    mine = reader.inputs(torch.tensor([token_ids]), [pictures])
    mine["input_ids"] = torch.tensor([token_ids])
    kind = type(processor.image_processor).__name__
    torch.save({"theirs": dict(theirs), "mine": mine, "kind": kind}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
