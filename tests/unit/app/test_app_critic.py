"""PPO with a critic, and REINFORCE++, in a policy's trainer, against loops over sequences."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cosmos_algos import (
    CriticConfig,
    GaeConfig,
    KlConfig,
    ObjectiveConfig,
    PpoConfig,
    ReinforcePlusPlusConfig,
)
from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model
from cosmos_app.recipe import ModelConfig, Recipe
from cosmos_app.roles.run_checkpoints import RunCheckpoints
from cosmos_app.roles.step_trainer import Seat
from cosmos_app.roles.trainer import Trainer
from cosmos_app.roles.weights import trained_shards
from cosmos_app.trainer_config import TrainerConfig
from cosmos_core.messages import SampleRef, Train
from cosmos_core.trajectory import Trajectory, VersionSpan
from cosmos_parallel import (
    LearnerConfig,
    LoraConfig,
    ParallelConfig,
    SgdConfig,
    build_mesh,
)
from cosmos_parallel.learner_state import weights_of

TINY = TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2, head_dim=32)
GAMMA, LAMBDA, VALUE_WEIGHT, RATE, MOMENTUM, KL = 0.9, 0.8, 0.7, 0.5, 0.9, 0.05
# a prompt of two tokens, then what is trained on, and its reward
SAMPLES = (((4, 5, 6), 1.0), ((5,), 0.0), ((6, 6), -0.5), ((7, 4, 3, 5), 1.0))
BEHAVIOUR = -2.0
LORA_SCALE = 4.0


def sample(index: int) -> Trajectory:
    response, reward = SAMPLES[index]
    length = 2 + len(response)
    return Trajectory(
        prompt_id="p",
        group="g",
        sibling=index,
        attempt=0,
        token_ids=np.array([3, 4, *response], np.int32),
        logprobs=np.array([0.0, 0.0] + [BEHAVIOUR] * len(response), np.float32),
        trainable=np.arange(length) >= 2,
        versions=(VersionSpan(-1, 2), VersionSpan(0, length - 2)),
        rewards={},
        reward=reward,
        finish_reason="stop",
    )


def train(step: int) -> Train:
    refs = tuple(
        SampleRef(sibling=i, status="completed", key=str(i), num_tokens=len(r), reward=reward)
        for i, (r, reward) in enumerate(SAMPLES)
    )
    return Train(step=step, groups=(refs,), publish=False)


Named = dict[str, torch.Tensor]


class Loop:
    """Two epochs of PPO on whole sequences, one after the other, in float64.

    With factors A and B for layers, B A is added to their weights and only these are trained.
    """

    def __init__(self, directory: Path, reset_every: int, factors: Named | None = None) -> None:
        from transformers import AutoModelForCausalLM

        self.steps_to_reset, self.reset_every = reset_every, reset_every

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
        self.factors = {n: f.double().requires_grad_() for n, f in (factors or {}).items()}
        self.first = {name: w.detach().clone() for name, w in self.weights().items()}
        self.head = torch.zeros(1, 16, dtype=torch.float64, requires_grad=True)
        of_model = self.factors.values() if factors else self.model.parameters()
        self.trained = [*of_model, self.head]
        self.optimizer = torch.optim.SGD(self.trained, lr=RATE, momentum=MOMENTUM)

    def weights(self) -> Named:
        """Of the policy, with what its adapters add."""
        own = dict(self.model.named_parameters())
        for name in self.factors:
            layer, _, factor = name.partition(".lora_")
            if factor == "A.default.weight":
                added = self.factors[f"{layer}.lora_B.default.weight"] @ self.factors[name]
                own[f"{layer}.weight"] = own[f"{layer}.weight"].detach() + LORA_SCALE * added
        return own

    def scores(self, weights: Named, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each trained token, and the value of the state before it."""
        ids = torch.tensor([[3, 4, *SAMPLES[index][0]]])
        asked = {"output_hidden_states": True}
        out = torch.func.functional_call(self.model, weights, (ids,), asked)
        logprobs = out.logits[0].log_softmax(-1)[1:-1].gather(-1, ids[0, 2:, None])[:, 0]
        return logprobs, (out.hidden_states[-1][0, 1:-1] @ self.head.T)[:, 0]

    def step(self) -> None:
        olds, advantages, returns = [], [], []
        with torch.no_grad():
            for index, (response, reward) in enumerate(SAMPLES):
                logprobs, values = self.scores(self.weights(), index)
                reference, _ = self.scores(self.first, index)
                given = (-KL * (logprobs - reference)).tolist()
                given[-1] += reward
                carried, later, mine = 0.0, 0.0, [0.0] * len(response)
                for t in reversed(range(len(response))):
                    error = given[t] + GAMMA * later - values[t].item()
                    carried = error + GAMMA * LAMBDA * carried
                    later, mine[t] = values[t].item(), carried
                olds.append((logprobs, values))
                advantages.append(torch.tensor(mine, dtype=torch.float64))
                returns.append(advantages[-1] + values)
        every = torch.cat(advantages)
        for _ in range(2):
            loss = torch.zeros((), dtype=torch.float64)
            for index in range(len(SAMPLES)):
                logprobs, values = self.scores(self.weights(), index)
                old_logprobs, old_values = olds[index]
                white = (advantages[index] - every.mean()) / every.std()
                ratio = (logprobs - old_logprobs).exp()
                clipped = ratio.clamp(0.8, 1.2)
                weight = (old_logprobs - BEHAVIOUR).exp().clamp(max=2.0)
                loss = loss - (weight * torch.minimum(ratio * white, clipped * white)).sum()
                held = old_values + (values - old_values).clamp(-0.2, 0.2)
                errors = torch.maximum((values - returns[index]) ** 2, (held - returns[index]) ** 2)
                loss = loss + VALUE_WEIGHT * 0.5 * errors.sum()
            self.optimizer.zero_grad()
            (loss / len(every)).backward()
            torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
        self.steps_to_reset -= 1
        if self.steps_to_reset == 0:  # the policy is the reference from now on
            self.steps_to_reset = self.reset_every
            self.first = {name: w.detach().clone() for name, w in self.weights().items()}


