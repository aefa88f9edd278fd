"""The tensors of real models and how frameworks cut them, as layouts.

Only shapes: names follow the Hugging Face checkpoints, sizes their published configurations.

* Trainer: FSDP (rows) x TP x EP, optionally replicated (HSDP). Rank numbers run over replicas, then
  FSDP, and TP and EP vary fastest, as in a torch mesh.
* Engine: TP for attention and dense layers or replicas of them (data-parallel attention), experts
  whole on one rank (EP) or cut like the rest.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cosmos_weightsync.layout import Geometry, Layout, TensorEntry

REPLICATED, ROWS, COLUMNS = None, 0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A decoder, dense or mixture of experts.

    Attributes:
        layers: How many; the first ``dense_layers`` of them have a dense MLP.
        hidden: Width.
        heads: Attention heads; ``kv_heads`` of them for keys and values.
        experts: Routed experts in each sparse layer, 0 for a dense model.
        latent: Ranks of multi-head latent attention (query, key and value), empty without it.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    dense_layers: int = 0
    experts: int = 0
    expert_intermediate: int = 0
    shared_experts: int = 0
    latent: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: ``dim`` is how tensor parallelism cuts it, ``expert`` which expert it is of."""

    name: str
    shape: tuple[int, ...]
    dim: int | None
    expert: int | None = None


QWEN3_30B = Model(
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    intermediate=6144,
    vocab=151936,
    experts=128,
    expert_intermediate=768,
)
QWEN3_235B = Model(
    layers=94,
    hidden=4096,
    heads=64,
    kv_heads=4,
    head_dim=128,
    intermediate=12288,
    vocab=151936,
    experts=128,
    expert_intermediate=1536,
)
DEEPSEEK_V3 = Model(
    layers=61,
    hidden=7168,
    heads=128,
    kv_heads=128,
    head_dim=128,
    intermediate=18432,
    vocab=129280,
    dense_layers=3,
    experts=256,
    expert_intermediate=2048,
    shared_experts=1,
    latent=(1536, 512, 64),
)
KIMI_K2 = Model(
    layers=61,
    hidden=7168,
    heads=64,
    kv_heads=64,
    head_dim=128,
    intermediate=18432,
    vocab=163840,
    dense_layers=1,
    experts=384,
    expert_intermediate=2048,
    shared_experts=1,
    latent=(1536, 512, 64),
)
DENSE_640B = Model(
    layers=160,
    hidden=16384,
    heads=128,
    kv_heads=16,
    head_dim=128,
    intermediate=65536,
    vocab=152064,
)
QWEN25_72B = Model(
    layers=80,
    hidden=8192,
    heads=64,
    kv_heads=8,
    head_dim=128,
    intermediate=29568,
    vocab=152064,
)


def tensors(model: Model) -> Iterator[Tensor]:
    hidden = model.hidden
    yield Tensor("model.embed_tokens.weight", (model.vocab, hidden), ROWS)
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}."
        yield Tensor(prefix + "input_layernorm.weight", (hidden,), REPLICATED)
        yield from attention(model, prefix + "self_attn.")
        yield Tensor(prefix + "post_attention_layernorm.weight", (hidden,), REPLICATED)
        if model.experts and layer >= model.dense_layers:
            yield from mixture(model, prefix + "mlp.")
        else:
            yield from mlp(prefix + "mlp.", hidden, model.intermediate, None)
    yield Tensor("model.norm.weight", (hidden,), REPLICATED)
    yield Tensor("lm_head.weight", (model.vocab, hidden), ROWS)


def attention(model: Model, prefix: str) -> Iterator[Tensor]:
    hidden, heads, dim = model.hidden, model.heads, model.head_dim
    if model.latent:
        query, value, rope = model.latent
        yield Tensor(prefix + "q_a_proj.weight", (query, hidden), REPLICATED)
        yield Tensor(prefix + "q_a_layernorm.weight", (query,), REPLICATED)
        yield Tensor(prefix + "q_b_proj.weight", (heads * (dim + rope), query), ROWS)
        yield Tensor(prefix + "kv_a_proj_with_mqa.weight", (value + rope, hidden), REPLICATED)
        yield Tensor(prefix + "kv_a_layernorm.weight", (value,), REPLICATED)
        yield Tensor(prefix + "kv_b_proj.weight", (heads * 2 * dim, value), ROWS)
    else:
        yield Tensor(prefix + "q_proj.weight", (heads * dim, hidden), ROWS)
        yield Tensor(prefix + "k_proj.weight", (model.kv_heads * dim, hidden), ROWS)
        yield Tensor(prefix + "v_proj.weight", (model.kv_heads * dim, hidden), ROWS)
        yield Tensor(prefix + "q_norm.weight", (dim,), REPLICATED)
        yield Tensor(prefix + "k_norm.weight", (dim,), REPLICATED)
    yield Tensor(prefix + "o_proj.weight", (hidden, heads * dim), COLUMNS)


