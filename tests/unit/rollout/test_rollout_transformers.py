"""The reference engine's own parts: how a token is drawn, and what weights it refuses."""

import math
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from cosmos_rollout import (  # noqa: E402
    EngineSetup,
    EngineStartError,
    GenerationRequest,
    InProcessEngine,
    Sampling,
    TransformersConfig,
    WeightLoadError,
)
from cosmos_rollout.engines.transformers_engine import ModelDecoder, sample_token  # noqa: E402

# probabilities 0.5, 0.3, 0.15, 0.05
LOGITS = torch.log(torch.tensor([0.15, 0.5, 0.05, 0.3]))


def draw(sampling: Sampling, seed: int = 0) -> tuple[int, float]:
    return sample_token(LOGITS, sampling, torch.Generator().manual_seed(seed))


def test_greedy_takes_the_likeliest_and_reports_the_plain_softmax():
    token, logprob = draw(Sampling(temperature=0.0))
    assert (token, logprob) == (1, pytest.approx(math.log(0.5)))


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1.0, {1: 0.5, 3: 0.3, 0: 0.15, 2: 0.05}),
        (0.9, {1: 0.5 / 0.95, 3: 0.3 / 0.95, 0: 0.15 / 0.95}),
        (0.7, {1: 0.625, 3: 0.375}),  # 0.5 is less than 0.7, 0.8 is not
        (0.1, {1: 1.0}),  # the likeliest always stays
    ],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it_and_renormalises(top_p, kept):
    drawn = dict(draw(Sampling(top_p=top_p), seed) for seed in range(300))
    assert set(drawn) == set(kept)
    for token, logprob in drawn.items():
        assert logprob == pytest.approx(math.log(kept[token]), abs=1e-6)


def test_temperature_sharpens_before_anything_else():
    # squares of the probabilities, renormalised: 0.25 / 0.365 for the likeliest
    logprobs = dict(draw(Sampling(temperature=0.5), seed) for seed in range(50))
    assert logprobs[1] == pytest.approx(math.log(0.25 / 0.365), abs=1e-6)


def test_draws_follow_the_probabilities():
    generator = torch.Generator().manual_seed(0)
    tokens = [sample_token(LOGITS, Sampling(), generator)[0] for _ in range(4000)]
    for token, probability in ((1, 0.5), (3, 0.3), (0, 0.15), (2, 0.05)):
        # four standard deviations of a binomial
        margin = 4 * math.sqrt(probability * (1 - probability) / 4000)
        assert tokens.count(token) / 4000 == pytest.approx(probability, abs=margin)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_p=0.9), Sampling(temperature=0.0)])
def test_logits_that_are_no_numbers_give_a_log_prob_that_is_none(sampling, bad):
    generator = torch.Generator().manual_seed(0)
    token, logprob = sample_token(torch.tensor([0.0, bad, 1.0]), sampling, generator)
    assert 0 <= token < 3
    assert math.isnan(logprob)


def model(*, tied: bool = False):
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def weights(source, **changes) -> SimpleNamespace:
    tensors = {name: value.clone() for name, value in source.state_dict().items()}
    tensors.update(changes)
    return SimpleNamespace(version=1, tensors={n: t for n, t in tensors.items() if t is not None})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lm_head.weight": None}, r"1 tensors of the model are missing: \['lm_head.weight'\]"),
        ({"more": torch.zeros(1)}, r"that the model does not have: \['more'\]"),
        (
            {"model.norm.weight": torch.zeros(9)},
            r"model\.norm\.weight: the model has \(8,\), got \(9,\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_whole(changes, words):
    target, other = model(), model()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(WeightLoadError, match=words):
        ModelDecoder(target).load(weights(other, **changes))
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_tied_weights_need_only_one_of_their_names():
    target, other = model(tied=True), model(tied=True)
    ModelDecoder(target).load(weights(other, **{"lm_head.weight": None}))
    assert torch.equal(target.lm_head.weight, other.model.embed_tokens.weight)


async def test_a_model_that_is_not_there_is_a_start_error(tmp_path):
    with pytest.raises(EngineStartError, match="nothing-here"):
        await TransformersConfig().build(EngineSetup(model_path=tmp_path / "nothing-here"))


async def test_scores_that_are_bounded_stay_so(tmp_path):
    """torch's attention, which transformers takes by default, drops the bound of Gemma 2's."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
        attn_logit_softcapping=0.5,
    )
    config._attn_implementation = "eager"
    reference = Gemma2ForCausalLM(config).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    reference.save_pretrained(tmp_path)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        logprobs = reference(input_ids=tokens).logits.float().log_softmax(-1)[0, :-1]
    expected = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
    scorer = await TransformersConfig(dtype="float32").build_scorer(
        EngineSetup(model_path=tmp_path)
    )
    scores = await scorer.score(tokens[0].tolist(), 0)
    await scorer.aclose()
    assert scores.logprobs[1:] == pytest.approx(expected.tolist(), abs=1e-5)


COMMON = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2}
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
WIDE = {"intermediate_size": 32, "max_position_embeddings": 64, **ATTENTION}
GATED = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mistral", {**WIDE, "sliding_window": 4}),
        ("qwen3_5_text", {**WIDE, **GATED}),
        ("lfm2", {**WIDE, "layer_types": ["conv", "full_attention"]}),
        ("mamba", {"state_size": 4}),
    ],
)
async def test_models_with_other_layers_than_attention_remember_what_they_read(kind, settings):
    """Some answers end earlier than others of their prompt's length."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **COMMON, **settings)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    engine = InProcessEngine(ModelDecoder(model, context_length=64))
    prompts = {"a": (3, 4, 5, 6, 7, 8), "b": (9, 8, 7, 6, 5, 4), "c": (5, 6, 7)}
    requests = [
        GenerationRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=Sampling(max_new_tokens=4 if name == "a" else 8, seed=len(name)),
        )
        for name, prompt in prompts.items()
    ]
    samples = [sample async for sample in engine.generate(requests)]
    await engine.aclose()
    assert len(samples) == 3
    for sample in samples:
        prompt, said = prompts[sample.request_id], torch.from_numpy(sample.token_ids).long()
        with torch.no_grad():
            whole = model(input_ids=torch.tensor([[*prompt, *said]]), use_cache=False).logits[0]
        expected = whole[len(prompt) - 1 : -1].log_softmax(-1).gather(1, said[:, None])[:, 0]
        assert sample.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_model_that_the_engine_could_not_remind_of_anything_is_refused():
    config = AutoConfig.for_model("rwkv", **COMMON, attention_hidden_size=16)
    with pytest.raises(EngineStartError, match=r"in a way of its own, .*: use vLLM"):
        ModelDecoder(AutoModelForCausalLM.from_config(config), context_length=64)


def test_a_model_without_a_longest_context_wants_one():
    config = AutoConfig.for_model("mamba", **COMMON, state_size=4)
    with pytest.raises(EngineStartError, match=r"MambaForCausalLM .*: set context_length"):
        ModelDecoder(AutoModelForCausalLM.from_config(config))
