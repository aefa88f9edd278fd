"""Reads supervised rows with videos, lays them out, and compares losses; writes what it found.

python video_rows.py DIRECTORY; DIRECTORY/model is the model, videos and pictures are in v and p.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import datasets
import torch
from seeing import reader_of
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)
from turning import positions_of
from video_tasks import reports

from cosmos_core.images import read_image
from cosmos_core.videos import VideoSampling, is_video, read_video, video_info
from cosmos_parallel import (
    ParallelConfig,
    PictureReader,
    SftBatchConfig,
    SftDataError,
    SftExample,
    SftFormat,
    build_mesh,
    lay_out,
    load_causal_lm,
    load_sft_data,
    sft_loss,
)

PLAIN, GREEN = "v/plain.mp4", "p/green-56x56.png"
FRAMES = ["p/blue-56x56.png", "p/red-56x56.png", "p/green-56x56.png"]
ASK, ANSWER = {"type": "text", "text": "what?"}, {"role": "assistant", "content": "it moves"}


def said(*parts: dict) -> dict:
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


VIDEO = {"type": "video"}
ROWS = [
    said(VIDEO | {"video": PLAIN, "fps": 1}, ASK),
    said(ASK, VIDEO, {"type": "image", "image": GREEN}) | {"clips": [PLAIN]},
    {"prompt": "what?", "response": "noise", "clips": PLAIN, "images": GREEN},
    said(VIDEO | {"video": FRAMES, "sample_fps": 3.0}, ASK),
    {"prompt": "what?", "response": "nothing"},
]
WRONG = {
    "none": {"prompt": "a", "response": "b", "clips": ["v/none.mp4"]},
    "text": {"prompt": "a", "response": "b", "clips": [str(Path(__file__))]},
    "fps": said(VIDEO | {"video": PLAIN, "fps": 0}),
    "marks": {"prompt": "<|video_pad|>", "response": "b", "clips": PLAIN},
}
FORMAT = SftFormat(videos="clips", video_sampling=VideoSampling(max_frames=4))


class Rows:
    """Reads rows of one model."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory / "model")
        self.reader: PictureReader | None = reader_of(directory / "model")

    def load(self, path: Path, rows: SftFormat = FORMAT) -> tuple[SftExample, ...]:
        return load_sft_data(path, self.tokenizer, rows, self.reader).examples

    def loaded(self, *rows: dict) -> tuple[SftExample, ...]:
        path = self.directory / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return self.load(path)

    def spelt(self, example: SftExample) -> tuple[str, str]:
        """Return the text of an example, and what of it is trained on."""
        trained = example.token_ids[example.trainable]
        return self.tokenizer.decode(example.token_ids), self.tokenizer.decode(trained)


def losses(rows: Rows, examples: tuple[SftExample, ...]) -> dict[str, float]:
    """Return the summed loss of each layout, and of each row by itself in transformers."""
    folder, reader = rows.directory / "model", rows.reader
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model = load_causal_lm(folder, build_mesh(ParallelConfig()))
    alone = sum(_alone(theirs, rows, example) for example in examples)
    configs = {
        "padded": SftBatchConfig(),
        "several": SftBatchConfig(max_tokens=100, bucket=1),
        "packed": SftBatchConfig(layout="packed"),
    }
    found = {
        name: sum(
            float(sft_loss(model, batch).total.detach())
            for batch in lay_out(examples, config, reader=reader)
        )
        for name, config in configs.items()
    }
    return found | {"alone": alone}


def _alone(model: torch.nn.Module, rows: Rows, example: SftExample) -> float:
    """Return the loss of a row with the kinds of input that the model has for videos."""
    processor = AutoProcessor.from_pretrained(rows.directory / "model")
    shown: dict = {}
    if pictures := [read_image(each) for each in example.images if not is_video(each)]:
        shown |= dict(processor.image_processor(pictures, return_tensors="pt"))
    videos = [each for each in example.images if is_video(each)]
    if videos:
        metadata = [video_info(each).metadata() for each in videos]
        given, _ = processor._process_videos(
            [read_video(each) for each in videos],
            video_metadata=metadata,
            do_sample_frames=False,
            return_tensors="pt",
            return_metadata=True,
        )
        given.pop("video_metadata")
        shown |= {name: torch.as_tensor(value) for name, value in given.items()}
    ids = torch.tensor(example.token_ids)[None].long()
    kinds = torch.tensor(processor.create_mm_token_type_ids(ids.tolist()))
    positions = positions_of(kinds[0], shown, model.config)[:, None]
    given = {"input_ids": ids, "mm_token_type_ids": kinds, "position_ids": positions}
    logits = model(**given, **shown).logits
    each = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    return float(each[torch.tensor(example.trainable)[1:]].sum().detach())


def saved(rows: Rows) -> list[SftExample]:
    """Return a row with a video inside, of a saved data set and of its Parquet file."""
    features = datasets.Features(
        prompt=datasets.Value("string"),
        response=datasets.Value("string"),
        videos=datasets.List(datasets.Video()),
    )
    held = {"bytes": (rows.directory / PLAIN).read_bytes(), "path": None}
    row = {"prompt": "what?", "response": "noise", "videos": [held]}
    data = datasets.Dataset.from_list([row], features=features)
    data.save_to_disk(str(rows.directory / "saved"))
    data.to_parquet(str(rows.directory / "rows.parquet"))
    paths = (rows.directory / "saved", rows.directory / "rows.parquet")
    return [example for path in paths for example in rows.load(path, SftFormat())]


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except SftDataError as error:
        return str(error)
    return ""


def main(directory: Path) -> None:
    rows = Rows(directory)
    examples = rows.loaded(*ROWS)
    gone = directory / "v" / "gone.mp4"
    gone.write_bytes((directory / PLAIN).read_bytes())
    (vanished,) = rows.loaded(ROWS[4] | {"clips": ["v/gone.mp4"]})
    gone.unlink()
    errors = {name: refused(lambda row=row: rows.loaded(row)) for name, row in WRONG.items()}
    errors["gone"] = refused(lambda: lay_out([vanished], SftBatchConfig(), reader=rows.reader))
    found = {
        "spelt": [rows.spelt(example) for example in examples],
        "frames": [
            [len(read_video(each)) for each in example.images if is_video(each)]
            for example in examples
        ],
        "losses": losses(rows, examples),
        "saved": [rows.spelt(example)[0] for example in saved(rows)],
        "errors": errors,
        "tasks": reports(directory),
    }
    (directory / "rows_found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
