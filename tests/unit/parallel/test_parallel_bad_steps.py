"""Steps that must not be taken: named, counted, written down, and an end to them."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from cosmos_parallel import (
    AdamW8bitConfig,
    AdamWConfig,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointStore,
    Learner,
    LearnerConfig,
    MuonConfig,
    NonFiniteStepError,
    ParallelConfig,
    SampleLengthError,
    SgdConfig,
    TokenIdError,
    TorchOptimizerConfig,
    build_mesh,
    load_causal_lm,
)
from cosmos_parallel.learner_state import restore, state_to_fill


@dataclass(frozen=True)
class Sums:
    total: torch.Tensor
    weight: torch.Tensor
    metrics: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Rows:
    values: torch.Tensor
    names: tuple[str, ...]


class Root(nn.Module):
    """y = sqrt(w) x: at w = 0 the value is finite and the gradient is not."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(value))
        self.bias = nn.Parameter(torch.tensor(0.0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.w.sqrt() * values + self.bias


class RootOfProduct(nn.Module):
    """y = sqrt(w x): at x = 0 the value is finite and the gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return (self.w * values).sqrt()


def summed(model: nn.Module, batch: Rows) -> Sums:
    return Sums(model(batch.values).sum(), torch.tensor(float(len(batch.values))))


GOOD = Rows(torch.tensor([1.0, 2.0]), ("prompt 1 sample 0", "prompt 1 sample 1"))
BAD = Rows(torch.tensor([math.nan]), ("prompt 7 sample 3",))


def learner_of(model: nn.Module, **settings) -> Learner:
    return Learner(model, LearnerConfig(optimizer=SgdConfig(lr=0.1), **settings))


def test_a_loss_that_is_not_finite_names_its_samples_and_its_batch_is_written_down(tmp_path):
    model = Root(1.0)
    learner = learner_of(model, dump_directory=tmp_path / "skipped")
    report = learner.step([GOOD, BAD], summed)
    assert report.outcome == "non_finite"
    assert report.num_skipped == 1
    assert report.problem.startswith("micro-batch 1 (prompt 7 sample 3) has loss nan; written to")
    assert (model.w.item(), learner.num_updates) == (1.0, 0)
    found = torch.load(tmp_path / "skipped" / "skipped-0001-rank-0.pt", weights_only=False)
    assert [batch.names for batch in found["batches"]] == [BAD.names]
    good = learner.step([GOOD], summed)
    assert (good.outcome, good.num_skipped, good.problem) == ("updated", 1, "")


def test_what_another_replica_has_written_down_stays(tmp_path):
    others = [Rows(torch.tensor([math.nan]), (name,)) for name in ("mine", "theirs")]
    for batch in others:
        learner_of(Root(1.0), dump_directory=tmp_path).step([batch], summed)
    files = [tmp_path / "skipped-0001-rank-0.pt", tmp_path / "skipped-0001-rank-0.1.pt"]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    for file, batch in zip(files, others, strict=True):
        (found,) = torch.load(file, weights_only=False)["batches"]
        assert found.names == batch.names


def test_a_batch_that_cannot_be_written_down_costs_no_run(tmp_path):
    (tmp_path / "file").touch()
    learner = learner_of(Root(1.0), dump_directory=tmp_path / "file" / "skipped")
    report = learner.step([BAD], summed)
    assert (report.outcome, report.num_skipped) == ("non_finite", 1)
    assert f"not written to {tmp_path / 'file' / 'skipped'}: " in report.problem


def test_what_was_skipped_is_counted_on_after_a_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, build_mesh(ParallelConfig()))
    learner = learner_of(Root(1.0), max_non_finite_steps=2)
    for batch in (BAD, GOOD, BAD, BAD):
        learner.step([batch], summed)
    store.save(4, learner)
    resumed = learner_of(Root(1.0), max_non_finite_steps=2)
    store.load(resumed)
    assert (resumed.num_skipped, resumed.num_skipped_in_a_row) == (3, 2)
    with pytest.raises(NonFiniteStepError, match="3 steps in a row"):
        resumed.step([BAD], summed)
    store.close()


def test_a_checkpoint_that_does_not_say_what_was_skipped_is_read(tmp_path):
    mesh = build_mesh(ParallelConfig())
    store = CheckpointStore(tmp_path, mesh)
    learner = learner_of(Root(1.0))
    learner.step([GOOD], summed)
    path = store.save(1, learner)
    saved = dict(FileSystemReader(path).read_metadata().state_dict_metadata)
    del saved["num_skipped"], saved["num_skipped_in_a_row"]
    state = state_to_fill(learner, mesh.process, saved, path)
    assert "num_updates" in state
    assert not {"num_skipped", "num_skipped_in_a_row"} & state.keys()
    learner.step([BAD], summed)
    restore(learner, mesh.process, state)
    assert (learner.num_skipped, learner.num_skipped_in_a_row) == (0, 0)
    store.close()


def test_a_gradient_that_is_not_finite_names_the_samples_of_its_micro_batch(tmp_path):
    learner = learner_of(RootOfProduct(), dump_directory=tmp_path)
    zero = Rows(torch.tensor([1.0, 0.0]), ("prompt 4 sample 0", "prompt 4 sample 1"))
    report = learner.step([GOOD, zero, GOOD], summed)
    assert report.outcome == "non_finite"
    assert report.problem == (
        "micro-batch 1 (prompt 4 sample 0, prompt 4 sample 1) has gradients that are not finite: w"
        f"; written to {tmp_path / 'skipped-0001-rank-0.pt'}"
    )
    found = torch.load(tmp_path / "skipped-0001-rank-0.pt", weights_only=False)
    assert [batch.names for batch in found["batches"]] == [zero.names]
    assert learner.step([GOOD], summed).grad_norm == pytest.approx((1 + 2**0.5) / 4)  # of 2 rows


def test_gradients_that_are_not_finite_in_their_sum_only_keep_every_batch(tmp_path):
    model = nn.Linear(1, 1, bias=False)
    learner = learner_of(model, dump_directory=tmp_path)
    huge = torch.full((1, 1), 3e38)

    def product(model: nn.Module, batch: torch.Tensor) -> Sums:
        return Sums(model(batch).sum(), torch.tensor(1.0))

    report = learner.step([huge, huge], product)
    words = "the gradient of each micro-batch is finite, and its sum is not: weight; written to "
    assert report.problem.startswith(words)
    found = torch.load(tmp_path / "skipped-0001-rank-0.pt", weights_only=False)
    assert len(found["batches"]) == 2


def test_infinity_counts_as_well_and_too_many_in_a_row_end_the_run_with_the_reason():
    learner = learner_of(Root(1.0), max_non_finite_steps=1)
    endless = Rows(torch.tensor([math.inf]), ("prompt 9 sample 0",))
    assert learner.step([endless], summed).outcome == "non_finite"
    with pytest.raises(NonFiniteStepError, match=r"2 steps in a row .*prompt 9 sample 0"):
        learner.step([endless], summed)


def test_an_optimizer_never_sees_a_step_that_was_skipped():
    model = Root(1.0)
    learner = Learner(model, LearnerConfig(optimizer=AdamWConfig(lr=0.1)))
    learner.step([BAD], summed)
    assert not learner.optimizer.state
    learner.step([GOOD], summed)
    assert all(value.isfinite().all() for value in learner.optimizer.state[model.w].values())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[3, 4], [5, 64]], r"token id 64 at row 1, column 1 .*ids 0 to 63"),
        ([[3, -1]], r"token id -1 at row 0, column 1"),
    ],
)
def test_a_token_beyond_the_vocabulary_is_named_with_its_place(model_directory, ids, message):
    model = load_causal_lm(model_directory("Qwen3"), build_mesh(ParallelConfig()))
    with pytest.raises(TokenIdError, match=message):
        model(input_ids=torch.tensor(ids), use_cache=False)


@pytest.mark.parametrize("kind", ["GPT2", "OPT"])
def test_a_sample_longer_than_the_learned_positions_is_refused(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    sizes |= {"ffn_dim": 16, "word_embed_proj_dim": 16} if kind == "OPT" else {}
    config = getattr(transformers, f"{kind}Config")(max_position_embeddings=8, **sizes)
    of = f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}"
    getattr(transformers, of)(config).save_pretrained(tmp_path)
    model = load_causal_lm(tmp_path, build_mesh(ParallelConfig()))
    ids = torch.full((1, 12), 5)
    with pytest.raises(SampleLengthError, match=r"sample of 12 tokens.*has learned 8 positions"):
        model(input_ids=ids, use_cache=False)
    model(input_ids=ids[:, :8], use_cache=False)
    model(input_ids=ids, position_ids=torch.arange(12)[None] % 8, use_cache=False)  # two in a row


def test_a_checkpoint_of_another_model_is_refused_by_the_name_of_a_tensor(
    model_directory, tmp_path
):
    mesh = build_mesh(ParallelConfig())
    store = CheckpointStore(tmp_path, mesh)
    store.save(0, learner_of(load_causal_lm(model_directory("Qwen3"), mesh)), b"")
    other = learner_of(load_causal_lm(model_directory("Qwen3Moe"), mesh))
    with pytest.raises(CheckpointError, match=r"of another model: model\.layers\.0\.mlp"):
        store.load(other)
    store.close()


def over_tokens(model: nn.Module, token_ids: torch.Tensor) -> Sums:
    return Sums(model(input_ids=token_ids).logits.square().sum(), torch.tensor(1.0))


@pytest.mark.parametrize("other", [MuonConfig(), SgdConfig(), TorchOptimizerConfig(name="Adamax")])
def test_a_checkpoint_of_another_optimizer_is_refused(model_directory, tmp_path, other):
    pytest.importorskip("torchao")
    mesh = build_mesh(ParallelConfig())
    store = CheckpointStore(tmp_path, mesh)
    first, second, third = (load_causal_lm(model_directory("Qwen3"), mesh) for _ in range(3))
    learner = Learner(first, LearnerConfig())
    learner.step([torch.tensor([[3, 4, 5]])], over_tokens)
    store.save(1, learner, b"")
    words = r"of another optimizer: of model\..* it has exp_avg, exp_avg_sq, step, and "
    with pytest.raises(CheckpointMismatchError, match=words + other.kind):
        store.load(Learner(second, LearnerConfig(optimizer=other)))
    assert store.load(Learner(third, LearnerConfig(optimizer=AdamW8bitConfig()))).step == 1
    store.close()
