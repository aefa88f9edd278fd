"""python train_lora.py MODEL | python serve_vllm.py MODEL: Trainer and peft; merged, served."""

import signal
import sys
from typing import Any

from accelerate.utils import gather_object
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from cosmos_weightsync import WeightSender
from cosmos_weightsync.encodings import merged_shards


class Publish(TrainerCallback):
    """Every step is a version."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Tell receivers where to fetch; the model is ready by now."""
        rank, num_ranks = args.process_index, args.world_size
        self.sender = WeightSender(merged_shards(others["model"]), rank=rank, num_ranks=num_ranks)
        endpoints = gather_object([self.sender.endpoint])
        if rank == 0:
            sys.stdout.write(" ".join(endpoints) + "\n")
            sys.stdout.flush()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Publish what the optimizer has made."""
        self.sender.publish(state.global_step)


model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
data: Any = [{"input_ids": list(range(16)), "labels": list(range(16))}] * 24
setup = TrainingArguments(max_steps=3, learning_rate=0.1, save_strategy="no", report_to="none")
Trainer(model, setup, train_dataset=data, callbacks=[Publish()]).train()
signal.pause()
