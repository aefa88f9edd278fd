"""What recipes with rollouts can say: factors of the pairwise sweep, each level as overrides."""

import json
from pathlib import Path

from transformers import AutoTokenizer

from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model

RECIPE = "configs/sums.toml"
STEPS = 3
GROUPS = 4
SAMPLES = 4
FIXED = (
    f"trainer.steps={STEPS}",
    f"trainer.groups_per_step={GROUPS}",
    f"trainer.samples_per_group={SAMPLES}",
    "trainer.keep_checkpoints=2",
    "warmup.steps=0",
    "data.arithmetic={max_first=9, max_second=9, held_out=4}",
    "data.held_out=4",
    "model.tiny={num_layers=4, hidden_size=32, num_heads=4}",
    "rollout.replicas=1",
    "rollout.slots=4",
    "rollout.sampling.max_new_tokens=8",
    "bus.lease_s=20",
    "launch.restarts=2",
    "dashboard.enabled=false",
    "sinks=[{kind='jsonl'}]",
)

_ENVIRONMENT = '''
class Twice:
    """Asks once more."""

    tools = ()

    async def play(self, row, chat, seed):
        reply = await chat.reply([{"role": "user", "content": row.prompt}])
        if not reply.is_last:
            reply = await chat.reply([{"role": "user", "content": "again"}])
        return {"parity": float(len(reply.text) % 2)}

    async def aclose(self):
        pass


def look(word: str) -> str:
    """Look a word up.

    Args:
        word: what to look for.
    """
    return word
'''
_REWARDS = """
def parity(sample):
    return float(sample.num_response_tokens % 2)


def digits(sample):
    return sum(map(str.isdigit, sample.response)) / 8
"""
_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% else %}:{% endif %}{% endfor %}"
)
_CHAT = "model.path={files}/chat_model"
_PARITY = "reward.rewards=[{kind='python', name='parity', function='{files}/rewards.py:parity'}]"

VICTIMS = ("all", "policy", "rollout", "controller")

LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "algorithm": {
        "grpo": ("algorithm.kind=grpo",),
        "dr_grpo": ("algorithm.kind=dr_grpo", "algorithm.aggregation.constant=8"),
        "rloo": ("algorithm.kind=rloo",),
        "reinforce_pp": ("algorithm.kind=reinforce_pp",),
        "reinforce_pp_baseline": (
            "algorithm.kind=reinforce_pp",
            "algorithm.advantage=reinforce_pp_baseline",
        ),
        "max_rl": ("algorithm.kind=max_rl",),
        "opo": ("algorithm.kind=opo",),
        "pass_at_k": ("algorithm={kind='pass_at_k', k=2}",),
        "ppo": ("algorithm.kind=ppo",),
        "ppo_two_updates": ("algorithm={kind='ppo', epochs=2, imitation_coefficient=0.1}",),
        "distilled": ("algorithm.kind=on_policy_distillation", "model.teacher={files}/teacher"),
        "distilled_top_k": (
            "algorithm={kind='on_policy_distillation', top_k=3}",
            "model.teacher={files}/teacher",
        ),
        "distilled_beside": (
            "algorithm.kind=on_policy_distillation",
            "algorithm.advantage=grpo",
            "model.teacher={files}/teacher",
            "teacher={replicas=1, engine={kind='transformers'}}",
        ),
    },
    "surrogate": {
        "own": (),
        "dual": ("algorithm.objective.surrogate={kind='clip', dual=3.0}",),
        "higher": ("algorithm.objective.surrogate={kind='clip', low=0.2, high=0.28}",),
        "gspo": ("algorithm.objective.surrogate={kind='gspo'}",),
        "gspo_token": ("algorithm.objective.surrogate={kind='gspo', level='token'}",),
        "cispo": ("algorithm.objective.surrogate={kind='cispo'}",),
        "aipo": ("algorithm.objective.surrogate={kind='aipo'}",),
        "sapo": ("algorithm.objective.surrogate={kind='sapo'}",),
    },
    "correction": {
        "own": (),
        "behaviour": (
            "algorithm.objective.anchor=behaviour",
            "algorithm.objective.correction={kind='none'}",
        ),
        "icepop": ("algorithm.objective.correction={kind='icepop'}",),
        "mis": ("algorithm.objective.correction={kind='mis'}",),
        "interpolated": ("algorithm.objective.anchor=interpolated",),
        "rejected": (
            "algorithm.objective.rejections=[{kind='staleness', max_lag=1}, "
            "{kind='worst_token'}, {kind='off_policy'}]",
        ),
    },
    "kl": {
        "none": (),
        "loss": ("algorithm.objective.kl={coefficient=0.05, estimator='k3', place='loss'}",),
        "loss_reset": ("algorithm.objective.kl={coefficient=0.05, place='loss', reset_every=2}",),
        "reward": ("algorithm.objective.kl={coefficient=0.05, estimator='k1', place='reward'}",),
        "reward_reset": (
            "algorithm.objective.kl={coefficient=0.05, estimator='k3', place='reward', "
            "reset_every=1}",
        ),
    },
    "aggregation": {
        "own": (),
        "prompt_mean": ("algorithm.aggregation={mode='prompt_mean'}",),
        "sequence_sum": ("algorithm.aggregation={mode='sequence_sum'}",),
    },
    "entropy": {"none": (), "some": ("algorithm.objective.entropy_coefficient=0.01",)},
    "engine": {
        "keep": ("rollout.engine={kind='transformers', context_length=128}",),
        "recompute": ("rollout.engine={kind='transformers', kv='recompute', context_length=128}",),
        "bfloat16": ("rollout.engine={kind='transformers', dtype='bfloat16', context_length=128}",),
        "scripted": ("rollout.engine={kind='scripted', vocabulary_size=32, mean_length=6}",),
    },
    "rollouts": {"one": (), "two": ("rollout.replicas=2", "rollout.slots=2", "rollout.scoring=2")},
    "staleness": {
        "on_policy": ("staleness={depth=0, bound=0, policy='block'}",),
        "block": ("staleness={depth=1, bound=2, policy='block'}",),
        "drop": ("staleness={depth=2, bound=2, policy='drop'}",),
        "count": ("staleness={depth=1, bound=1, policy='count'}",),
        "window": ("staleness={depth=1, bound=2, policy='window'}",),
    },
    "colocate": {
        "apart": (),
        "keep": ("rollout.colocate=keep",),
        "discard": ("rollout.colocate=discard",),
    },
    "zero_signal": {"kept": (), "replaced": ("trainer.drop_zero_signal=true",)},
    "truncated": {"trained": (), "masked": ("trainer.mask_truncated=true",)},
    "data": {
        "sums": (),
        "file": ("data.path={files}/a.jsonl",),
        "sets": (
            "data.sets=[{name='a', path='{files}/a.jsonl', share=3}, "
            "{name='b', path='{files}/b.jsonl', share=1}, "
            "{name='exam', held_out_path='{files}/exam.jsonl'}]",
        ),
        "sets_alike": (
            "data.sets=[{name='a', path='{files}/a.jsonl'}, {name='b', path='{files}/b.jsonl'}]",
            "data.held_out=0",
        ),
    },
    "rewards": {
        "parity": (_PARITY,),
        "several": (
            _PARITY[:-1] + ", {kind='exact', weight=0.5}, "
            "{kind='python', name='digits', function='{files}/rewards.py:digits'}]",
        ),
        "length": (_PARITY[:-1] + ", {kind='length', target=2, limit=9, weight=0.5}]",),
        "workers": (_PARITY, "reward.num_workers=2", "reward.timeout_s=30"),
    },
    "length_reward": {
        "none": (),
        "relative": ("length_reward={kind='relative', weight=0.1}",),
        "budget": ("length_reward={kind='budget', rate=0.01}",),
        "cap": ("length_reward={kind='cap', rate=0.01}",),
    },
    "prefixes": {"each": (), "once": ("rollout.shared_prefixes=once",)},
    "environment": {
        "none": (),
        "two_turns": (
            "rollout.environment={kind='python', function='{files}/world.py:Twice'}",
            "rollout.episode.max_turns=2",
        ),
        "tools": (
            "rollout.environment={kind='tools', functions=['{files}/world.py:look']}",
            "rollout.episode={max_turns=2, tool_format='hermes'}",
        ),
    },
    "validation": {
        "greedy": ("validation.every=1",),
        "sampled": ("validation={samples=3, temperature=0.7, top_p=0.9, every=2}",),
        "some": ("validation={prompts=2, before=false, max_new_tokens=3}",),
        "none": ("validation={before=false, after=false}",),
    },
    "model": {
        "built": (),
        "tied": ("model.tiny.tie_embeddings=true",),
        "chat": (_CHAT,),
        "native": (_CHAT, "model.training.implementation=native"),
        "frozen": (_CHAT, "model.training.freeze=['*embed_tokens*']"),
    },
    "layout": {
        "one": (),
        "fsdp": ("policy.ranks=2",),
        "tp": ("policy.ranks=2", "policy.parallel.tp=2"),
        "pp": ("policy.ranks=2", "policy.parallel.pp=2"),
        "pp_interleaved": (
            "policy.ranks=2",
            "policy.parallel={pp=2, pp_schedule='Interleaved1F1B'}",
        ),
        "cp": ("policy.ranks=2", "policy.parallel.cp=2"),
        "ddp": ("policy.ranks=2", "policy.parallel={dp_replicate=2, dp_shard=1}"),
        "replicas": ("policy.replicas=2",),
        "elastic": ("policy.replicas=2", "elastic={lease_s=10}"),
    },
    "precision": {
        "float32": (),
        "compute_bfloat16": ("model.training.compute_dtype=bfloat16",),
        "bfloat16": ("model.training={dtype='bfloat16', compute_dtype='bfloat16'}",),
        "fp8": ("model.training.low_precision={emulate=true}",),
    },
    "lora": {
        "none": (),
        "all": ("model.training.lora={rank=4, alpha=8}",),
        "some": (
            "model.training.lora={rank=2, targets=['q_proj', 'down_proj'], rank_stabilised=true}",
        ),
    },
    "memory": {
        "plain": (),
        "recomputed": ("model.training.activation_checkpointing=full",),
        "offloaded": ("learner.offload_activations=true",),
    },
    "compile": {"none": (), "aot_eager": ("model.training.compile=aot_eager",)},
    "deterministic": {"no": (), "yes": ("trainer.deterministic=true",)},
    "attention": {"sdpa": (), "eager": ("model.training.attention=eager",)},
    "batches": {
        "whole": (),
        "small": ("trainer.tokens_per_batch=64",),
        "packed": ("trainer.layout=packed", "trainer.tokens_per_batch=200"),
        "padded": ("trainer.layout=padded", "trainer.tokens_per_batch=200"),
        "whole_logits": ("algorithm.logprob_chunk=0",),
    },
    "optimizer": {
        "adamw": (),
        "sgd": ("learner.optimizer={kind='sgd', lr=0.05, momentum=0.9}",),
        "muon": ("learner.optimizer={kind='muon', lr=1e-3}",),
        "adamw_8bit": ("learner.optimizer={kind='adamw_8bit', lr=1e-3, stochastic_rounding=true}",),
        "rmsprop": (
            "learner.optimizer={kind='torch', name='RMSprop', lr=1e-4, options={momentum=0.5}}",
        ),
    },
    "ema": {"none": (), "kept": ("learner.ema={decay=0.5}",)},
    "transport": {
        "auto": (),
        "tcp": ("weight_sync.transport=tcp", "weight_sync.bucket_mib=0.01"),
        "process_group": ("weight_sync.transport=process_group", "weight_sync.snapshots=2"),
        "bfloat16": ("weight_sync={wire_dtype='bfloat16', transport='shared_memory'}",),
    },
    "checkpoints": {
        "last": ("trainer.checkpoint_every=0",),
        "each": ("trainer.checkpoint_every=1",),
    },
    "record": {"no": (), "yes": ("rollout.record=true",)},
}


