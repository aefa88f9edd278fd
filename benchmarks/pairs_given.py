"""What recipes on given data can say: factors of the pairwise sweep, each level as overrides."""

from pathlib import Path

import pairs_rl

STEPS = 4
_DATA = "{files}/given"
_HELD = ("data.held_out=4",)
FIXED = (
    f"trainer.steps={STEPS}",
    "trainer.batch.batch_size=8",
    "trainer.batch.max_tokens=256",
    "trainer.retention={keep=2, keep_best=0}",
    "learner.optimizer={kind='adamw', lr=1e-3}",
    "model.tiny={num_layers=4, hidden_size=32, num_heads=4}",
    "bus.lease_s=20",
    "launch.restarts=2",
    "sinks=[{kind='jsonl'}]",
)
_RECIPES = {
    "sft": "configs/sft.toml",
    "dpo": "configs/dpo.toml",
    "ipo": "configs/dpo.toml",
    "kto": "configs/dpo.toml",
    "reward_model": "configs/reward_model.toml",
    "distilled": "configs/distillation.toml",
    "distilled_whole": "configs/distillation.toml",
}
_ROWS = {"dpo": "pairs", "ipo": "pairs", "reward_model": "pairs", "kto": "marked"}
_SHARED = ("model", "layout", "precision", "lora", "memory", "compile", "deterministic")

VICTIMS = ("all", "policy")

LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "task": {
        "sft": (),
        "dpo": ("algorithm.label_smoothing=0.0",),
        "ipo": ("algorithm.form=squared",),
        "kto": ("algorithm={kind='kto'}",),
        "reward_model": (),
        "distilled": (
            "teacher={files}/teacher",
            "algorithm.top_k=4",
            "algorithm.likelihood_coefficient=0.1",
        ),
        "distilled_whole": ("teacher={files}/teacher", "algorithm.top_k=0", "algorithm.beta=1.0"),
    },
    "rows": {
        "padded": ("trainer.batch.layout=padded",),
        "packed": ("trainer.batch.layout=packed",),
        "small": ("trainer.batch={layout='padded', max_tokens=48, bucket=1}",),
    },
    "data": {
        "one": ("data.path={data}_a.jsonl",),
        "parquet": ("data.path={data}_a.parquet",),
        "shares": (
            "data.path=none",
            "data.sets=[{name='a', path='{data}_a.jsonl', share=3}, "
            "{name='b', path='{data}_b.parquet', share=1}]",
        ),
        "measured": (
            "data.path=none",
            "data.sets=[{name='a', path='{data}_a.jsonl'}, {name='b', path='{data}_b.jsonl'}, "
            "{name='exam', held_out_path='{data}_exam.jsonl'}]",
        ),
    },
    "validation": {
        "each": (*_HELD, "trainer.validate_every=1"),
        "end": (*_HELD, "trainer.validate_every=0"),
        "best": (*_HELD, "trainer.validate_every=2", "trainer.retention={keep=1, keep_best=1}"),
        "none": ("data.held_out=0", "trainer.validate_every=0"),
    },
    **{factor: pairs_rl.LEVELS[factor] for factor in _SHARED},
    "optimizer": {
        name: of for name, of in pairs_rl.LEVELS["optimizer"].items() if name != "rmsprop"
    },
    "schedule": {
        "constant": (),
        "cosine": ("learner.optimizer.schedule={shape='cosine', num_warmup_steps=1, num_steps=4}",),
    },
    "ema": pairs_rl.LEVELS["ema"],
    "checkpoints": {
        "last": ("trainer.checkpoint_every=0",),
        "each": ("trainer.checkpoint_every=1",),
    },
    "export": {"same": (), "bfloat16": ("trainer.export_dtype=bfloat16",)},
}
_STAGES = frozenset(("pp", "pp_interleaved"))
CONFLICTS = (
    {"task": frozenset(("dpo", "ipo", "kto", "reward_model")), "rows": frozenset(("packed",))},
    {"task": frozenset(("distilled", "distilled_whole")), "model": frozenset(("built", "tied"))},
    {"layout": frozenset(("one",)), "precision": frozenset(("compute_bfloat16",))},
    {"model": frozenset(("native",)), "lora": frozenset(("all", "some"))},
    {"model": frozenset(("native",)), "precision": frozenset(("fp8",))},
    # stages share no weights
    {"layout": _STAGES, "model": frozenset(("tied",))},
)


def num_ranks(row: dict[str, str]) -> int:
    """Return how many processes the sweep starts: the launcher starts the others."""
    del row
    return 1


def recipe_of(row: dict[str, str]) -> str:
    """Return the recipe that a row overrides."""
    return _RECIPES[row["task"]]


def overrides_of(row: dict[str, str], files: Path) -> list[str]:
    """Return a row as the overrides of its recipe."""
    chosen = (override for factor, level in row.items() for override in LEVELS[factor][level])
    data = _DATA + "_" + _ROWS.get(row["task"], "answers")
    return [
        each.replace("{data}", data).replace("{files}", str(files)) for each in (*FIXED, *chosen)
    ]


def write_files(files: Path) -> None:
    """Write examples, pairs and marked answers, as JSON lines and as Parquet."""
    import json

    import pyarrow
    from pyarrow import parquet

    for part, numbers in (("a", range(4)), ("b", range(4, 6)), ("exam", range(6, 8))):
        sums = [(first, second) for first in numbers for second in range(8)]
        forms = {
            "answers": [{"prompt": f"{a}+{b}=", "response": f"{a + b}"} for a, b in sums],
            "pairs": [
                {"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{a + b + 11}"}
                for a, b in sums
            ],
            "marked": [
                {"prompt": f"{a}+{b}=", "response": f"{a + b + b % 2}", "label": b % 2 == 0}
                for a, b in sums
            ],
        }
        for form, rows in forms.items():
            path = files / f"given_{form}_{part}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            parquet.write_table(pyarrow.Table.from_pylist(rows), path.with_suffix(".parquet"))
