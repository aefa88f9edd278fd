"""A tiny Qwen3-architecture causal LM with random weights and a character tokenizer, on disk.

The directory is an ordinary Hugging Face model: ``transformers`` and vLLM load it like any other.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cosmos_app.ranges import require_at_least

if TYPE_CHECKING:
    from transformers import Qwen3Config

BOS, EOS, PAD, UNKNOWN = "<bos>", "<eos>", "<pad>", "<unk>"
_WIDER = 4
"""How much wider than the model its feed-forward layers are."""
_MOST_PARAMETERS = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyModelConfig:
    """Sizes of the model that is built when ``model.path`` is not given.

    Attributes:
        hidden_size: width.
        num_layers: decoder layers.
        num_heads: attention heads; half as many key-value heads.
        head_dim: width of a head; vLLM's CPU attention wants a multiple of 32.
        max_position: longest sequence in tokens.
        tie_embeddings: share the embedding with the output layer.
    """

    hidden_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    head_dim: int = 32
    max_position: int = 256
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ValueError: if one is below 1, heads are an odd number or no multiple of 32 wide, or the
                model would not be tiny.
        """
        sizes = ("hidden_size", "num_layers", "num_heads", "head_dim", "max_position")
        require_at_least(self, dict.fromkeys(sizes, 1))
        if self.num_heads % 2 or self.head_dim % 32:
            raise ValueError(
                f"num_heads is {self.num_heads} and head_dim {self.head_dim}; "
                "want an even number of heads and a multiple of 32"
            )
        heads, hidden = 3 * self.num_heads * self.head_dim, self.hidden_size
        parameters = self.num_layers * hidden * (heads + 3 * _WIDER * hidden)
        if parameters > _MOST_PARAMETERS:
            raise ValueError(
                f"a model of these sizes has {parameters:.1e} parameters; at most "
                f"{_MOST_PARAMETERS:.0e} are built at random. Name a larger one by model.path"
            )


def build_tokenizer(directory: Path, texts: Iterable[str], max_position: int) -> int:
    """Write a tokenizer with one token per character seen in ``texts``; return its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # half of a character outside the first plane is none that a tokenizer takes
    whole = (text.encode("utf-8", "ignore").decode("utf-8") for text in texts)
    alphabet = sorted({character for text in whole for character in text})
    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, UNKNOWN, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        model_max_length=max_position,
    )
    fast.save_pretrained(directory)
    return len(vocabulary)


def architecture(config: TinyModelConfig, vocab_size: int) -> "Qwen3Config":
    """Return what transformers is told of a model of these sizes and so many tokens."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=_WIDER * config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads // 2,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position,
        tie_word_embeddings=config.tie_embeddings,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def build_tiny_model(
    directory: Path, texts: Iterable[str], config: TinyModelConfig, seed: int
) -> int:
    """Write tokenizer and model to ``directory``; return the number of parameters."""
    import torch
    from transformers import Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from cosmos_parallel import share_tensor_files

    disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = build_tokenizer(directory, texts, config.max_position)
    model_config = architecture(config, vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(model_config)
    model.save_pretrained(directory)
    share_tensor_files(directory)
    return sum(parameter.numel() for parameter in model.parameters())