def write_files(files: Path) -> None:
    """Write the data, models and functions that the recipes name."""
    files.mkdir(parents=True, exist_ok=True)
    (files / "world.py").write_text(_ENVIRONMENT)
    (files / "rewards.py").write_text(_REWARDS)
    rows = [
        {"prompt": f"{first}+{second}=", "answer": str(first + second), "budget": 4 + first}
        for first in range(8)
        for second in range(6)
    ]
    for name, part in (("a", rows[:30]), ("b", rows[30:44]), ("exam", rows[44:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (files / f"{name}.jsonl").write_text(text)
    letters = ['0123456789+= :aginlokwrd<>/_{}"tc', *map(json.dumps, rows)]
    size = TinyModelConfig(num_layers=4, hidden_size=32, num_heads=4)
    for name, seed in (("chat_model", 1), ("teacher", 2)):
        if (files / name).exists():
            continue
        build_tiny_model(files / name, letters, size, seed=seed)
    tokenizer = AutoTokenizer.from_pretrained(files / "chat_model")
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(files / "chat_model")


def overrides_of(row: dict[str, str], files: Path) -> list[str]:
    """Return a row as the overrides of its recipe."""
    chosen = (override for factor, level in row.items() for override in LEVELS[factor][level])
    return [each.replace("{files}", str(files)) for each in (*FIXED, *chosen)]


def num_ranks(row: dict[str, str]) -> int:
    """Return how many processes the sweep starts: the launcher starts the others."""
    del row
    return 1


def recipe_of(row: dict[str, str]) -> str:
    """Return the recipe that a row overrides."""
    del row
    return RECIPE


_STAGES = frozenset(("pp", "pp_interleaved"))
_DISTILLED = frozenset(("distilled", "distilled_top_k", "distilled_beside"))
_BUILT = frozenset(("built", "tied"))
_ENVIRONMENTS = frozenset(("two_turns", "tools"))


def _but(factor: str, *levels: str) -> frozenset[str]:
    return frozenset(LEVELS[factor]) - set(levels)


CONFLICTS = (
    # an importance weight is counted once
    {"surrogate": frozenset(("aipo",)), "correction": _but("correction", "behaviour")},
    # a loss of whole samples
    {
        "surrogate": frozenset(("gspo", "gspo_token")),
        "aggregation": frozenset(("sequence_sum", "prompt_mean")),
    },
    {
        "surrogate": frozenset(("gspo", "gspo_token")),
        "algorithm": _but("algorithm", "grpo", "max_rl", "pass_at_k"),
    },
    {"algorithm": frozenset(("dr_grpo",)), "aggregation": _but("aggregation", "own")},
    {
        "algorithm": frozenset(("ppo", "ppo_two_updates", "reinforce_pp", "reinforce_pp_baseline")),
        "kl": frozenset(("reward_reset",)),
    },
    # rewards that an advantage has no meaning for
    {"algorithm": frozenset(("pass_at_k",)), "length_reward": _but("length_reward", "none")},
    {"algorithm": frozenset(("max_rl",)), "length_reward": frozenset(("relative", "budget"))},
    {"algorithm": frozenset(("pass_at_k",)), "rewards": frozenset(("several", "length"))},
    {"algorithm": frozenset(("max_rl",)), "rewards": frozenset(("length",))},
    {"algorithm": frozenset(("pass_at_k",)), "environment": _ENVIRONMENTS},
    # who takes turns
    {"colocate": _but("colocate", "apart"), "staleness": _but("staleness", "on_policy")},
    {"colocate": _but("colocate", "apart"), "layout": frozenset(("replicas", "elastic"))},
    # letters of the data, and what is written with them
    {"algorithm": _DISTILLED, "model": _BUILT},
    {"environment": _ENVIRONMENTS, "model": _BUILT},
    {"environment": frozenset(("two_turns",)), "engine": frozenset(("scripted",))},
    {"length_reward": frozenset(("budget", "cap")), "data": frozenset(("sums",))},
    {"data": frozenset(("sets_alike",)), "validation": frozenset(("greedy", "sampled"))},
    {"layout": frozenset(("one",)), "precision": frozenset(("compute_bfloat16",))},
    # samples of a row are told apart by attention
    {"attention": frozenset(("eager",)), "batches": frozenset(("packed",))},
    {"model": frozenset(("native",)), "lora": frozenset(("all", "some"))},
    {"model": frozenset(("native",)), "precision": frozenset(("fp8",))},
    # stages share no weights
    {"layout": _STAGES, "model": frozenset(("tied",))},
)
