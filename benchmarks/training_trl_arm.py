"""TRL's SFT and GRPO trainers on the step of the training benchmark; prints one JSON line.

Runs in the baseline's environment and imports nothing of cosmos. Generation is left out: the GRPO
trainer is handed the step's samples through its ``rollout_func``.
"""

import argparse
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from training_data import Result, Sample, Sizes, read

LR = 1e-4


def _watch(ends: list[float], logs: list[dict[str, float]]) -> Any:
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ends.append(time.process_time())

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ends.append(time.process_time())

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            found.append(dict(logs))

    found = logs
    return Watch()


def _shared(sizes: Sizes, scratch: str, num_samples: int) -> dict[str, Any]:
    return {
        "output_dir": scratch,
        "max_steps": sizes.steps + 1,
        "per_device_train_batch_size": sizes.rows,
        "gradient_accumulation_steps": num_samples // sizes.rows,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "seed": 0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
    }


def _model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)


def sft(directory: Path, sizes: Sizes, samples: Sequence[Sample], watch: Any, scratch: str) -> None:
    """Train on prompt and response; only the response counts."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rows = [
        {
            "input_ids": [*s.prompt, *s.response],
            "labels": [*([-100] * len(s.prompt)), *s.response],
        }
        for s in samples
    ]
    config = SFTConfig(
        **_shared(sizes, scratch, len(samples)),
        max_length=None,
        packing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        loss_type="nll",
    )
    SFTTrainer(
        model=_model(directory),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(directory / "model"),
        callbacks=[watch],
    ).train()


def grpo(
    directory: Path, sizes: Sizes, samples: Sequence[Sample], watch: Any, scratch: str
) -> None:
    """Train on the step's samples as if they had just been generated."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    by_prompt: dict[str, list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(" ".join(map(str, sample.prompt)), []).append(sample)
    given: list[Sample] = []

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        left = {prompt: list(group) for prompt, group in by_prompt.items()}
        given[:] = [left[prompt].pop(0) for prompt in prompts]
        return {
            "prompt_ids": [s.prompt for s in given],
            "completion_ids": [s.response for s in given],
            "logprobs": [[0.0] * len(s.response) for s in given],
        }

    def reward(completions: list[str], **_: Any) -> list[float | None]:
        return [s.reward for s in given]

    config = GRPOConfig(
        **_shared(sizes, scratch, len(samples)),
        steps_per_generation=len(samples) // sizes.rows,
        num_generations=sizes.samples,
        max_completion_length=sizes.longest,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        scale_rewards="group",
        epsilon=0.2,
        num_iterations=1,
    )
    GRPOTrainer(
        model=_model(directory),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in by_prompt]),
        processing_class=AutoTokenizer.from_pretrained(directory / "model"),
        callbacks=[watch],
        rollout_func=rollout,
    ).train()


def main() -> None:
    """Run one arm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("arm", choices=("sft", "grpo"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(1)
    sizes, samples = read(options.directory)
    ends: list[float] = []
    logs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        arm = sft if options.arm == "sft" else grpo
        arm(options.directory, sizes, samples, _watch(ends, logs), scratch)
    first = next(log for log in logs if "grad_norm" in log)
    result = Result(
        cpu_s=tuple(b - a for a, b in pairwise(ends[1:])),
        loss=float(first["loss"]),
        grad_norm=float(first["grad_norm"]),
        tokens=sum(len(s.response) for s in samples),
    )
    print("RESULT " + json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