def mlp(prefix: str, hidden: int, width: int, expert: int | None) -> Iterator[Tensor]:
    yield Tensor(prefix + "gate_proj.weight", (width, hidden), ROWS, expert)
    yield Tensor(prefix + "up_proj.weight", (width, hidden), ROWS, expert)
    yield Tensor(prefix + "down_proj.weight", (hidden, width), COLUMNS, expert)


def mixture(model: Model, prefix: str) -> Iterator[Tensor]:
    hidden, width = model.hidden, model.expert_intermediate
    yield Tensor(prefix + "gate.weight", (model.experts, hidden), REPLICATED)
    if model.shared_experts:
        yield from mlp(prefix + "shared_experts.", hidden, width * model.shared_experts, None)
    for expert in range(model.experts):
        yield from mlp(f"{prefix}experts.{expert}.", hidden, width, expert)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How one side cuts a model: ``replicas`` x ``fsdp`` x ``tp`` ranks.

    Attributes:
        replicas: Whole copies of everything.
        fsdp: Row shards of every tensor (of each TP part); experts that EP places on some ranks
            only are cut over the FSDP ranks of those.
        tp: Tensor-parallel ranks.
        ep: Ranks over which whole experts are spread, 1 if they are cut like other tensors. On the
            engine's side it is ``tp``; on the trainer's, it divides ``fsdp * tp``.
        attention_replicas: Whether everything but experts is whole on every rank.
    """

    replicas: int = 1
    fsdp: int = 1
    tp: int = 1
    ep: int = 1
    attention_replicas: bool = False

    @property
    def ranks(self) -> int:
        return self.replicas * self.fsdp * self.tp


def layout(model: Model, cut: Cut, dtype: str) -> Layout:
    geometries: list[Geometry] = []
    index: dict[object, int] = {}
    entries: dict[str, TensorEntry] = {}
    for tensor in tensors(model):
        owner = None
        if tensor.expert is not None and cut.ep > 1:
            owner = tensor.expert * cut.ep // model.experts
        key = (tensor.shape, tensor.dim, owner)
        if key not in index:
            index[key] = len(geometries)
            geometries.append(geometry(tensor, cut, owner))
        entries[tensor.name] = TensorEntry(dtype, index[key])
    return Layout(cut.ranks, entries, tuple(geometries))


def geometry(tensor: Tensor, cut: Cut, owner: int | None) -> Geometry:
    """The boxes of all ranks at once, without a Python object for each."""
    shape = np.array(tensor.shape, dtype=np.int64)
    rank = np.arange(cut.ranks)
    if owner is None:
        parts = 1 if cut.attention_replicas or tensor.dim is None else cut.tp
        within, shards, shard = rank % cut.tp, cut.fsdp, rank // cut.tp % cut.fsdp
    else:
        parts, within = 1, np.zeros_like(rank)
        rank = rank[rank % cut.ep == owner]
        within, shards = within[: len(rank)], cut.fsdp * cut.tp // cut.ep
        shard = rank // cut.ep % shards
    starts, stops = np.zeros((len(rank), len(shape)), np.int64), np.tile(shape, (len(rank), 1))
    if parts > 1:
        extent = int(shape[tensor.dim])
        units = min(parts, max(1, extent // 128))  # More ranks than KV heads hold copies.
        part = within % parts * units // parts
        starts[:, tensor.dim] = extent * part // units
        stops[:, tensor.dim] = extent * (part + 1) // units
    if shards > 1:
        low, rows = starts[:, 0].copy(), stops[:, 0] - starts[:, 0]
        chunk = -(-rows // shards)  # As torch.chunk does: the last may be short or empty.
        starts[:, 0] = low + np.minimum(chunk * shard, rows)
        stops[:, 0] = low + np.minimum(chunk * (shard + 1), rows)
    kept = np.all(starts < stops, axis=1)
    return Geometry(tensor.shape, rank[kept], starts[kept], stops[kept])