@pytest.fixture
def recipe() -> Recipe:
    return replace(
        Recipe(),
        algorithm=PpoConfig(
            critic=CriticConfig(
                gae=GaeConfig(discount=GAMMA, decay=LAMBDA), coefficient=VALUE_WEIGHT
            ),
            objective=ObjectiveConfig(kl=KlConfig(coefficient=KL, estimator="k1", place="reward")),
            epochs=2,
        ),
        learner=LearnerConfig(optimizer=SgdConfig(lr=RATE, momentum=MOMENTUM)),
        model=ModelConfig(tiny=TINY),
    )


def with_reset(recipe: Recipe, reset_every: int) -> Recipe:
    kl = replace(recipe.algorithm.objective.kl, reset_every=reset_every)
    objective = replace(recipe.algorithm.objective, kl=kl)
    return replace(recipe, algorithm=replace(recipe.algorithm, objective=objective))


def with_adapters(recipe: Recipe) -> Recipe:
    held = replace(recipe.model.training, lora=LoraConfig(rank=2, alpha=2 * LORA_SCALE))
    return replace(recipe, model=replace(recipe.model, training=held))


def native(recipe: Recipe) -> Recipe:
    held = replace(recipe.model.training, implementation="native")
    return replace(recipe, model=replace(recipe.model, training=held))


def take(trainer: Trainer, step: int) -> dict[str, float]:
    command = train(step)
    share = trainer.share(command)
    return trainer.train(command, share, [sample(int(ref.key)) for ref in share.refs])


