"""Losses on given data from their papers' equations, in float64, one sample at a time.

Nothing here is of cosmos: rows are told apart character by character, samples are run alone and
without padding through transformers' own model, and autograd goes through plain sums.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

BETA = 0.5
TOP_K = 3
TEMPERATURE = 0.7

Sample = tuple[list[int], list[int]]  # token ids, and the places of those that are judged
Found = tuple[Tensor, dict[str, float]]  # a loss, and figures that are reported beside it


class Characters:
    """A token for each character, and what begins and ends texts."""

    def __init__(self, vocabulary: Mapping[str, int]) -> None:
        self._ids = vocabulary

    def answered(self, prompt: str, answer: str) -> Sample:
        """Return a prompt with an answer and its end, which are judged."""
        ids = [self._ids["<bos>"], *map(self._ids.__getitem__, prompt + answer)]
        ids.append(self._ids["<eos>"])
        return ids, list(range(1 + len(prompt), len(ids)))

    def talked(self, messages: Sequence[Mapping[str, str]]) -> Sample:
        """Return a conversation: a role's first letter, what is said, and an end for each turn."""
        ids: list[int] = []
        judged: list[int] = []
        for message in messages:
            ids.append(self._ids[message["role"][0]])
            begin = len(ids)
            ids += [*map(self._ids.__getitem__, message["content"]), self._ids["<eos>"]]
            if message["role"] == "assistant":
                judged += range(begin, len(ids))
        return ids, judged


def token_logits(model: nn.Module, sample: Sample) -> tuple[Tensor, Tensor]:
    """Return the logits [N, V] from which the judged tokens [N] come, and these."""
    ids = torch.tensor([sample[0]])
    logits = model(input_ids=ids, use_cache=False).logits
    places = torch.tensor(sample[1])
    return logits[0, places - 1], ids[0, places]


def token_logprobs(model: nn.Module, sample: Sample) -> Tensor:
    logits, targets = token_logits(model, sample)
    return torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]


def log_ratios(model: nn.Module, reference: nn.Module, sample: Sample) -> Tensor:
    with torch.no_grad():
        before = token_logprobs(reference, sample)
    return token_logprobs(model, sample) - before


def sft(model: nn.Module, rows: Sequence[Mapping[str, Any]], text: Characters) -> Found:
    """Return -log π averaged over the answers' tokens of all rows."""
    losses, right = [], []
    for row in rows:
        talk = row.get("messages")
        sample = text.talked(talk) if talk else text.answered(row["prompt"], row["response"])
        logits, targets = token_logits(model, sample)
        losses.append(-torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0])
        right += (logits.argmax(-1) == targets).tolist()
    whole = torch.cat(losses)
    return whole.mean(), {"accuracy": sum(right) / len(right), "trained_tokens": len(whole)}


def preferred(
    form: Callable[[Tensor, Tensor], Tensor],
    reduced: Callable[[Tensor], Tensor],
    models: tuple[nn.Module, nn.Module],
    rows: Sequence[Mapping[str, Any]],
    text: Characters,
) -> Found:
    """Return the mean over pairs of a loss of two samples' log-ratios."""
    pairs = [
        [reduced(log_ratios(*models, text.answered(row["prompt"], row[name]))) for name in BOTH]
        for row in rows
    ]
    losses = torch.stack([form(better, worse) for better, worse in pairs])
    return losses.mean(), pair_figures(pairs)


BOTH = ("chosen", "rejected")


def pair_figures(pairs: Sequence[Sequence[Tensor]]) -> dict[str, float]:
    gaps = [float(better.detach() - worse.detach()) for better, worse in pairs]
    return {
        "accuracy": sum(gap > 0 for gap in gaps) / len(gaps),
        "margin": sum(gaps) / len(gaps),
        **{
            name: sum(float(pair[place].detach()) for pair in pairs) / len(pairs)
            for place, name in enumerate(BOTH)
        },
    }


