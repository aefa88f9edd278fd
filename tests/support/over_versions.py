"""What tokens should have for log-probs whose weights changed in between, by transformers alone."""

from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache

from cosmos_core.trajectory import VersionSpan
from cosmos_rollout import KvPolicy


@torch.no_grad()
def logits_over_versions(
    model_of: Callable[[int], torch.nn.Module],
    kv: KvPolicy,
    token_ids: Sequence[int],
    spans: Sequence[VersionSpan],
) -> torch.Tensor:
    """Return what each sampled token was drawn from, [n, V], for the n tokens of the spans.

    Args:
        model_of: The model of a version.
        kv: "keep": each version goes on with keys and values of those before it; "recompute": it
            computes all of them anew.
        token_ids: Of prompt and response, which ends with the tokens of the spans.
        spans: Versions of the sampled tokens, in order.
    """
    ids = torch.tensor([list(token_ids)])
    position = len(token_ids) - sum(span.length for span in spans)
    cache, rows, done = DynamicCache(), [], 0
    for span in spans:
        model = model_of(span.version)
        last = position + span.length - 1  # token i was sampled from the output at position i - 1
        if kv == "recompute":
            rows.append(model(ids[:, :last]).logits[0, position - 1 :])
        else:
            logits = model(ids[:, done:last], past_key_values=cache).logits
            rows.append(logits[0, -span.length :])
            done = last
        position += span.length
    return torch.cat(rows)
