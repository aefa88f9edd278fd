"""An output head: the embedding that hidden states are projected by, and what logits are of that.

Some models multiply the products (Cohere, Granite) or bound them by a hyperbolic tangent (Gemma 2).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cosmos_algos.errors import AlgorithmConfigError, ShapeError


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitScaling:
    """logits = cap · tanh(multiplier · x / cap) of products x; without a cap, multiplier · x.

    Samplers divide by the temperature afterwards. Transformers and vLLM compute logits in the type
    of the projection, in this order of operations; what is rounded there is rounded here.

    Attributes:
        multiplier: what products are multiplied by; of a divisor, its inverse.
        cap: what logits stay below, either side of 0 (``final_logit_softcapping``); none by
            default.
        least: the narrowest type in which they are computed; that of the projection by default.
    """

    multiplier: float = 1.0
    cap: float | None = None
    least: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Refuse a cap that leaves nothing."""
        if self.cap is not None and not self.cap > 0.0:
            raise AlgorithmConfigError(
                f"logit cap is {self.cap}; logits are divided by it, so it must be above 0"
            )

    @property
    def changes_nothing(self) -> bool:
        """Whether logits are the products themselves."""
        return self.cap is None and self.multiplier == 1.0

    def of(self, products: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """Return logits of products."""
        logits = self._wide(products)
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def of_(self, products: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """Return the same, in the memory of the products if it is wide enough; not for autograd."""
        logits = self._wide(products)
        if self.multiplier != 1.0:
            logits.mul_(self.multiplier)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, products: Float[Tensor, "*S"]) -> Float[Tensor, "*S"] | float:
        """Return ∂ logits / ∂ products: multiplier · (1 - tanh²), in float32 or better."""
        if self.cap is None:
            return self.multiplier
        tanh = accurate(products).mul(self.multiplier / self.cap).tanh_()
        return tanh.square_().neg_().add_(1.0).mul_(self.multiplier)

    def _wide(self, products: Tensor) -> Tensor:
        if self.least is None:
            return products
        return products.to(torch.promote_types(products.dtype, self.least))


UNSCALED = LogitScaling()


@dataclass(frozen=True, slots=True)
class OutputHead:
    """What makes logits of hidden states.

    Attributes:
        weight: the output embedding.
        bias: what is added to the products, a number for each token; none by default.
        scaling: what logits are of the sums; they themselves by default.
    """

    weight: Float[Tensor, "V H"]
    bias: Float[Tensor, " V"] | None = None
    scaling: LogitScaling = UNSCALED

    def __post_init__(self) -> None:
        """Refuse a bias that would be stretched over the vocabulary."""
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ShapeError(
                f"log-probs: bias {tuple(self.bias.shape)} for an output embedding "
                f"{tuple(self.weight.shape)}; it must have a number for each token"
            )

    def logits(self, hidden: Float[Tensor, "*S H"]) -> Float[Tensor, "*S V"]:
        """Return the logits of hidden states, in float32 or better."""
        products = torch.nn.functional.linear(hidden, self.weight, self.bias)
        return accurate(self.scaling.of(products))


def output_head(
    weight: Float[Tensor, "V H"] | OutputHead, bias: Float[Tensor, " V"] | None
) -> OutputHead:
    """Return the head that a function was given, whole or by its parts.

    Raises:
        ShapeError: if there is a bias beside a whole one, or one of another size.
    """
    if not isinstance(weight, OutputHead):
        return OutputHead(weight, bias)
    if bias is not None:
        raise ShapeError("log-probs: bias beside an OutputHead; it must be the head's own")
    return weight


def accurate(values: Tensor) -> Tensor:
    """Return values in float32, or in float64 if they are."""
    return values if values.dtype == torch.float64 else values.float()
