"""Depth 0 and bound 0 are synchronous GRPO: the same weights as a loop written by hand.

The loop here shares nothing with the system but the model directory, the order of prompts and
the sampler of the reference engine; loss, advantages and optimizer are plain torch.
"""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from real_runs import SMALL, Runner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cosmos_core.messages import GroupId
from cosmos_rollout import (
    EngineSetup,
    GenerationRequest,
    PromptSet,
    Sampling,
    StagedWeights,
    TransformersConfig,
    prompt_tokens,
    read_prompts,
    sample_seed,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS, GROUPS, SAMPLES, LR = 5, 8, 16, 1e-3


class LoopWeights:
    """Hands the loop's own weights to the sampler."""

    version = 0
    tensors: dict[str, torch.Tensor]

    def stage(self, version: int, endpoints: object) -> StagedWeights:
        del endpoints
        self.version = version
        return self


async def hand_written_loop(model_dir: Path, data: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    prompts = PromptSet(read_prompts(data), seed=0)
    weights = LoopWeights()
    engine = await TransformersConfig().build(
        EngineSetup(model_path=model_dir, weight_source=weights)
    )
    for step in range(STEPS):
        requests, answers = [], {}
        for ordinal in range(step * GROUPS, (step + 1) * GROUPS):
            row = prompts.row(ordinal)
            for sibling in range(SAMPLES):
                name = f"{ordinal}.{sibling}"
                answers[name] = (row.answer, prompt_tokens(row, tokenizer))
                seed = sample_seed(0, GroupId("train", 0, ordinal), sibling)
                sampling = Sampling(
                    max_new_tokens=5, seed=seed, stop_token_ids=(tokenizer.eos_token_id,)
                )
                requests.append(
                    GenerationRequest(
                        request_id=name, prompt_token_ids=answers[name][1], sampling=sampling
                    )
                )
        samples = {s.request_id: s async for s in engine.generate(requests)}
        rewards = torch.tensor(
            [
                float(
                    tokenizer.decode(samples[r.request_id].token_ids, skip_special_tokens=True)
                    == answers[r.request_id][0]
                )
                for r in requests
            ],
            dtype=torch.float64,
        ).view(GROUPS, SAMPLES)
        centred = rewards - rewards.mean(1, keepdim=True)
        advantages = (centred / (rewards.std(1, keepdim=True) + 1e-6)).flatten().float()
        loss = torch.zeros(())
        for request, advantage in zip(requests, advantages, strict=True):
            prompt = list(request.prompt_token_ids)
            response = samples[request.request_id].token_ids.tolist()
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            logprobs = torch.log_softmax(logits, -1)[range(len(response)), response]
            loss = loss - (advantage * (logprobs - logprobs.detach()).exp()).mean()
        optimizer.zero_grad()
        (loss / len(requests)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        weights.tensors = {k: v.detach().clone() for k, v in model.state_dict().items()}
        await engine.load_version(step + 1, ())
    await engine.aclose()
    return weights.tensors


def test_depth_zero_and_bound_zero_equal_a_hand_written_synchronous_loop(runner: Runner) -> None:
    reward = "reward.rewards=[{kind='exact'}]"
    run = runner.complete(
        *SMALL,
        "staleness.depth=0",
        "staleness.bound=0",
        f"trainer.steps={STEPS}",
        f"learner.optimizer.lr={LR}",
        f"trainer.samples_per_group={SAMPLES}",
        "learner.optimizer.schedule.num_warmup_steps=0",
        "data.arithmetic.max_first=3",
        "data.arithmetic.max_second=1",
        "data.arithmetic.held_out=2",
        reward,
    )
    rewards = [record["values"]["reward"] for record in run.metrics("controller")]
    assert any(rewards), json.dumps(rewards) + " no sample was ever right: nothing was trained"
    torch.set_num_threads(1)
    expected = asyncio.run(
        hand_written_loop(run.output / "model", run.output / "data" / "train.jsonl")
    )
    actual = load_file(run.output / "export" / "model" / "model.safetensors")
    start = load_file(run.output / "model" / "model.safetensors")
    moved = max(float((actual[name] - start[name]).abs().max()) for name in actual)
    assert moved > 1e-3
    for name, tensor in actual.items():
        # 1e-6, and as much again: AVX-512 sums rows side by side otherwise than one alone
        torch.testing.assert_close(tensor, expected[name], atol=2e-6, rtol=0)
