"""What is wrong with a run of the sweep that has ended: books, steps, figures, exported model."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROUNDING = 2e-4
"""Between log-probabilities of one float32 model, computed twice."""
_NEED_NOT_BE = ("rollout_idle",)


def records_of(output: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run."""
    path = output / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def judge_rl(
    output: Path, row: Mapping[str, str], *, steps: int, groups: int, died: bool
) -> list[str]:
    """Return what is wrong with a run with rollouts."""
    report = json.loads((output / "report.json").read_text())
    records = records_of(output)
    trained = {
        r["step"]: r["values"]
        for r in records
        if r["role"] == "policy" and "grad_norm" in r["values"]
    }
    return [
        *_books(report["books"], steps * groups),
        *_steps(records, steps),
        *_finite(records),
        *_skipped(trained),
        *_first_step(trained.get(0, {}), row),
        *_references(trained, row),
        *_validations(records, row, steps, died=died),
        *_exported(Path(report["export"]), row, output, is_trained=_learns(trained)),
    ]


def judge_given(output: Path, row: Mapping[str, str], *, steps: int) -> list[str]:
    """Return what is wrong with a run on given data."""
    report = json.loads((output / "report.json").read_text())
    records = records_of(output)
    problems = [*_steps(records, steps), *_finite(records)]
    losses = report["losses"]
    if sorted(map(int, losses)) != list(range(steps)):
        problems.append(f"losses of steps {sorted(losses)}")
    first = losses.get("0", math.nan)
    expected = {"dpo": math.log(2), "ipo": 25.0, "reward_model": math.log(2)}.get(row["task"])
    if expected is not None and row["precision"] == "float32" and abs(first - expected) > 1e-3:
        problems.append(f"the first loss is {first}, not {expected}")
    validated = set(map(int, report["validation_losses"]))
    if row["validation"] != "none" and steps - 1 not in validated:
        problems.append(f"validated after steps {sorted(validated)}")
    if any(not math.isfinite(loss) for loss in report["validation_losses"].values()):
        problems.append(f"validation losses {report['validation_losses']}")
    problems += _exported(Path(report["export"]), row, output)
    return problems


def judge_wfm(output: Path, *, steps: int) -> list[str]:
    """Return what is wrong with a run of a world model."""
    records = records_of(output)
    trained = sorted({record["step"] for record in records if "loss" in record})
    problems = [] if trained == list(range(1, steps + 1)) else [f"losses of steps {trained}"]
    problems += [
        f"{name} is {value} at step {record['step']}"
        for record in records
        for name, value in record.items()
        if value is None or not math.isfinite(value)
    ]
    if not list((output / "safetensors" / f"step_{steps}").rglob("*.safetensors")):
        problems.append("nothing was saved")
    return problems


def _books(books: Mapping[str, Any], due: int) -> list[str]:
    spent = books["consumed"] + sum(books["dropped"].values()) + sum(books["in_flight"].values())
    problems = [] if books["issued"] == spent else [f"the books do not balance: {books}"]
    if books["consumed"] != due:
        problems.append(f"{books['consumed']} groups were trained on, not {due}")
    return problems


def _steps(records: list[dict[str, Any]], steps: int) -> list[str]:
    found = sorted({r["step"] for r in records if r["role"] == "controller"})
    return [] if found == list(range(steps)) else [f"steps {found} were committed"]


def _finite(records: list[dict[str, Any]]) -> list[str]:
    vague = {
        f"{r['role']}/{name} is {value} at step {r['step']}"
        for r in records
        for name, value in r["values"].items()
        if name not in _NEED_NOT_BE and (value is None or not math.isfinite(value))
    }
    return sorted(vague)[:5]


def _skipped(trained: Mapping[int, Mapping[str, float]]) -> list[str]:
    """A step is only skipped if all of its samples were left out."""
    found = [n for n, v in trained.items() if v["skipped"] and v["masked"] < 1.0]
    return [f"steps {found} were skipped"] if found else []


