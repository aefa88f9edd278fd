"""A reward that a trained model gives: one number for a prompt and its answer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cosmos_core.media import text_of
from cosmos_rollout.attention import attention_of
from cosmos_rollout.errors import UserCodeError
from cosmos_rollout.rewards.scoring import RewardFunction, RewardInput
from cosmos_rollout.vocabulary import has_words


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelReward:
    """The output of a sequence-classification model with one label, at the answer's end.

    The model reads the prompt as a tokenizer writes a text, the answer after it, and the
    end-of-sequence token; a conversation by the tokenizer's chat template, without its pictures
    and videos.
    Needs torch. Each worker of the pool loads a copy.

    Attributes:
        kind: selects this reward.
        path: a model directory that ``AutoModelForSequenceClassification`` loads.
        max_tokens: what is longer is cut at its beginning.
        name: its name in trajectories and reports.
        weight: its factor in the total.
    """

    kind: Literal["model"] = "model"
    path: Path
    max_tokens: int = 4096
    name: str = "model"
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be 1 or more")

    def build(self) -> RewardFunction:
        """Load the model and return the function.

        Raises:
            UserCodeError: if the directory holds no such model.
        """
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(self.path)
            model: Any = AutoModelForSequenceClassification.from_pretrained(
                self.path, attn_implementation=attention_of(self.path)
            ).eval()
        except (OSError, ValueError, KeyError) as error:
            raise UserCodeError(f"reward {self.name}: {self.path}: {error}") from error
        if not has_words(tokenizer):
            raise UserCodeError(f"reward {self.name}: {self.path} has no vocabulary of a tokenizer")
        if model.config.num_labels != 1:
            raise UserCodeError(
                f"reward {self.name}: {self.path} has {model.config.num_labels} labels; a reward "
                "is one number"
            )
        return lambda sample: self._score(model, tokenizer, sample)

    def _score(self, model: Any, tokenizer: Any, sample: RewardInput) -> float:
        import torch

        tokens = _tokens_of(sample, tokenizer)[-self.max_tokens :]
        with torch.inference_mode():
            return float(model(input_ids=torch.tensor([tokens])).logits[0, 0])


def _tokens_of(sample: RewardInput, tokenizer: Any) -> list[int]:
    if sample.messages:
        texts = [
            {**turn, "content": text_of(turn["content"])}
            if isinstance(turn.get("content"), list)
            else turn
            for turn in sample.messages
        ]
        return list(tokenizer.apply_chat_template(texts, return_dict=True)["input_ids"])
    prompt = list(tokenizer(sample.prompt)["input_ids"])
    answer = list(tokenizer(sample.response, add_special_tokens=False)["input_ids"])
    end = tokenizer.eos_token_id
    if end is None:
        return prompt + answer
    # one that the tokenizer adds, as in training; it may also be what the prompt's text ends with
    is_added = prompt[-1:] == [end] and tokenizer("a")["input_ids"][-1] == end
    return [*(prompt[:-1] if is_added else prompt), *answer, end]
