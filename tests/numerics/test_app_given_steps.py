"""Steps of every run on given data, from a user's rows to new weights, against loops in float64.

Rows are of unlike lengths, with answers of one token, prompts of several answers and conversations
of several turns. A few steps are taken, so that policy and reference differ and epochs wrap;
micro-batches are cut coarsely and finely, which adds gradients up in other orders.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import float64_given as loops
import pytest
import torch
import transformers

from cosmos_algos import DistillationConfig, DpoConfig, KtoConfig, RewardModelConfig
from cosmos_app.given.data_config import PreferenceDataConfig, SftDataConfig
from cosmos_app.given.recipe import (
    DistillationRecipe,
    GivenModelConfig,
    GivenTrainerConfig,
    PreferenceRecipe,
    RewardModelRecipe,
    SftRecipe,
)
from cosmos_app.given.trainer import GivenTrainer
from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model
from cosmos_core.config import config_to_json
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import (
    EmaConfig,
    LearnerConfig,
    ParallelConfig,
    Seat,
    SftBatchConfig,
    SgdConfig,
    build_mesh,
    step_examples,
)

TEXT = "0123456789+=abcdefghijklmnopqrstuvwxyz"
TALKING = (
    "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
STEPS, EXAMPLES, HELD_OUT = 4, 8, 3
CENTERING, WEIGHTS = 0.02, (1.5, 0.75)
ANSWERS = ("a", "abcdef", "", "xyz", "longer", "9", "0123456789", "b=c", "q", "zz", "w+w", "m", "t")
PROMPTS = ("1+1=", "2", "what", "1+1=", "sum", "7+8", "what", "1+1=", "k", "2", "j=", "8", "what")


def say(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant") * len(turns)
    talk = zip(roles, turns, strict=False)
    return {"messages": [{"role": role, "content": content} for role, content in talk]}


ANSWERED = [{"prompt": p, "response": a} for p, a in zip(PROMPTS, ANSWERS, strict=True)]
PAIRS = [
    {"prompt": p, "chosen": a, "rejected": b}
    for p, a, b in zip(PROMPTS, ANSWERS, (*ANSWERS[3:], "l", "n", "ooo"), strict=True)
]
MARKED = [{**row, "label": place % 3 != 1} for place, row in enumerate(ANSWERED)]
TALKED = [
    *ANSWERED[:6],
    say("hi", "ho"),
    say("a", "b", "longer", "answer"),
    *ANSWERED[6:8],
    say("x", "", "y", "z"),
    say("last", "one"),
    say("q", "r"),
]


@dataclass(frozen=True)
class Case:
    """What a run learns, from which rows, at which rate, and the loop that it has to equal."""

    rows: list[dict[str, Any]]
    recipe: Callable[..., Any]
    algorithm: Any
    loop: Callable[..., loops.Found]
    lr: float = 0.05
    layouts: tuple[str, ...] = ("padded",)


def _sft(models, head, rows, text):
    return loops.sft(models[0], rows, text)


def _pairs(form, reduced):
    return lambda models, head, rows, text: loops.preferred(form, reduced, models, rows, text)


def _kto(models, head, rows, text):
    return loops.kto(models, rows, text, WEIGHTS)


def _rewards(models, head, rows, text):
    return loops.reward_model(models[0], head, rows, text, CENTERING)


def _distilled(beta, top_k, models, head, rows, text):
    return loops.distilled(models, rows, text, beta, top_k=top_k)


def _taught(beta: float, top_k: int = 0) -> Case:
    algorithm = DistillationConfig(
        beta=beta, top_k=top_k, temperature=loops.TEMPERATURE, likelihood_coefficient=0.1
    )
    loop = partial(_distilled, beta, top_k)
    return Case(ANSWERED, DistillationRecipe, algorithm, loop, layouts=("padded", "packed"))


CASES = {
    "sft": Case(TALKED, SftRecipe, None, _sft, layouts=("padded", "packed")),
    "dpo": Case(
        PAIRS,
        PreferenceRecipe,
        DpoConfig(beta=loops.BETA, label_smoothing=0.1),
        _pairs(loops.dpo, torch.sum),
    ),
    "ipo": Case(
        PAIRS,
        PreferenceRecipe,
        DpoConfig(form="squared", beta=loops.BETA),
        _pairs(loops.ipo, torch.mean),
    ),
    "kto": Case(
        MARKED,
        PreferenceRecipe,
        KtoConfig(beta=loops.BETA, desirable_weight=WEIGHTS[0], undesirable_weight=WEIGHTS[1]),
        _kto,
    ),
    "reward model": Case(
        PAIRS, RewardModelRecipe, RewardModelConfig(centering=CENTERING), _rewards
    ),
    "forward KL": _taught(0.0),
    "reverse KL": _taught(1.0),
    "a mixture's divergence": _taught(0.3),
    "forward KL of few": _taught(0.0, loops.TOP_K),
    "reverse KL of few": _taught(1.0, loops.TOP_K),
    "a mixture's divergence of few": _taught(0.3, loops.TOP_K),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return the directories of a model and of a teacher, random but with a wide spread."""
    torch.set_num_threads(1)
    found = []
    for seed, name in enumerate(("model", "teacher")):
        path = tmp_path_factory.mktemp("tiny") / name
        tiny = TinyModelConfig(
            hidden_size=16, num_layers=1, num_heads=2, head_dim=32, tie_embeddings=not seed
        )
        build_tiny_model(path, [TEXT], tiny, seed=seed)
        model = transformers.AutoModelForCausalLM.from_pretrained(path)
        torch.manual_seed(seed)
        for parameter_name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in parameter_name else 0.0
            torch.nn.init.normal_(parameter, mean=mean, std=0.2)
        model.save_pretrained(path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        tokenizer.chat_template = TALKING
        tokenizer.save_pretrained(path)
        found.append(path)
    return tuple(found)


def exact(path):
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(path, dtype=torch.float64, attn_implementation="eager").eval()


def expected(case: Case, models, ema: EmaConfig):
    """Return figures by step, the averaged weights' loss over what is kept back, and weights."""
    model, averaged = exact(models[0]), exact(models[0])
    beside = exact(models[1] if case.recipe is DistillationRecipe else models[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(models[0])
    text = loops.Characters(tokenizer.get_vocab())
    head = torch.zeros(1, 16, dtype=torch.float64, requires_grad=True)
    smooth = head.detach().clone()
    named = {**dict(model.named_parameters()), "value_head.weight": head}
    averages = {**dict(averaged.named_parameters()), "value_head.weight": smooth}
    train = case.rows[:-HELD_OUT]
    figures = []
    for step in range(STEPS):
        config = SftBatchConfig(batch_size=EXAMPLES)
        rows = [train[place] for place in step_examples(len(train), config, step)]
        loss, said = case.loop((model, beside), head, rows, text)
        loss.backward()
        figures.append({"loss": loss.item(), **said})
        decay = min(ema.decay, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, weight in named.items():
                if weight.grad is not None:
                    weight -= case.lr * weight.grad
                weight.grad = None
                averages[name].mul_(decay).add_(weight, alpha=1 - decay)
    held_out, _ = case.loop((averaged, beside), smooth, case.rows[-HELD_OUT:], text)
    return figures, held_out.item(), {name: w.detach() for name, w in named.items()}


def trained(case: Case, models, ema: EmaConfig, folder, batch: SftBatchConfig):
    """Return the same of a run."""
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, case.rows)))
    kinds = (SftRecipe, DistillationRecipe)
    source = SftDataConfig if case.recipe in kinds else PreferenceDataConfig
    more = {} if case.algorithm is None else {"algorithm": case.algorithm}
    if case.recipe is DistillationRecipe:
        more["teacher"] = models[1]
    recipe = case.recipe(
        model=GivenModelConfig(path=models[0]),
        data=source(path=data, held_out=HELD_OUT),
        learner=LearnerConfig(optimizer=SgdConfig(lr=case.lr), max_grad_norm=float("inf"), ema=ema),
        trainer=GivenTrainerConfig(steps=STEPS, batch=batch),
        **more,
    )
    run = RunDirectory.create(folder / "run", config_json=config_to_json(recipe), now_s=0.0)
    try:
        trainer = GivenTrainer(recipe, run, build_mesh(ParallelConfig()))
        seats = [Seat(step=step, index=0, names=("a",), wants_stop=False) for step in range(STEPS)]
        figures = [trainer.train(seat) for seat in seats]
        held_out = trainer.validate().loss
        weights = dict(trainer.learner.model.named_parameters())
        trainer.close()
    finally:
        run.close()
    return figures, held_out, weights


@pytest.mark.parametrize("name", CASES)
def test_a_run_on_given_data_is_a_loop_in_float64(tmp_path, models, name):
    case, ema = CASES[name], EmaConfig(decay=0.15)
    figures, held_out, weights = expected(case, models, ema)
    begun = dict(exact(models[0]).named_parameters())
    moved = max(float((w - begun.get(n, 0.0)).abs().max().detach()) for n, w in weights.items())
    for layout in case.layouts:
        for max_tokens in (32, 256):
            folder = tmp_path / f"{layout} {max_tokens}"
            folder.mkdir()
            batch = SftBatchConfig(
                batch_size=EXAMPLES, max_tokens=max_tokens, layout=layout, bucket=1
            )
            mine, kept_back, found = trained(case, models, ema, folder, batch)
            for wanted, said in zip(figures, mine, strict=True):
                said = {key: said[key] for key in wanted}
                assert said == pytest.approx(wanted, rel=1e-4, abs=2e-5), folder.name
            assert kept_back == pytest.approx(held_out, rel=1e-4), folder.name
            assert found.keys() <= weights.keys()
            for key, value in found.items():
                error = float((value.detach() - weights[key]).abs().max())
                assert error < 2e-4 * moved, f"{folder.name}: {key} is off by {error} of {moved}"