def _first_step(first: Mapping[str, float], row: Mapping[str, str]) -> list[str]:
    """Hold the first step to what is known: one policy samples, trains and is the reference."""
    problems: list[str] = []
    is_exact = row["precision"] == "float32" and row["transport"] != "bfloat16"
    if is_exact and row["engine"] in ("keep", "recompute"):
        found = first.get("lag0_abs", math.nan)
        if not found < _ROUNDING and first.get("masked", 0.0) < 1.0:
            problems.append(f"lag0_abs is {found} at the first step")
        if row["algorithm"] != "ppo_two_updates" and first.get("clipped", 0.0) > 0.0:
            problems.append(f"{first['clipped']} of the first step was clipped")
    if row["precision"] in ("float32",) and row["algorithm"] != "ppo_two_updates":
        found = first.get("kl", 0.0 if first.get("masked") == 1.0 else math.nan)
        if row["kl"] != "none" and not abs(found) < _ROUNDING:
            problems.append(f"kl is {first.get('kl')} at the first step")
    is_to_learn = first.get("advantage_abs", 0.0) > 0.0 and first.get("rejected", 0.0) < 1.0
    if first.get("grad_norm", 0.0) == 0.0 and is_to_learn:
        problems.append("no gradient at the first step")
    return problems


def _references(trained: Mapping[int, Mapping[str, float]], row: Mapping[str, str]) -> list[str]:
    """A reference that is reset has no divergence where a step begins with it."""
    every = {"loss_reset": 2, "reward_reset": 1}.get(row["kl"])
    if every is None or row["precision"] != "float32" or row["algorithm"] == "ppo_two_updates":
        return []
    return [
        f"kl is {values.get('kl')} at step {step}, which begins with its reference"
        for step, values in trained.items()
        if step % every == 0 and not abs(values.get("kl", 0.0)) < _ROUNDING
    ]


def _learns(trained: Mapping[int, Mapping[str, float]]) -> bool:
    return any(values["grad_norm"] > 0.0 for values in trained.values())


def _validations(
    records: list[dict[str, Any]], row: Mapping[str, str], steps: int, *, died: bool
) -> list[str]:
    """In step each version that is due is measured; ahead, or after a death, some are not there."""
    found = sorted({r["step"] for r in records if r["role"] == "validation"})
    every = {"greedy": 1, "sampled": 2}.get(row["validation"])
    if row["data"] == "sets_alike" or row["validation"] == "none":
        wanted: list[int] = []
    elif every is None:
        wanted = [steps]
    elif died or row["staleness"] != "on_policy":
        between = {version // every for version in found[1:-1]}
        if found[:1] == [0] and found[-1:] == [steps] and len(between) == len(found) - 2:
            return []
        wanted = [0, steps]
    else:
        wanted = [0, *range(every, steps, every), steps]
    return [] if found == wanted else [f"validated versions {found}, not {wanted}"]


def _exported(
    directory: Path, row: Mapping[str, str], output: Path, *, is_trained: bool = True
) -> list[str]:
    """Load what was exported, and see that it can be computed with and was trained."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = (
        AutoModelForSequenceClassification
        if row.get("task") == "reward_model"
        else AutoModelForCausalLM
    )
    model = kind.from_pretrained(directory).float().eval()
    with torch.no_grad():
        logits = model(torch.tensor([[1, 5, 6, 7]])).logits
    problems = [] if torch.isfinite(logits).all() else ["the exported model gives no numbers"]
    begun_at = json.loads((output / "config.json").read_text())["model"].get("path")
    begun = Path(begun_at) if begun_at else output / "model"
    if kind is AutoModelForCausalLM:
        first = dict(AutoModelForCausalLM.from_pretrained(begun).named_parameters())
        moved = max(
            float((p - first[name].float()).detach().abs().max())
            for name, p in model.named_parameters()
        )
        if moved == 0.0 and is_trained:
            problems.append("nothing was trained")
    if row["lora"] != "none" and not (directory / "adapter" / "adapter_config.json").exists():
        problems.append("no adapter was exported")
    return problems
