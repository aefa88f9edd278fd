"""ImageReward (arXiv 2304.05977): BLIP's text encoder looking at the picture, and a small head."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoTokenizer, BlipForImageTextRetrieval

from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.model_rewards.pictures import cropped, from_directory, middle_frames, normalised
from cosmos_wfm.reward_wire import RewardRequest

HEAD_FILE = "head.safetensors"
_MOST_TOKENS = 35
# Of the scores of its own training data, which it is standardised by.
_MEAN, _STD = 0.16717362830052426, 1.0333394966054072
_WIDTHS = (1024, 128, 64, 16, 1)


class ImageReward:
    """Scores ``image_reward``: about -2 to 2."""

    def __init__(self, directory: str) -> None:
        """Load the model.

        Args:
            directory: a ``BlipForImageTextRetrieval`` with its tokenizer, and ``head.safetensors``
                with weight and bias of the head's five linear layers as ``0.weight`` to ``4.bias``.

        Raises:
            WfmConfigError: if something of it is not there.
        """
        self._blip = from_directory(BlipForImageTextRetrieval, directory, "image_reward")
        self._tokenizer = from_directory(AutoTokenizer, directory, "image_reward")
        widths = (self._blip.config.text_config.hidden_size, *_WIDTHS)
        layers = (nn.Linear(one, other) for one, other in pairwise(widths))
        self._head = nn.Sequential(*layers).eval()
        try:
            self._head.load_state_dict(load_file(Path(directory) / HEAD_FILE))
        except (OSError, RuntimeError) as error:
            raise WfmConfigError(f"image_reward: {directory}/{HEAD_FILE}: {error}") from error

    @torch.no_grad()
    def __call__(self, request: RewardRequest) -> Mapping[str, list[float]]:
        """Return a score of each sample."""
        size = self._blip.config.vision_config.image_size
        pictures = normalised(cropped(middle_frames(request), size))
        tokens = self._tokenizer(
            list(request.prompts),
            padding="max_length",
            truncation=True,
            max_length=_MOST_TOKENS,
            return_tensors="pt",
        )
        seen = self._blip.vision_model(pixel_values=pictures).last_hidden_state
        read = self._blip.text_encoder(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:-1], dtype=torch.long),
        ).last_hidden_state
        scores = (self._head(read[:, 0]).squeeze(-1) - _MEAN) / _STD
        return {"image_reward": scores.tolist()}
