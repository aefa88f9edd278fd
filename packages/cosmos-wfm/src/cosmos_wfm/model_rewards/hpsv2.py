"""HPSv2 (arXiv 2306.09341): CLIP ViT-H, trained on rankings of people."""

from collections.abc import Mapping

from cosmos_wfm.model_rewards.pickscore import ClipScorer
from cosmos_wfm.model_rewards.pictures import middle_frames, normalised, padded
from cosmos_wfm.reward_wire import RewardRequest


class Hpsv2:
    """Scores ``hpsv2``: the cosine of picture and prompt; pictures are padded, not cropped."""

    def __init__(self, directory: str) -> None:
        """Load the model from a directory, in the format of transformers' ``CLIPModel``."""
        self._clip = ClipScorer(directory, "hpsv2")

    def __call__(self, request: RewardRequest) -> Mapping[str, list[float]]:
        """Return a score of each sample."""
        pictures = normalised(padded(middle_frames(request), self._clip.picture_size))
        return {"hpsv2": self._clip.likeness(pictures, request.prompts).tolist()}
