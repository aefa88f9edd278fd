"""HPSv3 (arXiv 2508.03789): Qwen2-VL with a head for mean and spread of people's liking."""

from collections.abc import Mapping

from torch import nn
from transformers import Qwen2VLForConditionalGeneration

from cosmos_wfm.model_rewards.qwen import TokenRewards, hidden_width, read_settings, samples_of
from cosmos_wfm.reward_wire import RewardRequest

TOKEN = "<|Reward|>"
_INSTRUCTION = (
    "Rate this picture by how good it looks and how well it shows what was asked for.\n"
    f"What was asked for: {{prompt}}\nThe rating is: {TOKEN}"
)


class Hpsv3:
    """Scores ``hpsv3`` (the mean) and ``hpsv3_log_deviation`` (of the model about it)."""

    def __init__(self, directory: str) -> None:
        """Load the model.

        Args:
            directory: a ``Qwen2VLForConditionalGeneration``, its tokenizer with ``<|Reward|>``,
                ``head.safetensors`` (``0``, ``3`` and ``5``: width to 1024, 16 and 2), and
                ``reward.json`` with the instruction it was trained with.
        """
        head = nn.Sequential(
            nn.Linear(hidden_width(directory), 1024),
            nn.ReLU(),
            nn.Dropout(0.05),
            nn.Linear(1024, 16),
            nn.ReLU(),
            nn.Linear(16, 2),
        )
        self._rewards = TokenRewards(Qwen2VLForConditionalGeneration, directory, "hpsv3", head)
        self._settings = read_settings(directory, _INSTRUCTION)

    def __call__(self, request: RewardRequest) -> Mapping[str, list[float]]:
        """Return both scores of each sample, of a video by its middle frame."""
        means: list[float] = []
        deviations: list[float] = []
        for frames, prompt in samples_of(request):
            middle = frames[len(frames) // 2][None]
            question = self._settings.instruction.replace("{prompt}", prompt)
            mean, deviation = self._rewards.scores(middle, question, (TOKEN,))[0].tolist()
            means.append(mean)
            deviations.append(deviation)
        return {"hpsv3": means, "hpsv3_log_deviation": deviations}
