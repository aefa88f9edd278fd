"""How engines and trainers really lay tensors out, each case moved and compared with the whole.

Every case gives the shards of two sides in checkpoint coordinates; the plan between them is
carried out by copying, and what arrives must be the slices that the engine's own rule asks for.
"""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from cosmos_weightsync import (
    Box,
    Layout,
    LayoutError,
    Shard,
    ShardSpec,
    block_scale_box,
    converted_shards,
    placed_shard,
    plan_transfer,
    shards_of,
)
from cosmos_weightsync.chunks import HeldBoxes


def whole(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def part(name: str, tensor: Tensor, box: Box) -> Shard:
    """A copy of a box, as a rank would hold it."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    view = tensor[box.relative_to(Box.full(tensor.shape))].clone()
    return Shard(ShardSpec(name, tuple(tensor.shape), box, dtype), view)


def rows(name: str, tensor: Tensor, num_ranks: int) -> list[list[Shard]]:
    """FSDP: rank i holds chunk i of the rows, the last may hold less or nothing."""
    step = -(-tensor.shape[0] // num_ranks)
    edges = [min(i * step, tensor.shape[0]) for i in range(num_ranks + 1)]
    full = Box.full(tensor.shape)
    return [
        [part(name, tensor, Box((low, *full.start[1:]), (high, *full.stop[1:])))]
        for low, high in pairwise(edges)
    ]


def move(senders: Sequence[Sequence[Shard]], receivers: Sequence[Sequence[Shard]]) -> int:
    """Carry the plan out; returns how many bytes moved."""
    sides = [
        Layout.from_ranks([[shard.spec for shard in rank] for rank in side])
        for side in (senders, receivers)
    ]
    held = [
        [HeldBoxes((s.spec.name, s.spec.box, s.tensor) for s in rank) for rank in side]
        for side in (senders, receivers)
    ]
    pieces = plan_transfer(*sides).pieces()
    for piece in pieces:
        source = held[0][piece.source].view(piece.name, piece.box)
        held[1][piece.receiver].view(piece.name, piece.box).copy_(source)
    return sum(piece.num_bytes for piece in pieces)


def test_fused_qkv_and_gate_up_are_views_of_one_weight():
    q, k, v = whole(1, 8, 6), whole(2, 4, 6), whole(3, 4, 6)
    gate, up = whole(4, 10, 6), whole(5, 10, 6)
    named = {"q": q, "k": k, "v": v, "gate": gate, "up": up}
    senders = [
        list(ranks) for ranks in zip(*(rows(n, t, 3) for n, t in named.items()), strict=True)
    ]
    senders = [[shard for shards in rank for shard in shards] for rank in senders]
    fused_qkv, fused_up = torch.zeros(2, 8, 6), torch.zeros(2, 10, 6)  # of TP ranks 0 and 1
    receivers = []
    for rank in range(2):
        qkv, gate_up = fused_qkv[rank], fused_up[rank]
        receivers.append(
            [
                placed_shard("q", (8, 6), qkv[0:4], (4 * rank, 0)),
                placed_shard("k", (4, 6), qkv[4:6], (2 * rank, 0)),
                placed_shard("v", (4, 6), qkv[6:8], (2 * rank, 0)),
                placed_shard("gate", (10, 6), gate_up[0:5], (5 * rank, 0)),
                placed_shard("up", (10, 6), gate_up[5:10], (5 * rank, 0)),
            ]
        )
    assert move(senders, receivers) == sum(t.numel() * 4 for t in named.values())
    for rank in range(2):
        expected = [t.chunk(2)[rank] for t in (q, k, v)]
        assert torch.equal(fused_qkv[rank], torch.cat(expected))
        assert torch.equal(fused_up[rank], torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]))


def test_experts_kept_as_one_3d_tensor_meet_experts_kept_one_by_one():
    gate, up, down = whole(1, 4, 6, 8), whole(2, 4, 6, 8), whole(3, 4, 8, 6)

    def one_by_one(held):
        return {
            f"experts.{i}.{name}": held[name][i]
            for name in ("gate", "up", "down")
            for i in range(4)
        }

    stacked = [("gate", gate.clone()), ("up", up.clone()), ("down", down.clone())]
    sender = converted_shards(stacked, one_by_one)
    w13, w2 = torch.zeros(2, 2, 12, 8), torch.zeros(2, 2, 8, 6)  # EP 2: [rank][local expert]

    def fused(rank: int):
        def convert(held):
            out = {}
            for local in range(2):
                name = f"experts.{2 * rank + local}"
                out[f"{name}.gate"] = held["w13"][local, :6]
                out[f"{name}.up"] = held["w13"][local, 6:]
                out[f"{name}.down"] = held["w2"][local]
            return out

        return convert

    receivers = [
        converted_shards({"w13": w13[rank], "w2": w2[rank]}, fused(rank)) for rank in range(2)
    ]
    moved = move([sender], receivers)
    assert moved == 4 * (gate.numel() + up.numel() + down.numel())  # Each expert to one rank.
    assert torch.equal(w13.flatten(0, 1), torch.cat([gate, up], dim=1))
    assert torch.equal(w2.flatten(0, 1), down)


def test_a_3d_expert_tensor_is_cut_by_experts_and_by_columns():
    experts = whole(1, 4, 6, 8)
    senders = rows("w", experts, 4)
    boxes = [
        Box((2 * ep, 0, 4 * tp), (2 * ep + 2, 6, 4 * tp + 4)) for ep in (0, 1) for tp in (0, 1)
    ]
    receivers = [[part("w", torch.zeros(4, 6, 8), box)] for box in boxes]
    move(senders, receivers)
    for (shard,), box in zip(receivers, boxes, strict=True):
        assert torch.equal(shard.tensor, experts[box.relative_to(Box.full((4, 6, 8)))])


def test_more_ranks_than_kv_heads_hold_copies():
    k = whole(1, 2 * 4, 6)  # 2 heads of 4 rows over 8 ranks: 4 ranks each
    receivers = [
        [placed_shard("k", (8, 6), torch.zeros(4, 6), (4 * (rank // 4), 0))] for rank in range(8)
    ]
    assert move(rows("k", k, 3), receivers) == 4 * k.numel() * 4
    for rank, (shard,) in enumerate(receivers):
        assert torch.equal(shard.tensor, k.chunk(2)[rank // 4])


def test_padding_of_the_vocabulary_is_neither_sent_nor_touched():
    embed = whole(1, 10, 3)  # padded to 16 over 4 ranks: 4, 4, 2 and no rows
    local = torch.full((4, 4, 3), -7.0)
    receivers = [[placed_shard("embed", (10, 3), local[r], (4 * r, 0))] for r in range(4)]
    assert move(rows("embed", embed, 3), receivers) == embed.numel() * 4
    assert torch.equal(local.flatten(0, 1)[:10], embed)
    assert (local.flatten(0, 1)[10:] == -7).all()
    assert receivers[3][0].spec.box.is_empty


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(6, 4)
        self.lm_head = nn.Linear(4, 6, bias=False)
        self.lm_head.weight = self.embed_tokens.weight


def test_tied_embeddings_travel_once_and_reach_both_uses():
    trained, served = Tied(), Tied()
    bytes_moved = move([shards_of(trained)], [shards_of(served)])
    assert bytes_moved == 6 * 4 * 4
    assert torch.equal(served.lm_head.weight, trained.embed_tokens.weight)


def test_an_untied_engine_takes_both_names_from_a_tied_trainer():
    trained = Tied()
    embed, head = torch.zeros(6, 4), torch.zeros(6, 4)
    wanted = shards_of([("embed_tokens.weight", embed), ("lm_head.weight", head)])
    move([shards_of(trained, tied="each")], [wanted])
    assert torch.equal(embed, trained.embed_tokens.weight)
    assert torch.equal(head, trained.embed_tokens.weight)


def test_latent_attention_is_fused_over_its_inputs_and_cut_by_heads():
    q_a, kv_a, kv_b = whole(1, 6, 8), whole(2, 5, 8), whole(3, 4 * 7, 3)  # 4 heads
    named = {"q_a_proj": q_a, "kv_a_proj_with_mqa": kv_a, "kv_b_proj": kv_b}
    senders = [shards_of([(name, tensor.clone())]) for name, tensor in named.items()]  # PP
    fused, kv_b_local = torch.zeros(2, 11, 8), torch.zeros(2, 14, 3)

    def convert(held):
        return {"q_a_proj": held["fused"][:6], "kv_a_proj_with_mqa": held["fused"][6:]}

    receivers = [
        [
            *converted_shards([("fused", fused[rank])], convert),  # Copies on all ranks.
            placed_shard("kv_b_proj", (28, 3), kv_b_local[rank], (14 * rank, 0)),
        ]
        for rank in range(2)
    ]
    move(senders, receivers)
    for rank in range(2):
        assert torch.equal(fused[rank], torch.cat([q_a, kv_a]))
        assert torch.equal(kv_b_local[rank], kv_b.chunk(2)[rank])


def test_scales_of_fp8_blocks_follow_their_weight():
    weight = whole(1, 300, 256).to(torch.float8_e4m3fn)  # 3 by 2 blocks, the last row is short
    scales = whole(2, 3, 2)
    block = (128, 128)
    senders, receivers = [], []
    for low, high in ((0, 150), (150, 300)):  # Cuts the second row of blocks.
        box = Box((low, 0), (high, 256))
        scale_box = block_scale_box(box, block)
        senders.append([part("w", weight.view(torch.uint8), box), part("s", scales, scale_box)])
    assert [rank[1].spec.box for rank in senders] == [Box((0, 0), (2, 2)), Box((1, 0), (3, 2))]
    for low, high in ((0, 128), (128, 256)):
        box = Box((0, low), (300, high))
        empty = torch.zeros_like(weight).view(torch.uint8)
        scale_box = block_scale_box(box, block)
        receivers.append([part("w", empty, box), part("s", torch.zeros(3, 2), scale_box)])
    move(senders, receivers)
    for rank, (w, s) in enumerate(receivers):
        assert torch.equal(w.tensor, weight.view(torch.uint8).chunk(2, 1)[rank])
        assert torch.equal(s.tensor, scales[:, rank : rank + 1])


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        (Box((0, 0), (128, 256)), Box((0, 0), (1, 2))),
        (Box((127, 0), (129, 1)), Box((0, 0), (2, 1))),  # both blocks of the cut
        (Box((256, 128), (256, 256)), Box((2, 1), (2, 1))),  # nothing needs no scale
    ],
    ids=str,
)
def test_boxes_of_scales(box, expected):
    assert block_scale_box(box, (128, 128)) == expected


def test_interleaved_shards_are_several_boxes():
    fused = whole(1, 12, 4)  # gate and up, each cut in two: rank 0 holds rows 0:3 and 6:9
    held = [
        [part("gate_up", fused, Box((low, 0), (low + 3, 4))) for low in (3 * rank, 6 + 3 * rank)]
        for rank in range(2)
    ]
    target = torch.zeros(12, 4)
    move(held, [shards_of([("gate_up", target)])])
    assert torch.equal(target, fused)


def test_a_rank_may_hold_nothing_at_all():
    weight = whole(1, 3, 4)
    senders = rows("w", weight, 5)  # 1, 1, 1, 0, 0
    target = torch.zeros(3, 4)
    move(senders, [shards_of([("w", target)]), []])
    assert torch.equal(target, weight)


# Converters, against what they do to the tensor itself.


def rotary(held):
    """Llama's: the two halves of every head instead of pairs."""
    return {"hf": held["w"].view(3, 4, 2, 5).transpose(1, 2).reshape(24, 5).clone()}


CONVERTERS = {
    "renamed": ((6, 4), lambda held: {"hf": held["w"]}),
    "transposed": ((6, 4), lambda held: {"hf": held["w"].t()}),
    "cut": ((6, 4), lambda held: {"a": held["w"][:2], "b": held["w"][2:].t().contiguous()}),
    "rotary": ((24, 5), rotary),
    "flattened": ((3, 4, 5), lambda held: {"hf": held["w"].reshape(12, 5)}),
    "unflattened": ((12, 5), lambda held: {"hf": held["w"].view(3, 4, 5)}),
    "experts": ((3, 4, 5), lambda held: {f"e{i}": held["w"][i].t() for i in range(3)}),
    "interleaved": ((8, 3), lambda held: {"gate": held["w"][::2], "up": held["w"][1::2]}),
    "copied twice": ((4, 6), lambda held: {"hf": held["w"].t().clone().t()[1:].contiguous()}),
    "joined": ((6, 4), lambda held: {"x": torch.cat([held["w"][4:].t(), held["w"].t()], dim=-1)}),
    "squeezed": ((4, 1, 6), lambda held: {"hf": held["w"].squeeze(1), "x": held["w"][:, None]}),
}


@pytest.mark.parametrize("cut", ["whole", "rows", "columns", "blocks"])
@pytest.mark.parametrize("case", CONVERTERS)
def test_converted_shards_are_views_of_the_live_shards(case, cut):
    shape, convert = CONVERTERS[case]
    weight = whole(1, *shape)
    full = Box.full(shape)
    halves = {
        "whole": [full],
        "rows": list(full.split(-(-full.numel // 3))),
        "columns": [
            Box(full.start, (*shape[:-1], 2)),
            Box((*full.start[:-1], 2), full.stop),
        ],
        "blocks": [
            b for a in full.split(-(-full.numel // 2)) for b in a.split(max(1, a.numel // 3))
        ],
    }[cut]
    expected = convert({"w": weight})
    target = {name: torch.full_like(tensor, float("nan")) for name, tensor in expected.items()}
    for box in halves:
        held = part("w", weight, box)
        for shard in _converted(held, convert):
            region = shard.spec.box.relative_to(Box.full(target[shard.spec.name].shape))
            assert target[shard.spec.name][region].isnan().all()  # Nothing twice.
            target[shard.spec.name][region] = shard.tensor
            assert shard.tensor.numel() == 0 or (
                shard.tensor.untyped_storage().data_ptr()
                == held.tensor.untyped_storage().data_ptr()
            )
    for name, tensor in expected.items():
        assert torch.equal(target[name], tensor)


def _converted(held: Shard, convert) -> list[Shard]:
    from cosmos_weightsync.conversion import trace

    return [
        view
        for origin in trace({"w": (held.spec.global_shape, held.tensor.dtype)}, convert)
        for view in origin.views_of(held)
    ]


@pytest.mark.parametrize(
    ("convert", "complaint"),
    [
        (lambda held: {"x": held["w"] * 2}, "x: the converter computes it"),
        (lambda held: {"x": torch.maximum(held["w"], held["w"])}, "makes it of several"),
        (lambda held: {"x": torch.cat([held["w"], held["w"]])[1:]}, "makes it of several"),
        (lambda held: {"x": torch.cat([held["w"], held["w"]]).view(4, 12)}, "makes it of several"),
        (lambda held: {"x": held["w"].bfloat16()}, "x: the converter computes it|casts it"),
        (lambda held: {"x": held["w"].reshape(-1).view(3, 2, 4).transpose(0, 2)[0].sum()}, "x: "),
        (lambda held: {"x": 3}, "x: the converter made a int of it"),
    ],
    ids=["scaled", "larger", "joined and cut", "joined and viewed", "cast", "summed", "number"],
)
def test_a_converter_that_computes_is_refused_by_tensor(convert, complaint):
    with pytest.raises(LayoutError, match=complaint):
        converted_shards([("w", torch.zeros(6, 4))], convert)


def test_the_stages_of_one_rank_are_described_together():
    stages = [nn.ModuleDict({"0": nn.Linear(2, 2)}), nn.ModuleDict({"2": nn.Linear(2, 2)})]
    names = [shard.spec.name for shard in shards_of(stages)]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