def dpo(better: Tensor, worse: Tensor, wrong: float = 0.1) -> Tensor:
    """arXiv 2305.18290, eq. 7, with labels that are wrong now and then."""
    odds = torch.sigmoid(BETA * (better - worse))
    return -(1 - wrong) * odds.log() - wrong * (1 - odds).log()


def ipo(better: Tensor, worse: Tensor) -> Tensor:
    """arXiv 2310.12036, eq. 17."""
    return (better - worse - 1 / (2 * BETA)) ** 2


def kto(
    models: tuple[nn.Module, nn.Module],
    rows: Sequence[Mapping[str, Any]],
    text: Characters,
    weights: tuple[float, float],
) -> Found:
    """arXiv 2402.01306, eq. 8: z of each prompt with the next answer to another prompt."""
    others = []
    for place, row in enumerate(rows):
        following = [*rows[place + 1 :], *rows[:place]]
        other = next((one for one in following if one["prompt"] != row["prompt"]), None)
        if other is not None:
            sample = text.answered(row["prompt"], other["response"])
            others.append(float(log_ratios(*models, sample).sum().detach()))
    baseline = max(0.0, sum(others) / len(others))
    losses, ratios = [], []
    for row in rows:
        ratio = log_ratios(*models, text.answered(row["prompt"], row["response"])).sum()
        ratios.append(float(ratio.detach()))
        value = BETA * (ratio - baseline)
        good, bad = weights
        losses.append(
            good * (1 - torch.sigmoid(value)) if row["label"] else bad * (1 - torch.sigmoid(-value))
        )
    return torch.stack(losses).mean(), {"log_ratio": sum(ratios) / len(ratios)}


def reward_model(
    model: nn.Module,
    head: Tensor,
    rows: Sequence[Mapping[str, Any]],
    text: Characters,
    centering: float,
) -> Found:
    """arXiv 2203.02155, eq. 1, at the last token, with rewards kept around 0."""
    pairs = []
    for row in rows:
        rewards = []
        for name in BOTH:
            ids = torch.tensor([text.answered(row["prompt"], row[name])[0]])
            out = model(input_ids=ids, output_hidden_states=True, use_cache=False)
            rewards.append(out.hidden_states[-1][0, -1] @ head[0])
        pairs.append(rewards)
    losses = [-torch.sigmoid(a - b).log() + centering * (a + b) ** 2 for a, b in pairs]
    figures = pair_figures(pairs)
    return torch.stack(losses).mean(), {name: figures[name] for name in ("accuracy", "margin")}


def distilled(
    models: tuple[nn.Module, nn.Module],
    rows: Sequence[Mapping[str, Any]],
    text: Characters,
    beta: float,
    *,
    top_k: int,
) -> Found:
    """arXiv 2306.13649, eq. 1, of all tokens or of the teacher's likeliest and all others as one.

    A tenth of the answers' likelihood is added.
    """
    losses, agreed = [], []
    for row in rows:
        sample = text.answered(row["prompt"], row["response"])
        logits, targets = token_logits(models[0], sample)
        with torch.no_grad():
            goals, _ = token_logits(models[1], sample)
        for mine, theirs, target in zip(logits, goals, targets, strict=True):
            ours, wanted = (torch.softmax(one / TEMPERATURE, -1) for one in (mine, theirs))
            agreed.append(bool(mine.argmax() == theirs.argmax()))
            if top_k:
                few = wanted.topk(top_k).indices
                ours, wanted = (torch.cat([p[few], 1 - p[few].sum()[None]]) for p in (ours, wanted))
            likelihood = torch.log_softmax(mine, -1)[target]
            losses.append(_divergence(wanted, ours, beta) - 0.1 * likelihood)
    return torch.stack(losses).mean(), {"agreement": sum(agreed) / len(agreed)}


def _divergence(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    if beta in (0.0, 1.0):
        one, other = (student, teacher) if beta else (teacher, student)
        return (one * (one / other).log()).sum()
    mixed = beta * teacher + (1 - beta) * student
    ahead = (teacher * (teacher / mixed).log()).sum()
    return beta * ahead + (1 - beta) * (student * (student / mixed).log()).sum()
