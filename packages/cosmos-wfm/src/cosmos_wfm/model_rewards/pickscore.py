"""PickScore (arXiv 2305.01569): CLIP, trained on what people preferred of two pictures."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoTokenizer, CLIPModel

from cosmos_wfm.model_rewards.pictures import cropped, from_directory, middle_frames, normalised
from cosmos_wfm.reward_wire import RewardRequest

_USUAL_LOGIT = 26.0


class ClipScorer:
    """A CLIP of transformers, and the likeness of pictures and texts to it."""

    def __init__(self, directory: str, reward: str) -> None:
        """Load model and tokenizer.

        Raises:
            WfmConfigError: if they are not in the directory.
        """
        self.model = from_directory(CLIPModel, directory, reward)
        self._tokenizer = from_directory(AutoTokenizer, directory, reward)

    @property
    def picture_size(self) -> int:
        """Height and width that the model takes."""
        return self.model.config.vision_config.image_size

    @torch.no_grad()
    def likeness(
        self, pictures: Float[Tensor, "B 3 S S"], prompts: tuple[str, ...]
    ) -> Float[Tensor, " B"]:
        """Return the cosine of each picture and its prompt."""
        tokens = self._tokenizer(
            list(prompts), padding=True, truncation=True, max_length=77, return_tensors="pt"
        )
        seen = self.model(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            pixel_values=pictures,
        )
        return (seen.image_embeds * seen.text_embeds).sum(-1)


class PickScore:
    """Scores ``pickscore``: exp(logit_scale) · cosine / 26, about 0.7 to 0.9 for good pictures."""

    def __init__(self, directory: str) -> None:
        """Load the model from a directory, such as a copy of ``PickScore_v1``."""
        self._clip = ClipScorer(directory, "pickscore")

    @torch.no_grad()
    def __call__(self, request: RewardRequest) -> Mapping[str, list[float]]:
        """Return a score of each sample."""
        pictures = normalised(cropped(middle_frames(request), self._clip.picture_size))
        logits = self._clip.model.logit_scale.exp() * self._clip.likeness(pictures, request.prompts)
        return {"pickscore": (logits / _USUAL_LOGIT).tolist()}