@pytest.mark.parametrize(
    ("layout", "tokens", "reset_every"),
    [
        ("packed", 64, 0),
        ("padded", 64, 2),  # the third step has the policy after two as its reference
        ("padded", 6, 1),  # 6 makes micro-batches of one sample each
    ],
)
def test_steps_of_ppo_equal_a_loop_over_sequences(
    tmp_path: Path, recipe: Recipe, layout: str, tokens: int, reset_every: int
) -> None:
    torch.set_num_threads(1)
    build_tiny_model(tmp_path / "model", ["0123456789+=?"], TINY, seed=0)
    mesh = build_mesh(ParallelConfig())
    store = RunCheckpoints(tmp_path / "checkpoints", mesh)
    chosen = TrainerConfig(tokens_per_batch=tokens, layout=layout)  # type: ignore[arg-type]
    seat = Seat(replica_index=0, num_replicas=1, mesh=mesh)
    recipe = with_reset(replace(recipe, trainer=chosen), reset_every)
    trainer = Trainer(recipe, tmp_path / "model", seat, store, None)
    loop = Loop(tmp_path / "model", reset_every)
    try:
        figures: list[dict[str, float]] = []
        for step in range(3):
            figures.append(take(trainer, step))
            loop.step()
        trained = dict(trainer._model.named_parameters())
        for name, expected in loop.model.named_parameters():
            torch.testing.assert_close(trained[name].double(), expected, rtol=1e-4, atol=1e-5)
        head = trained["value_head.weight"].detach()
        torch.testing.assert_close(head.double(), loop.head.detach(), rtol=1e-4, atol=1e-5)
        assert head.abs().max() > 0.01
        # ratios and values were held back, else the clips would not be shown
        assert max(each["clipped"] for each in figures) > 0.0
        assert max(each["critic_clipped"] for each in figures) > 0.0
        assert figures[0]["critic_value"] == 0.0
        for each in figures:  # 18 tokens of the samples, in each of two updates
            assert each["tokens_per_s_per_rank"] * each["train_s"] == pytest.approx(2 * 18)
            assert each["useful_tokens"] == (18 / 24 if layout == "padded" and tokens > 6 else 1.0)
            assert each["mfu"] == 0.0, "no peak is known of a CPU"
        sent = {shard.spec.name for shard in trained_shards(trainer._model, recipe)}
        assert sent == trained.keys() - {"value_head.weight"}
    finally:
        trainer.close()


def take_whitened(loop: Loop) -> None:
    """Take a step of REINFORCE++, A_t = R - β Σ_{s≥t} k1_s, whitened over the tokens."""
    scored, returns = [loop.scores(loop.weights(), i)[0] for i in range(len(SAMPLES))], []
    for index, (_, reward) in enumerate(SAMPLES):
        k1 = (scored[index] - loop.scores(loop.first, index)[0]).detach()
        returns.append(reward - KL * k1.flip(0).cumsum(0).flip(0))
    every, loss = torch.cat(returns), torch.zeros((), dtype=torch.float64)
    for logprobs, mine in zip(scored, returns, strict=True):
        weight = (logprobs.detach() - BEHAVIOUR).exp().clamp(max=2.0)
        ratio = (logprobs - logprobs.detach()).exp()
        loss = loss - (weight * (mine - every.mean()) / every.std() * ratio).sum()
    loop.optimizer.zero_grad()
    (loss / len(every)).backward()
    torch.nn.utils.clip_grad_norm_(loop.trained, 1.0)
    loop.optimizer.step()


def test_steps_of_reinforce_pp_whiten_rewards_with_their_penalty(
    tmp_path: Path, recipe: Recipe
) -> None:
    torch.set_num_threads(1)
    build_tiny_model(tmp_path / "model", ["0123456789+=?"], TINY, seed=0)
    mesh = build_mesh(ParallelConfig())
    store = RunCheckpoints(tmp_path / "checkpoints", mesh)
    seat = Seat(replica_index=0, num_replicas=1, mesh=mesh)
    algorithm = ReinforcePlusPlusConfig(objective=recipe.algorithm.objective)
    trainer = Trainer(replace(recipe, algorithm=algorithm), tmp_path / "model", seat, store, None)
    loop = Loop(tmp_path / "model", 0)
    try:
        figures = []
        for step in range(3):
            figures.append(take(trainer, step))
            take_whitened(loop)
        trained = dict(trainer._model.named_parameters())
        for name, expected in loop.model.named_parameters():
            torch.testing.assert_close(trained[name].double(), expected, rtol=1e-4, atol=1e-5)
        assert figures[0]["kl"] == 0.0
        assert abs(figures[2]["kl"]) > 0.01
    finally:
        trainer.close()


