"""How much of a model changes in a step, and what is sent of it: `python benchmarks/delta.py`.

A Qwen3 of 12 million parameters is trained by AdamW (float32, weight decay 0.01) and published in
bfloat16 by two sharded senders after every step; a receiver that reuses what it has fetches each
version over TCP, and is compared with the trainer bit for bit. `SFT` learns to count; `policy
gradient` weighs the log-probabilities of random tokens by random advantages, as GRPO would.
Speeds are CPU seconds of one core, compression included, on the versions of the SFT run at 1e-6.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from cosmos_weightsync import (
    Box,
    ReceiverConfig,
    SenderConfig,
    Shard,
    ShardSpec,
    WeightReceiver,
    WeightSender,
)
from cosmos_weightsync.encodings.changed_edges import FrameSizes
from cosmos_weightsync.encodings.changes import ChangeDecoder, ChangeEncoder, Dense, Sparse

VOCABULARY = 4096
CHUNK_BYTES = FrameSizes.of(ReceiverConfig().bucket_bytes).chunk


def build(width: int, num_layers: int) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config).float()


def sft_loss(model: nn.Module, generator: torch.Generator) -> Tensor:
    starts = torch.randint(0, VOCABULARY, (4, 1), generator=generator)
    tokens = (starts + torch.arange(64)) % VOCABULARY
    return model(input_ids=tokens, labels=tokens).loss


def policy_gradient_loss(model: nn.Module, generator: torch.Generator) -> Tensor:
    tokens = torch.randint(0, VOCABULARY, (4, 64), generator=generator)
    advantages = torch.randn(4, generator=generator)
    logprobs = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    taken = logprobs.gather(-1, tokens[:, 1:, None])[..., 0]
    return -(advantages[:, None] * taken).mean()


def halves(model: nn.Module, rank: int) -> Iterator[Shard]:
    """Rank 0 or 1 of two: rows of the parameters, as FSDP cuts them."""
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        cut = -(-shape[0] // 2)
        rows = (0, cut) if rank == 0 else (cut, shape[0])
        box = Box((rows[0], *(0 for _ in shape[1:])), (rows[1], *shape[1:]))
        yield Shard(ShardSpec(name, shape, box, "float32"), parameter.detach()[rows[0] : rows[1]])


def in_bfloat16(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().bfloat16() for name, p in model.named_parameters()}


@dataclass(frozen=True, slots=True)
class Step:
    """One version: share of values that changed, bytes on the wire and of the model."""

    changed: float
    wire_bytes: int
    num_bytes: int
    versions: tuple[dict[str, Tensor], dict[str, Tensor]]


def steps(
    model: nn.Module,
    loss_of: Callable[[nn.Module, torch.Generator], Tensor],
    rate: float,
    num_steps: int,
) -> Iterator[Step]:
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    with ExitStack() as stack:
        config = SenderConfig(wire_dtype="bfloat16")
        senders = [
            stack.enter_context(
                WeightSender(halves(model, rank), rank=rank, num_ranks=2, config=config)
            )
            for rank in range(2)
        ]
        receiver = stack.enter_context(
            WeightReceiver(
                [sender.endpoint for sender in senders],
                config=ReceiverConfig(transport="tcp", reuse="changes"),
            )
        )
        before = in_bfloat16(model)
        for version in range(num_steps + 1):
            for sender in senders:
                sender.publish(version)
            staged = receiver.stage(version)
            now = in_bfloat16(model)
            for shard in receiver.staged_shards():
                assert torch.equal(shard.tensor.view(torch.int16), bits(now[shard.spec.name]))
            if version:
                differ = sum(int((bits(now[k]) != bits(before[k])).sum()) for k in now)
                share = differ / sum(tensor.numel() for tensor in now.values())
                yield Step(share, staged.wire_bytes, staged.num_bytes, (before, now))
            before = now
            optimizer.zero_grad()
            loss_of(model, generator).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            optimizer.step()


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16)


def speeds(before: dict[str, Tensor], now: dict[str, Tensor]) -> tuple[float, float]:
    """GB of model per CPU second that are compared and encoded, and decoded and applied."""
    new = torch.cat([bits(now[k]).flatten() for k in now]).numpy().view(np.uint8)
    base = torch.cat([bits(before[k]).flatten() for k in now]).numpy().view(np.uint8)
    parts = range(0, len(new), CHUNK_BYTES)
    encoded, decoded = [], []
    for _ in range(5):
        encoder, decoder, target = ChangeEncoder(), ChangeDecoder(), base.copy()
        started = time.process_time()
        records = [
            encoder.encode(new[i : i + CHUNK_BYTES], base[i : i + CHUNK_BYTES], 2) for i in parts
        ]
        encoded.append(time.process_time() - started)
        streams = [np.frombuffer(b"".join(bytes(p) for p in r), np.uint8) for r in records]
        started = time.process_time()
        for first, stream in zip(parts, streams, strict=True):
            chunk = target[first : first + CHUNK_BYTES]
            change, _ = decoder.decode(stream, 0, len(chunk) // 2, 2)
            if isinstance(change, Sparse):
                chunk.view(np.uint16)[change.positions] = change.values.view(np.uint16)
            elif isinstance(change, Dense):
                chunk[:] = change.content
        decoded.append(time.process_time() - started)
        assert np.array_equal(target, new)
    return len(new) / min(encoded) / 1e9, len(new) / min(decoded) / 1e9


def row(name: str, rate: float, found: Sequence[Step]) -> str:
    shares = sorted(step.changed for step in found)
    wires = sorted(step.wire_bytes / step.num_bytes for step in found)
    middle = len(found) // 2
    return (
        f"| {name} | {rate:.0e} | {found[0].num_bytes / 1e6:.1f} | {100 * shares[middle]:.2f} "
        f"({100 * shares[0]:.2f} to {100 * shares[-1]:.2f}) | "
        f"{wires[middle] * found[0].num_bytes / 1e6:.2f} | {100 * wires[middle]:.2f} | "
        f"{1 / wires[middle]:.0f}x |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[str] = []
    spoken = ""
    arms = [
        ("SFT", sft_loss, 1e-6),
        ("policy gradient", policy_gradient_loss, 1e-6),
        ("SFT", sft_loss, 1e-5),
    ]
    for name, loss_of, rate in arms:
        model = build(options.width, options.layers)
        found = list(steps(model, loss_of, rate, options.steps))
        rows.append(row(name, rate, found))
        if not spoken:
            encode, decode = speeds(*found[-1].versions)
            spoken = f"| {encode:.2f} | {decode:.2f} |"
    print("| loss | rate | dense, MB | values changed, % | sent, MB | sent, % | dense / sent |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    print("\n| compared and encoded, GB/s | decoded and applied, GB/s |\n|---|---|")
    print(spoken)


if __name__ == "__main__":
    main()
