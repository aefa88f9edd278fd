"""VideoAlign (arXiv 2501.13918): Qwen2-VL that marks looks, motion and alignment of videos."""

from collections.abc import Mapping

from torch import nn
from transformers import Qwen2VLForConditionalGeneration

from cosmos_wfm.model_rewards.qwen import TokenRewards, hidden_width, read_settings, samples_of
from cosmos_wfm.reward_wire import RewardRequest

TOKENS: Mapping[str, str] = {
    "vq_reward": "<|VQ_reward|>",
    "mq_reward": "<|MQ_reward|>",
    "ta_reward": "<|TA_reward|>",
}
_INSTRUCTION = (
    "Rate this video made for the text: {prompt}\n"
    f"How it looks: {TOKENS['vq_reward']}\nHow it moves: {TOKENS['mq_reward']}\n"
    f"How well it shows the text: {TOKENS['ta_reward']}"
)


class VideoAlign:
    """Scores ``vq_reward``, ``mq_reward``, ``ta_reward`` and their sum ``overall_reward``."""

    def __init__(self, directory: str) -> None:
        """Load the model.

        Args:
            directory: a ``Qwen2VLForConditionalGeneration``, its tokenizer with the three tokens,
                ``head.safetensors`` (``weight`` [1, width]), and ``reward.json`` with the
                instruction it was trained with, ``means`` and ``deviations`` of the scores.
        """
        head = nn.Linear(hidden_width(directory), 1, bias=False)
        self._rewards = TokenRewards(
            Qwen2VLForConditionalGeneration, directory, "video_align", head
        )
        self._settings = read_settings(directory, _INSTRUCTION)

    def __call__(self, request: RewardRequest) -> Mapping[str, list[float]]:
        """Return the scores of each sample."""
        scores: dict[str, list[float]] = {name: [] for name in (*TOKENS, "overall_reward")}
        for frames, prompt in samples_of(request):
            question = self._settings.instruction.replace("{prompt}", prompt)
            found = self._rewards.scores(frames, question, tuple(TOKENS.values()))
            marks = {
                name: (float(value) - self._settings.means.get(name, 0.0))
                / self._settings.deviations.get(name, 1.0)
                for name, value in zip(TOKENS, found, strict=True)
            }
            for name, mark in (marks | {"overall_reward": sum(marks.values())}).items():
                scores[name].append(mark)
        return scores
