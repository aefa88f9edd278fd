"""TRL's GRPO trainer on the benchmark's workload, in a process of its own.

Runs in the baseline's environment and imports nothing of cosmos. It prints one JSON document: for
each step the time, CPU seconds and mean reward, and the held-out accuracy of snapshots that are
taken in memory during training and evaluated after it, outside of both clocks.
"""

import argparse
import json
import logging
import resource
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class TrlSettings:
    """What the baseline is given; the first block is the recipe that both systems share.

    Attributes:
        steps: optimizer steps.
        prompts: prompts in a step.
        samples: samples of each prompt.
        lr: of AdamW.
        beta2: of AdamW.
        ramp_steps: of the learning rate's linear warm-up.
        max_grad_norm: gradients are clipped to this.
        max_new_tokens: longest response.
        seed: of data order and sampling.
        threads: torch threads.
        micro_batch: samples in a forward and backward pass.
        cache: of generation; ``dynamic`` or ``static``.
        continuous: use transformers' continuous batching instead of ``generate``.
        snapshot_every: steps between snapshots for held-out accuracy.
    """

    steps: int = 120
    prompts: int = 64
    samples: int = 8
    lr: float = 4e-4
    beta2: float = 0.95
    ramp_steps: int = 5
    max_grad_norm: float = 1.0
    max_new_tokens: int = 5
    seed: int = 0
    threads: int = 1
    micro_batch: int = 512
    cache: str = "dynamic"
    continuous: bool = False
    snapshot_every: int = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class TrlStep:
    """One optimizer step as it was measured.

    Attributes:
        step: from 0.
        seconds: since training began.
        cpu_s: user and system seconds of the process since training began.
        reward: mean over the samples of the step.
    """

    step: int
    seconds: float
    cpu_s: float
    reward: float


@dataclass(kw_only=True, slots=True)
class Recorder:
    """What the callback and the reward function gather.

    Attributes:
        steps: measured so far.
        snapshots: (step, weights) on the host.
        reward: of the step in hand.
        started_s: wall clock at the start of training.
        started_cpu_s: CPU seconds at the start of training.
    """

    steps: list[TrlStep] = field(default_factory=list)
    snapshots: list[tuple[int, dict[str, torch.Tensor]]] = field(default_factory=list)
    reward: float = 0.0
    started_s: float = 0.0
    started_cpu_s: float = 0.0

    def start(self) -> None:
        self.started_s, self.started_cpu_s = time.monotonic(), time.process_time()

    def end_step(self) -> None:
        self.steps.append(
            TrlStep(
                step=len(self.steps),
                seconds=time.monotonic() - self.started_s,
                cpu_s=time.process_time() - self.started_cpu_s,
                reward=self.reward,
            )
        )

    def take_snapshot(self, model: nn.Module) -> None:
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        self.snapshots.append((len(self.steps), weights))


def _config(settings: TrlSettings, scratch: Path) -> Any:
    from trl import GRPOConfig

    per_step = settings.prompts * settings.samples
    return GRPOConfig(
        output_dir=str(scratch),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=per_step // settings.micro_batch,
        steps_per_generation=per_step // settings.micro_batch,
        num_generations=settings.samples,
        max_completion_length=settings.max_new_tokens,
        learning_rate=settings.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=settings.ramp_steps,
        adam_beta2=settings.beta2,
        weight_decay=0.0,
        max_grad_norm=settings.max_grad_norm,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        scale_rewards="group",
        epsilon=0.2,
        num_iterations=1,
        seed=settings.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        cache_implementation=None if settings.cache == "dynamic" else settings.cache,
        use_transformers_continuous_batching=settings.continuous,
        logging_steps=50,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )


def _trainer(settings: TrlSettings, workload: Path, recorder: Recorder, scratch: Path) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            recorder.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            recorder.end_step()
            print(recorder.steps[-1], flush=True)
            if state.global_step % settings.snapshot_every == 0:
                recorder.take_snapshot(kwargs["model"])

    def exact(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
        rewards = [float(c == a) for c, a in zip(completions, answer, strict=True)]
        recorder.reward = sum(rewards) / len(rewards)
        return [*rewards]

    lines = (workload / "data/train.jsonl").read_text(encoding="utf-8").splitlines()
    model_dir = workload / "warm_model"
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        reward_funcs=exact,
        args=_config(settings, scratch),
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        callbacks=[Watch()],
    )


def _held_out_accuracies(
    workload: Path, recorder: Recorder, max_new_tokens: int
) -> list[dict[str, float]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [json.loads(x) for x in (workload / "data/held_out.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(workload / "warm_model")
    model: Any = AutoModelForCausalLM.from_pretrained(workload / "warm_model", dtype=torch.float32)
    model.eval()
    found: list[dict[str, float]] = []
    for step, weights in recorder.snapshots:
        model.load_state_dict(weights)
        batch = tokenizer(
            [r["prompt"] for r in rows], padding=True, padding_side="left", return_tensors="pt"
        )
        with torch.no_grad():
            output = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                do_sample=False,
                max_new_tokens=max_new_tokens,
            )
        answers = tokenizer.batch_decode(
            output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
        )
        right = sum(a == r["answer"] for a, r in zip(answers, rows, strict=True))
        found.append({"step": step, "accuracy": right / len(rows)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", type=Path, help="directory made by workload.py")
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--settings", default="{}", help="JSON object of TrlSettings fields")
    arguments = parser.parse_args()
    started = time.monotonic()
    settings = TrlSettings(**json.loads(arguments.settings))
    torch.set_num_threads(settings.threads)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    recorder = Recorder()
    trainer = _trainer(settings, arguments.workload, recorder, arguments.output.with_suffix(""))
    setup_s = time.monotonic() - started
    trainer.train()
    recorder.take_snapshot(trainer.model)
    result = {
        "settings": asdict(settings),
        "setup_s": setup_s,
        "steps": [asdict(step) for step in recorder.steps],
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "accuracies": _held_out_accuracies(arguments.workload, recorder, settings.max_new_tokens),
    }
    arguments.output.write_text(json.dumps(result))
    sys.stdout.write(json.dumps(result["steps"][-1]) + "\n")


if __name__ == "__main__":
    main()