@pytest.mark.parametrize("prepare", [replace, native], ids=["transformers", "torchtitan"])
def test_a_reference_is_reset_to_a_policy_with_a_critic(
    tmp_path: Path, recipe: Recipe, prepare: Callable[[Recipe], Recipe]
) -> None:
    torch.set_num_threads(1)
    build_tiny_model(tmp_path / "model", ["0123456789+=?"], TINY, seed=0)
    mesh = build_mesh(ParallelConfig())
    seat = Seat(replica_index=0, num_replicas=1, mesh=mesh)
    store = RunCheckpoints(tmp_path / "checkpoints", mesh)
    trainer = Trainer(prepare(with_reset(recipe, 1)), tmp_path / "model", seat, store, None)
    try:
        take(trainer, 0)
        moved = dict(trainer._learner.companion.named_parameters())
        for name, value in trainer._model.named_parameters():
            assert name == "value_head.weight" or torch.equal(moved[name], value)
        sent = {shard.spec.name for shard in trained_shards(trainer._model, recipe)}
        assert "value_head.weight" not in sent
        assert "model.layers.0.self_attn.q_proj.weight" in sent
    finally:
        trainer.close()


def test_a_critic_is_saved_and_is_no_part_of_an_export(tmp_path: Path, recipe: Recipe) -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    build_tiny_model(tmp_path / "model", ["0123456789+=?"], TINY, seed=0)
    mesh = build_mesh(ParallelConfig())
    seat = Seat(replica_index=0, num_replicas=1, mesh=mesh)
    heads: list[torch.Tensor] = []
    for launch in range(2):
        store = RunCheckpoints(tmp_path / "checkpoints", mesh)
        trainer = Trainer(recipe, tmp_path / "model", seat, store, None)
        try:
            if not launch:
                take(trainer, 0)
                trainer.save(b"")
                trainer.export(tmp_path / "export")
            heads.append(trainer._model.get_submodule("value_head").weight.detach().clone())
        finally:
            trainer.close()
    assert heads[0].abs().max() > 0.0
    assert torch.equal(*heads)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", output_loading_info=True
    )
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys"))
    assert sum(p.numel() for p in loaded.parameters()) > 0


@pytest.mark.parametrize("reset_every", [0, 2])
def test_a_reference_of_adapters_is_the_base_until_it_is_reset(
    tmp_path: Path, recipe: Recipe, reset_every: int
) -> None:
    torch.set_num_threads(1)
    build_tiny_model(tmp_path / "model", ["0123456789+=?"], TINY, seed=0)
    mesh = build_mesh(ParallelConfig())
    store = RunCheckpoints(tmp_path / "checkpoints", mesh)
    seat = Seat(replica_index=0, num_replicas=1, mesh=mesh)
    trainer = Trainer(
        with_adapters(with_reset(recipe, reset_every)), tmp_path / "model", seat, store, None
    )
    try:
        trained = {n: p for n, p in trainer._model.named_parameters() if ".lora_" in n}
        loop = Loop(tmp_path / "model", reset_every, {n: p.detach() for n, p in trained.items()})
        for step in range(4):
            take(trainer, step)
            loop.step()
        for name, expected in loop.factors.items():
            torch.testing.assert_close(trained[name].double(), expected, rtol=1e-4, atol=1e-5)
        assert max(p.abs().max() for n, p in trained.items() if ".lora_B." in n) > 0.01
        kept = {name for name in weights_of(trainer._learner) if name.startswith("companion.")}
        assert kept == ({f"companion.{name}" for name in trained} if reset_every else set())
    finally:
        trainer.close()


@pytest.mark.parametrize("prepare", [replace, with_adapters], ids=["weights", "adapters"])
def test_a_reference_that_was_reset_is_there_again_after_a_restart(
    tmp_path: Path, recipe: Recipe, prepare: Callable[[Recipe], Recipe]
) -> None:
    torch.set_num_threads(1)
    build_tiny_model(tmp_path / "model", ["0123456789+=?"], TINY, seed=0)
    mesh = build_mesh(ParallelConfig())
    seat = Seat(replica_index=0, num_replicas=1, mesh=mesh)
    moving = prepare(with_reset(recipe, 2))

    def steps_of(name: str, steps: range) -> dict[str, torch.Tensor]:
        store = RunCheckpoints(tmp_path / name, mesh)
        trainer = Trainer(moving, tmp_path / "model", seat, store, None)
        try:
            for step in steps:
                take(trainer, step)
            trainer.save(b"")
            return {n: p.detach().clone() for n, p in trainer._model.named_parameters()}
        finally:
            trainer.close()

    whole = steps_of("whole", range(4))
    steps_of("parts", range(3))  # the reference is the policy before the last of them
    resumed = steps_of("parts", range(3, 4))
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
