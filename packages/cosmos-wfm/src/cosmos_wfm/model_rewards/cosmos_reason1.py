"""Cosmos-Reason1 as a reward: Qwen2.5-VL that says whether a video obeys physics."""

from collections.abc import Mapping

import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from cosmos_wfm.model_rewards.qwen import QwenVision, read_settings, samples_of
from cosmos_wfm.reward_wire import RewardRequest

_INSTRUCTION = (
    "Does what happens in this video obey the laws of physics, and was it made for "
    "'{prompt}'? Answer yes or no."
)


class CosmosReason1:
    """Scores ``yes_logit``, ``no_logit``, ``no_score`` and ``prediction``.

    ``no_score`` is the probability of "no" against "yes", ``prediction`` that of "yes".
    """

    def __init__(self, directory: str, *, yes: str = "yes", no: str = "no") -> None:
        """Load the model.

        Args:
            directory: a ``Qwen2_5_VLForConditionalGeneration`` and its tokenizer; a ``reward.json``
                may say the instruction.
            yes: the answer that is good; its first token counts.
            no: the answer that is bad.
        """
        self._qwen = QwenVision(Qwen2_5_VLForConditionalGeneration, directory, "cosmos_reason1")
        self._settings = read_settings(directory, _INSTRUCTION)
        tokenizer = self._qwen.tokenizer
        self._answers = [tokenizer(t, add_special_tokens=False)["input_ids"][0] for t in (yes, no)]

    @torch.no_grad()
    def __call__(self, request: RewardRequest) -> Mapping[str, list[float]]:
        """Return the scores of each sample."""
        logits = torch.stack([self._logits(*sample) for sample in samples_of(request)])
        chances = logits.softmax(-1)
        return {
            "prediction": chances[:, 0].tolist(),
            "no_score": chances[:, 1].tolist(),
            "yes_logit": logits[:, 0].tolist(),
            "no_logit": logits[:, 1].tolist(),
        }

    def _logits(self, frames: torch.Tensor, prompt: str) -> torch.Tensor:
        question = self._settings.instruction.replace("{prompt}", prompt)
        inputs = self._qwen.asked(frames, question)
        return self._qwen.model(**inputs).logits[0, -1, self._answers].float()
