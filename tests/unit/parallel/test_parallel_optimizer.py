"""Optimizers and schedules against torch's own and against steps worked out by hand."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from cosmos_core.config import config_from_json, config_to_json
from cosmos_parallel import (
    AdamW8bitConfig,
    AdamWConfig,
    CheckpointStore,
    Ema,
    EmaConfig,
    Learner,
    LearnerConfig,
    MuonConfig,
    OptimizerError,
    ParallelConfig,
    ScheduleConfig,
    SgdConfig,
    TorchOptimizerConfig,
    TrainingMesh,
    build_mesh,
    deterministic,
    init_distributed,
    open_store,
    seed_everything,
    shard_module,
    shutdown_distributed,
)
from cosmos_parallel.gradients import local_part


@dataclass(frozen=True)
class Sums:
    total: torch.Tensor
    weight: torch.Tensor
    metrics: dict = field(default_factory=dict)


class Tiny(nn.Module):
    """An embedding, a matrix, a vector and a head: every kind of parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(8, 16)
        self.mix = nn.Linear(16, 24)
        self.lm_head = nn.Linear(24, 8, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.mix(self.embed_tokens(ids)).tanh())


def loss(model: nn.Module, ids: torch.Tensor) -> Sums:
    losses = nn.functional.cross_entropy(model(ids[:-1]), ids[1:], reduction="sum")
    return Sums(losses, torch.tensor(float(len(ids) - 1)))


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 8, (9,), generator=generator) for _ in range(6)]


def trained(config, **settings) -> tuple[Tiny, Learner]:
    model = Tiny()
    learner = Learner(model, LearnerConfig(optimizer=config, max_grad_norm=math.inf, **settings))
    for batch in batches():
        learner.step([batch], loss)
    return model, learner


def by_hand(optimizers) -> Tiny:
    model = Tiny()
    parts = optimizers(model)
    for batch in batches():
        sums = loss(model, batch)
        (sums.total / sums.weight).backward()
        for part in parts:
            part.step()
            part.zero_grad()
    return model


def assert_same(mine: nn.Module, theirs: nn.Module, tolerance: float = 1e-6) -> None:
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("RMSprop", {"alpha": 0.9, "momentum": 0.5}),
        ("NAdam", {"eps": 1e-6, "betas": (0.8, 0.9)}),
        ("Adagrad", {}),
        ("Adafactor", {"weight_decay": 0.1}),
    ],
)
def test_any_optimizer_of_torch_takes_its_own_steps(name, options):
    config = TorchOptimizerConfig(name=name, lr=1e-2, options=options)
    model, _ = trained(config)
    make = getattr(torch.optim, name)
    assert_same(model, by_hand(lambda m: [make(m.parameters(), lr=1e-2, **options)]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TorchOptimizerConfig(name="Adan"), "no 'Adan'.*it has.*RMSprop"),
        (lambda: TorchOptimizerConfig(name="LBFGS"), "takes gradients alone"),
        (lambda: TorchOptimizerConfig(name="Adagrad", options={"rho": 1}), "takes no rho; it tak"),
        (lambda: TorchOptimizerConfig(options={"betas": (0.9, 2.0)}), "Adam with .* beta"),
        (lambda: TorchOptimizerConfig(options={"betas": 0.9}), "Adam with .*'betas': 0.9"),
        (lambda: TorchOptimizerConfig(options={"betas": (0.9,)}), "with .*'betas': .0.9"),
        (
            lambda: TorchOptimizerConfig(options={"fused": True, "foreach": True}),
            "Adam with .*fused",
        ),
        (lambda: TorchOptimizerConfig(options={"differentiable": True}), "takes no differentiable"),
        (lambda: TorchOptimizerConfig(lr=-1.0), "Adam: lr is -1.0; it must be 0 or more"),
        (lambda: AdamW8bitConfig(block_size=0), "adamw_8bit: block_size is 0"),
        (lambda: AdamWConfig(lr=-1e-5), "adamw: lr is -1e-05"),
        (lambda: AdamWConfig(lr=float("nan")), "adamw: lr is nan"),
        (lambda: AdamWConfig(betas=(0.9, 1.0)), "adamw: 1.0 is no factor of a running mean"),
        (lambda: SgdConfig(weight_decay=-0.1), "sgd: weight_decay is -0.1"),
        (lambda: AdamW8bitConfig(eps=-1.0), "adamw_8bit: eps is -1.0"),
        (lambda: MuonConfig(momentum=1.5), "muon: 1.5 is no factor"),
    ],
)
def test_optimizers_options_and_rates_that_there_are_not_are_refused(make, message):
    with pytest.raises(OptimizerError, match=message):
        make()


