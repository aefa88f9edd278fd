"""Shows pictures and videos to models by a reader, and by transformers alone; writes both.

python video_numbers.py DIRECTORY; in it are videos (v), pictures (p), and a model of each family.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from seeing import FAMILIES, reader_of
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForImageTextToText, AutoProcessor
from turning import positions_of

from cosmos_algos import AggregationConfig, model_scores, sample_weights
from cosmos_app.step_share import BatchPlan, StepShare, batches_of_share
from cosmos_core.images import read_image
from cosmos_core.trajectory import UNSAMPLED, Trajectory, VersionSpan
from cosmos_core.videos import (
    VideoSampling,
    is_video,
    read_video,
    video_info,
    video_reference,
)
from cosmos_parallel import ParallelConfig, PictureError, build_mesh, load_causal_lm

PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


def rows_of(directory: Path) -> list[tuple[str, list[str]]]:
    """Return texts, and what is shown in each."""

    def video(source: object, **says: float) -> str:
        return video_reference(source, directory, VideoSampling().but(**says))

    red, green = (str(directory / "p" / f"{name}.png") for name in ("red-28x28", "green-56x56"))
    frames = ["p/blue-56x56.png", "p/red-56x56.png", "p/green-56x56.png"]
    plain = video("v/plain.mp4")
    return [
        ("only text", []),
        (f"a{PICTURE}b{PICTURE}", [red, green]),
        (f"{VIDEO}what?", [plain]),
        (f"a{VIDEO}b{PICTURE}c", [plain, green]),
        (f"{PICTURE}b{VIDEO}c{PICTURE}{VIDEO}d", [red, video("v/odd.mp4", fps=5), green, plain]),
        # three frames, a second and a third apart
        (f"{VIDEO}what?", [video(frames, fps=1)]),
        (f"{VIDEO}what?", [video(frames, fps=3)]),
        (f"{VIDEO}late", [video("v/plain.mp4", fps=8, max_frames=6, start=1.5, end=2.5)]),
        (f"{VIDEO}still", [video("v/still.mp4")]),
    ]


def theirs(processor: object, text: str, images: list[str]) -> dict[str, Tensor]:
    """Return what a model's own processor makes of a row."""
    videos = [each for each in images if is_video(each)]
    given = processor(
        text=[text],
        images=[read_image(each) for each in images if not is_video(each)] or None,
        videos=[read_video(each) for each in videos] or None,
        video_metadata=[video_info(each).metadata() for each in videos] or None,
        do_sample_frames=False,
        return_tensors="pt",
    )
    return dict(given)


def logits_of(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """Return what transformers' own model makes of a row, [T, V], at positions as in the papers."""
    kinds = given.pop("mm_token_type_ids")[0]
    positions = positions_of(kinds, given, model.config)[:, None]
    return model(**given, mm_token_type_ids=kinds[None], position_ids=positions).logits[0]


@torch.no_grad()
def compared(directory: Path, kind: str) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Return what the reader gives, and what it should: tokens, logits, and scores of a share."""
    folder = directory / kind
    processor, reader = AutoProcessor.from_pretrained(folder), reader_of(folder)
    model = load_causal_lm(folder, build_mesh(ParallelConfig()))
    original = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    rows = rows_of(directory)
    given = [theirs(processor, *row) for row in rows]
    logits = [logits_of(original, each) for each in given]
    encoded = [processor.tokenizer.encode(text) for text, _ in rows]
    expanded = [reader.expand(ids, shown) for ids, (_, shown) in zip(encoded, rows, strict=True)]
    tokens = [torch.tensor(ids) for ids in expanded]
    padded = pad_sequence(tokens, batch_first=True)
    valid = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True).bool()
    inputs = reader.inputs(padded, [shown for _, shown in rows])
    seen = reader.as_seen(padded)
    alone = model(input_ids=seen, use_cache=False, **inputs).logits
    packed = inputs | {
        "mm_token_type_ids": inputs["mm_token_type_ids"][valid][None],
        "position_ids": reader.positions(padded, inputs)[:, valid][:, None],
    }
    together = model(input_ids=seen[valid][None], use_cache=False, **packed).logits[0]
    lengths = [len(row) for row in tokens]
    samples = [sample(row, images) for row, (_, images) in zip(tokens, rows, strict=True)]
    last = [it.log_softmax(-1)[-2, row[-1]] for it, row in zip(logits, tokens, strict=True)]
    return {
        "shares": [
            (
                scores_of(
                    model, samples, BatchPlan(layout=layout, max_tokens=size, pictures=reader)
                ),
                torch.stack(last).sort().values,
            )
            for layout, size in (("padded", 150), ("packed", 150), ("packed", 2000))
        ],
        "tokens": [(mine, each["input_ids"][0]) for mine, each in zip(tokens, given, strict=True)],
        "padded": [(row[:n], it) for row, n, it in zip(alone, lengths, logits, strict=True)],
        "packed": list(zip(together.split(lengths), logits, strict=True)),
    }


def sample(token_ids: Tensor, images: list[str]) -> Trajectory:
    """Return a sample whose last token is trained."""
    length = len(token_ids)
    trained = np.arange(length) == length - 1
    return Trajectory(
        prompt_id="p",
        group="train.0.1",
        sibling=0,
        attempt=0,
        token_ids=token_ids.numpy().astype(np.int32),
        logprobs=np.where(trained, -4.0, 0.0).astype(np.float32),
        trainable=trained,
        versions=(VersionSpan(UNSAMPLED, length - 1), VersionSpan(2, 1)),
        rewards={},
        reward=0.0,
        finish_reason="stop",
        images=tuple(images),
    )


def scores_of(model: nn.Module, samples: list[Trajectory], plan: BatchPlan) -> Tensor:
    """Return the log-probabilities of what is trained, in ascending order."""
    share = StepShare(
        refs=(),
        advantages=torch.ones(len(samples), dtype=torch.float64),
        weights=sample_weights([1] * len(samples), list(range(len(samples))), AggregationConfig()),
    )
    batches = batches_of_share(share, samples, plan, policy_version=3)
    found = [model_scores(model, batch).logprobs[batch.trainable] for batch in batches]
    return torch.cat(found).sort().values


def refusals(directory: Path) -> dict[str, str]:
    """Return what is said of rows that are refused."""
    reader = reader_of(directory / "qwen3_vl")
    text, (plain, green) = rows_of(directory)[3]
    ids = AutoProcessor.from_pretrained(directory / "qwen3_vl").tokenizer.encode(text)
    later = rows_of(directory)[7][1][0]
    none = video_reference("v/none.mp4", directory, VideoSampling())
    tokens = torch.tensor([reader.expand(ids, [plain, green])])
    calls = {
        "order": lambda: reader.expand(ids, [green, plain], "line 3"),
        "kind": lambda: reader.expand(ids, [plain, plain], "line 3"),
        "none": lambda: reader.expand(ids, [none, green], "line 3"),
        "frames": lambda: reader.inputs(tokens, [[later, green]], ["line 3"]),
        "swapped": lambda: reader.inputs(tokens, [[green, plain]], ["line 3"]),
    }
    return {name: _said(call) for name, call in calls.items()}


def _said(call: object) -> str:
    try:
        call()
    except PictureError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    found = {kind: compared(where, kind) for kind in FAMILIES}
    torch.save(found | {"refusals": refusals(where)}, where / "found.pt")