def test_a_value_head_is_no_matrix_for_muon():
    shapes = {"layers.0.weight": (4, 4), "lm_head.weight": (8, 4), "value_head.weight": (1, 4)}
    named = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    muon, adamw = MuonConfig().build(named).param_groups
    assert [id(p) for p in muon["params"]] == [id(named["layers.0.weight"])]
    assert [id(p) for p in adamw["params"]] == [id(p) for p in list(named.values())[1:]]


def test_muon_takes_the_matrices_and_adamw_the_rest():
    model, learner = trained(MuonConfig(lr=1e-2, weight_decay=0.05))
    settings = {"lr": 1e-2, "weight_decay": 0.05}
    expected = by_hand(
        lambda m: [
            torch.optim.Muon([m.mix.weight], adjust_lr_fn="match_rms_adamw", **settings),
            torch.optim.AdamW(
                [m.embed_tokens.weight, m.mix.bias, m.lm_head.weight], betas=(0.9, 0.95), **settings
            ),
        ]
    )
    assert_same(model, expected)
    kinds = {name: sorted(learner.optimizer.state[p]) for name, p in model.named_parameters()}
    assert kinds["mix.weight"] == ["momentum_buffer"]
    assert kinds["lm_head.weight"] == ["exp_avg", "exp_avg_sq", "step"]


def test_muon_orthogonalises_each_expert_of_a_stack_by_itself():
    shapes = {
        "layers.0.mlp.experts.gate_up_proj": (3, 8, 4),
        "layers.0.mlp.experts.gate_up_proj_bias": (3, 8),  # a stack too, of no matrices
        "layers.0.mlp.router.weight": (3, 4),
        "layers.0.conv1d.weight": (8, 1, 4),
    }
    settings = {"lr": 1e-2, "weight_decay": 0.05}
    generator = torch.Generator().manual_seed(0)
    begun = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    named = {name: nn.Parameter(value.clone()) for name, value in begun.items()}
    optimizer = MuonConfig(**settings).build(named)
    experts = [nn.Parameter(matrix.clone()) for matrix in begun[next(iter(begun))]]
    reference = torch.optim.Muon(experts, adjust_lr_fn="match_rms_adamw", **settings)
    for _ in range(3):
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        stack, *_ = named.values()
        for expert, gradient in zip(experts, stack.grad, strict=True):
            expert.grad = gradient.clone()
        optimizer.step()
        reference.step()
    assert torch.equal(stack.detach(), torch.stack([expert.detach() for expert in experts]))
    kinds = [sorted(optimizer.state[parameter]) for parameter in named.values()]
    adamw = ["exp_avg", "exp_avg_sq", "step"]
    assert kinds == [["momentum_buffer"], adamw, ["momentum_buffer"], adamw]


def test_one_learning_rate_schedule_moves_every_part_of_a_joined_optimizer():
    schedule = ScheduleConfig(num_warmup_steps=12)
    _, learner = trained(MuonConfig(lr=1.0, schedule=schedule))
    assert [group["lr"] for group in learner.optimizer.param_groups] == [0.5, 0.5]


def test_eight_bit_adamw_stays_near_adamw_and_keeps_its_state_in_bytes():
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    models = [nn.Linear(64, 128, bias=False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    learners = [
        Learner(model, LearnerConfig(optimizer=config, max_grad_norm=math.inf))
        for model, config in zip(
            models, [AdamWConfig(lr=1e-3), AdamW8bitConfig(lr=1e-3)], strict=True
        )
    ]

    def square(model: nn.Module, inputs: torch.Tensor) -> Sums:
        return Sums((model(inputs) - 1).square().sum(), torch.tensor(float(len(inputs))))

    for _ in range(20):
        inputs = torch.randn(32, 64)
        reports = [learner.step([inputs], square) for learner in learners]
    moved = (models[0].weight - models[1].weight).abs().max().item()
    assert 0 < moved < 2e-3  # of 20 updates of 1e-3
    assert reports[1].loss == pytest.approx(reports[0].loss, rel=0.02)
    (state,) = learners[1].optimizer.state.values()
    assert state["exp_avg"].codes.dtype == torch.uint8
    assert reports[1].lr == pytest.approx(1e-3)


@pytest.mark.parametrize(
    "config",
    [
        MuonConfig(lr=1e-2),
        TorchOptimizerConfig(name="NAdam", lr=1e-2),
        AdamW8bitConfig(lr=1e-2),
    ],
    ids=lambda config: config.kind,
)
def test_a_checkpoint_holds_the_state_of_every_optimizer(config, tmp_path):
    if config.kind == "adamw_8bit":
        pytest.importorskip("torchao")

    def square(model: nn.Module, inputs: torch.Tensor) -> Sums:
        return Sums((model(inputs) - 1).square().sum(), torch.tensor(float(len(inputs))))

    def fresh() -> Learner:
        torch.manual_seed(0)
        return Learner(nn.Linear(64, 128), LearnerConfig(optimizer=config))

    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    learner = fresh()
    for _ in range(3):
        learner.step([inputs], square)
    store = CheckpointStore(tmp_path, learner.mesh)
    store.save(3, learner, b"")
    expected = [learner.step([inputs], square).loss for _ in range(3)]
    resumed = fresh()
    store.load(resumed)
    found = [resumed.step([inputs], square).loss for _ in range(3)]
    assert found == expected  # moments of 8 bits are written down in float, and found again
    store.close()


@pytest.mark.parametrize(
    "config",
    [
        AdamWConfig(betas=(0.8, 0.9)),
        SgdConfig(momentum=0.5),
        TorchOptimizerConfig(name="RMSprop", options={"alpha": 0.5, "centered": True}),
        TorchOptimizerConfig(name="RAdam", options={"betas": (0.8, 0.9)}),
        AdamW8bitConfig(block_size=128),
        MuonConfig(adamw_names=("head",)),
    ],
    ids=lambda config: config.kind,
)
def test_every_optimizer_can_be_written_in_a_recipe(config):
    learner = LearnerConfig(optimizer=config, ema=EmaConfig(decay=0.9))
    assert config_from_json(LearnerConfig, config_to_json(learner)) == learner


@pytest.mark.parametrize(
    ("update", "factor"),
    # two of warm-up, stable until update 6, then four of decay to 0.2
    [(0, 0.5), (1, 1.0), (2, 1.0), (6, 1.0), (7, 0.8), (8, 0.6), (9, 0.4), (10, 0.2), (99, 0.2)],
)
def test_warm_up_stable_decay(update, factor):
    schedule = ScheduleConfig(
        shape="wsd", num_warmup_steps=2, num_steps=10, num_decay_steps=4, final_factor=0.2
    )
    assert schedule.factor(update) == pytest.approx(factor)


@pytest.mark.parametrize("final_factor", [-0.1, math.nan, math.inf])
def test_a_rate_below_0_is_refused(final_factor):
    with pytest.raises(ValueError, match=rf"final_factor is {final_factor}; it must be 0 or more"):
        ScheduleConfig(shape="linear", num_steps=10, final_factor=final_factor)


@pytest.mark.parametrize("num_decay_steps", [0, 9])
def test_a_decay_longer_than_what_the_warm_up_leaves_is_refused(num_decay_steps):
    with pytest.raises(ValueError, match="num_decay_steps from 1 to 8"):
        ScheduleConfig(
            shape="wsd", num_warmup_steps=2, num_steps=10, num_decay_steps=num_decay_steps
        )


def test_the_average_of_weights_is_that_of_the_formula_and_the_weights_come_back():
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    config = LearnerConfig(
        optimizer=SgdConfig(lr=1.0), ema=EmaConfig(decay=0.75, ramp=False), max_grad_norm=math.inf
    )
    learner = Learner(model, config)

    def slope(module: nn.Module, batch: torch.Tensor) -> Sums:
        return Sums(module(batch).sum(), torch.ones(()))

    average = 1.0
    for weight in (0.0, -1.0, -2.0):  # each step subtracts the gradient, 1
        learner.step([torch.ones(1, 1)], slope)
        average = 0.75 * average + 0.25 * weight
    assert isinstance(learner.ema, Ema)
    assert learner.ema.averages["weight"].item() == pytest.approx(average)
    with learner.ema.in_place():
        assert model.weight.item() == pytest.approx(average)
    assert model.weight.item() == -2.0


def test_the_ramp_forgets_the_first_weights_sooner():
    assert [EmaConfig(decay=0.5).decay_at(update) for update in (0, 8, 100)] == [0.1, 0.5, 0.5]
    with pytest.raises(ValueError, match="decay is 1"):
        EmaConfig(decay=1.0)


def test_activations_kept_in_host_memory_change_nothing():
    plain, _ = trained(AdamWConfig(lr=1e-2))
    offloaded, _ = trained(AdamWConfig(lr=1e-2), offload_activations=True)
    assert_same(plain, offloaded, 0.0)


def test_a_seeded_deterministic_run_repeats_bit_for_bit():
    def run() -> list[torch.Tensor]:
        seed_everything(3)
        with deterministic():
            assert torch.are_deterministic_algorithms_enabled()
            model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
            learner = Learner(model, LearnerConfig())
            for _ in range(3):
                learner.step(
                    [torch.randn(4, 8)],
                    lambda m, x: Sums(m(x).square().sum(), torch.tensor(4.0)),
                )
        return [parameter.detach().clone() for parameter in model.parameters()]

    first, second = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(("dtypes", "is_fused"), [((0, 0), True), ((0, 1), False)])
def test_adamw_is_one_kernel_where_one_takes_all_parameters(dtypes, is_fused):
    kinds = (torch.float32, torch.float64)
    named = {str(i): nn.Parameter(torch.ones(3, dtype=kinds[d])) for i, d in enumerate(dtypes)}
    optimizer = AdamWConfig(lr=0.1, weight_decay=0.5).build(named)
    assert bool(optimizer.param_groups[0]["fused"]) == is_fused
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter in named.values():  # decayed by a twentieth, then one step of the rate
        assert parameter.tolist() == pytest.approx([0.85] * 3, rel=1e-6)


def test_moments_in_8_bits_of_sharded_bfloat16_weights_are_those_of_whole_ones():
    pytest.importorskip("torchao")

    def trained(mesh: TrainingMesh | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 8)).to(torch.bfloat16)
        if mesh is not None:
            shard_module(model, mesh, blocks=[])
        optimizer = AdamW8bitConfig(lr=0.1).build(dict(model.named_parameters()))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 96, dtype=torch.bfloat16)).float().square().sum().backward()
            optimizer.step()
        return [local_part(parameter.detach()) for parameter in model.parameters()]

    process = init_distributed(0, 1, store=open_store("127.0.0.1", 0, hosting=True))
    try:
        found = trained(build_mesh(ParallelConfig(), process))
    finally:
        shutdown_distributed()
    for one, other in zip(found, trained(None), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["Adafactor", "Rprop"])
def test_optimizers_that_take_whole_parameters_alone_are_refused_on_several_ranks(name):
    process = init_distributed(0, 1, store=open_store("127.0.0.1", 0, hosting=True))
    try:
        model = shard_module(nn.Linear(8, 4), build_mesh(ParallelConfig(), process), blocks=[])
        with pytest.raises(OptimizerError, match=f"{name} .* ranks, as weight is: train on"):
            TorchOptimizerConfig(name=name).build(dict(model.named_parameters()))
    finally:
        shutdown_distributed()
