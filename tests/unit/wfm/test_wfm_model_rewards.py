"""Model rewards, loaded from tiny random models of the classes that the real ones have."""

import asyncio
import base64
import io
import json
import shutil
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from cosmos_wfm import RewardRequest, RewardServiceError, WfmConfigError
from cosmos_wfm.model_rewards import MODEL_REWARDS, load_model_reward
from cosmos_wfm.model_rewards.gen_eval import FoundObject, share_right
from cosmos_wfm.model_rewards.judge import mark_of
from cosmos_wfm.model_rewards.ocr import edit_distance, text_likeness
from cosmos_wfm.model_rewards.pictures import cropped, normalised
from cosmos_wfm.model_rewards.qwen import vision_patches
from cosmos_wfm.tiny.encoders import qwen_encoder
from cosmos_wfm.tiny.tokenizers import clip_tokenizer, qwen_tokenizer

PROMPTS = ("a red square", "a blue disc beside a box")
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def request_of(prompts=PROMPTS, frames=0, size=(40, 56), **extra):
    draw = np.random.default_rng(0)
    shape = (len(prompts), 3, frames, *size) if frames else (len(prompts), *size, 3)
    return RewardRequest(
        prompts=tuple(prompts),
        rewards={"it": 1.0},
        media_type="video" if frames else "image",
        media=draw.integers(64, 192, shape, dtype=np.uint8),
        extra=extra,
    )


def vision_tokenizer(*more):
    """Return Qwen's tokenizer, whose tokens of vision are found within a text."""
    tokenizer = qwen_tokenizer()
    vision = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": [*vision, *more]})
    return tokenizer


@pytest.fixture(scope="module")
def clip_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("clip")
    tokenizer = clip_tokenizer()
    tokenizer.save_pretrained(directory)
    text = {**TEXT, "vocab_size": len(tokenizer), "eos_token_id": len(tokenizer) - 1}
    config = transformers.CLIPConfig(
        text_config=text,
        vision_config={**TEXT, "image_size": 32, "patch_size": 16},
        projection_dim=8,
    )
    torch.manual_seed(0)
    transformers.CLIPModel(config).eval().save_pretrained(directory)
    return directory


def clip_logits(directory, pictures, prompts):
    """Compute logits by transformers' own path from pictures and texts."""
    model = transformers.CLIPModel.from_pretrained(directory).eval()
    tokens = clip_tokenizer()(list(prompts), padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(**tokens, pixel_values=pictures).logits_per_image.diagonal()


def test_pickscore_is_transformers_own_logit_over_26(clip_dir):
    request = request_of()
    pil = transformers.models.clip.image_processing_pil_clip.CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    pictures = pil([Image.fromarray(m) for m in request.media], return_tensors="pt")["pixel_values"]

    mine = normalised(cropped(request.pixels()[:, :, 0], 32))
    # PIL rounds between its two passes, which costs up to two steps of 8 bits.
    torch.testing.assert_close(mine, pictures, atol=2.1 / 255 / 0.26, rtol=0)
    scores = load_model_reward("pickscore", str(clip_dir))(request)["pickscore"]
    expected = clip_logits(clip_dir, mine, PROMPTS) / 26.0
    assert scores == pytest.approx(expected.tolist(), abs=1e-6)


def test_a_reward_without_the_files_of_its_tokenizer_is_refused(clip_dir, tmp_path):
    shutil.copytree(clip_dir, tmp_path / "clip")
    (tmp_path / "clip" / "tokenizer.json").unlink()

    with pytest.raises(WfmConfigError, match=r"pickscore: .* has no vocabulary"):
        load_model_reward("pickscore", str(tmp_path / "clip"))


def test_hpsv2_pads_and_is_the_cosine(clip_dir):
    request = request_of()
    scale = transformers.CLIPModel.from_pretrained(clip_dir).logit_scale.exp().item()

    scores = load_model_reward("hpsv2", str(clip_dir))(request)["hpsv2"]
    # 40 x 56 becomes 23 x 32, with 4 black rows above and 5 below.
    small = nn.functional.interpolate(
        request.pixels()[:, :, 0], size=(23, 32), mode="bicubic", antialias=True
    )
    whole = torch.zeros(2, 3, 32, 32)
    whole[:, :, 4:27] = (small * 255).round().clamp(0, 255) / 255
    expected = clip_logits(clip_dir, normalised(whole), PROMPTS) / scale
    assert scores == pytest.approx(expected.tolist(), abs=1e-6)


def test_image_reward_is_a_head_over_blip(tmp_path):
    tokenizer = qwen_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    text = {**TEXT, "vocab_size": len(tokenizer), "encoder_hidden_size": 16}
    config = transformers.BlipConfig(
        text_config=text, vision_config={**TEXT, "image_size": 32, "patch_size": 16}
    )
    transformers.BlipForImageTextRetrieval(config).bfloat16().save_pretrained(tmp_path)
    widths = (16, 1024, 128, 64, 16, 1)
    head = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))
    save_file(head.state_dict(), tmp_path / "head.safetensors")
    reward = load_model_reward("image_reward", str(tmp_path))

    both = reward(request_of())["image_reward"]
    # Another prompt, and another picture, change a score; a sample's neighbours do not.
    assert reward(request_of((PROMPTS[1], PROMPTS[1])))["image_reward"][1] == pytest.approx(both[1])
    assert reward(request_of((PROMPTS[1], PROMPTS[1])))["image_reward"][0] != both[0]
    assert len(set(both)) == 2
    (tmp_path / "head.safetensors").unlink()
    with pytest.raises(WfmConfigError, match=r"image_reward: .*head.safetensors"):
        load_model_reward("image_reward", str(tmp_path))


def test_patches_are_those_of_transformers_processor():
    pil = transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil()
    pixels = request_of(size=(84, 56)).pixels()[0].permute(1, 0, 2, 3)
    picture = Image.fromarray((pixels[0].permute(1, 2, 0).numpy() * 255).round().astype(np.uint8))
    theirs = pil([picture], return_tensors="pt")

    patches, grid = vision_patches(pixels, patch=14, merge=2, temporal=2)
    assert grid.tolist() == theirs["image_grid_thw"][0].tolist() == [1, 6, 4]
    torch.testing.assert_close(patches, theirs["pixel_values"], atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def qwen2_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2")
    tokenizer = vision_tokenizer("<|Reward|>", "<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")
    tokenizer.save_pretrained(directory)
    number = tokenizer.get_vocab()
    text = {
        **TEXT,
        "vocab_size": len(tokenizer),
        "num_key_value_heads": 2,
        "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
    }
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 1}
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=number["<|vision_start|>"],
        image_token_id=number["<|image_pad|>"],
        video_token_id=number["<|video_pad|>"],
    )
    torch.manual_seed(0)
    transformers.Qwen2VLForConditionalGeneration(config).bfloat16().save_pretrained(directory)
    return directory


def test_hpsv3_reads_mean_and_deviation_at_its_token(qwen2_dir):
    head = nn.Sequential(
        nn.Linear(16, 1024),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(1024, 16),
        nn.ReLU(),
        nn.Linear(16, 2),
    )
    save_file(head.state_dict(), qwen2_dir / "head.safetensors")
    reward = load_model_reward("hpsv3", str(qwen2_dir))

    scores = reward(request_of())
    alone = reward(request_of(PROMPTS[:1]))
    assert scores["hpsv3"][0] == pytest.approx(alone["hpsv3"][0], abs=1e-5)
    assert len(set(scores["hpsv3"] + scores["hpsv3_log_deviation"])) == 4


def test_video_align_standardises_three_marks_and_adds_them(qwen2_dir):
    save_file({"weight": torch.full((1, 16), 0.1)}, qwen2_dir / "head.safetensors")
    plain = load_model_reward("video_align", str(qwen2_dir))(request_of(frames=3))
    settings = {"means": {"vq_reward": 2.0}, "deviations": {"vq_reward": 4.0}}
    (qwen2_dir / "reward.json").write_text(json.dumps(settings))
    told = load_model_reward("video_align", str(qwen2_dir))(request_of(frames=3))

    assert told["vq_reward"] == pytest.approx([(v - 2.0) / 4.0 for v in plain["vq_reward"]])
    parts = zip(told["vq_reward"], told["mq_reward"], told["ta_reward"], strict=True)
    assert told["overall_reward"] == pytest.approx([sum(marks) for marks in parts])
    (qwen2_dir / "reward.json").write_text('{"instruction": "no token"}')
    with pytest.raises(WfmConfigError, match=r"VQ_reward.* is 0 times"):
        load_model_reward("video_align", str(qwen2_dir))(request_of(frames=3))


def test_reason1_compares_yes_and_no(tmp_path):
    tokenizer = vision_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    qwen_encoder(tokenizer, 16, 1).bfloat16().save_pretrained(tmp_path)
    scores = load_model_reward("cosmos_reason1", str(tmp_path))(request_of(frames=4))

    for row in range(2):
        difference = scores["yes_logit"][row] - scores["no_logit"][row]
        chance = 1 / (1 + np.exp(-difference))
        assert scores["prediction"][row] == pytest.approx(chance, abs=1e-6)
        assert scores["no_score"][row] == pytest.approx(1 - chance, abs=1e-6)


def test_text_is_read_and_compared(tmp_path):
    tokenizer = qwen_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    decoder = transformers.TrOCRConfig(
        vocab_size=len(tokenizer),
        d_model=16,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=16,
        decoder_start_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        cross_attention_hidden_size=16,
    )
    encoder = transformers.ViTConfig(**TEXT, image_size=32, patch_size=16)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 0, 1
    torch.manual_seed(0)
    transformers.VisionEncoderDecoderModel(config).save_pretrained(tmp_path)
    reward = load_model_reward("ocr", str(tmp_path))

    scores = reward(request_of(('a sign "hello"', 'a wall "no"')))["ocr_reward"]
    assert all(0.0 <= score <= 1.0 for score in scores)
    with pytest.raises(WfmConfigError, match="no text in quotation marks"):
        reward(request_of())


@pytest.mark.parametrize(
    ("read", "wanted", "score"),
    [
        ("Hello", "hello", 1.0),
        ("oh, Hello there", "hello", 1.0),  # within
        ("hallo", "hello", 0.8),
        ("helo", "hello", 0.8),
        ("", "hello", 0.0),
        ("something else altogether", "hello", 0.0),  # no less than 0
        ("h e l l o", "hell o", 1.0),  # spaces do not count
    ],
)
def test_texts_are_alike_by_edits(read, wanted, score):
    assert text_likeness(read, wanted) == pytest.approx(score)


def test_edit_distance_is_levenshteins():
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("", "abc") == edit_distance("abc", "") == 3


def test_gen_eval_takes_what_a_detector_sees(tmp_path):
    config = transformers.YolosConfig(
        **TEXT, image_size=[64, 64], patch_size=16, num_detection_tokens=5, num_labels=3
    )
    torch.manual_seed(0)
    transformers.YolosForObjectDetection(config).bfloat16().save_pretrained(tmp_path)
    includes = [[{"class": "LABEL_0", "count": 1}], [{"class": "LABEL_1", "count": 2}]]
    reward = load_model_reward("gen_eval", str(tmp_path))

    scores = reward(request_of(geneval_includes=includes))
    assert scores.keys() == {"gen_eval_score", "gen_eval_strict"}
    assert all(score in (0.0, 1.0) for score in scores["gen_eval_score"])
    with pytest.raises(ValueError, match="geneval_includes"):
        reward(request_of())


DOGS = (
    FoundObject(name="dog", colour="black", x=0.2, y=0.5),
    FoundObject(name="dog", colour="white", x=0.4, y=0.6),
    FoundObject(name="car", colour="red", x=0.7, y=0.1),
)


@pytest.mark.parametrize(
    ("wanted", "share"),
    [
        ([{"class": "dog", "count": 2}], 1.0),
        ([{"class": "dog", "count": 3}], 0.0),
        ([{"class": "dog"}, {"class": "cat"}], 0.5),
        ([{"class": "dog", "color": "white"}], 1.0),
        ([{"class": "car", "color": "blue"}], 0.5),  # it is there, but red
        ([{"class": "dog", "position": ["left of", 1]}, {"class": "car"}], 1.0),
        ([{"class": "dog", "position": ["above", 1]}, {"class": "car"}], 2 / 3),
        ([], 1.0),
    ],
)
def test_demands_that_are_met_are_counted(wanted, share):
    assert share_right(wanted, DOGS) == pytest.approx(share)


class JudgeServer:
    """A server with OpenAI's chat that gives a mark for how red a picture is."""

    def __init__(self):
        self.asked = []
        self.answer = ""
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._started.wait(30)

    async def _serve(self):
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        self._stop, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self._started.set()
        await self._stop.wait()
        server.close()

    async def _talk(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            (
                int(line[15:])
                for line in head.splitlines()
                if line.lower().startswith("content-length")
            ),
            0,
        )
        body = await reader.readexactly(length)
        answer = self._chat(json.loads(body)) if length else {"data": [{"id": "seer"}]}
        data = json.dumps(answer).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        writer.close()

    def _chat(self, body):
        image, text = body["messages"][0]["content"]
        data = base64.b64decode(image["image_url"]["url"].partition(",")[2])
        red = np.asarray(Image.open(io.BytesIO(data)))[..., 0].mean() / 25.5
        self.asked.append((body["model"], text["text"], red))
        return {"choices": [{"message": {"content": self.answer or f"I say {red:.3f}."}}]}

    def stop(self):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)


def test_a_judge_is_shown_the_picture_and_its_mark_is_read():
    server = JudgeServer()
    try:
        request = request_of()
        judge = load_model_reward("judge", server.url)
        scores = judge(request)["judge"]
        assert scores == pytest.approx(
            (request.media[..., 0].mean((1, 2)) / 255).tolist(), abs=1e-4
        )
        assert [asked[0] for asked in server.asked] == ["seer", "seer"]
        assert all(p in asked[1] for p, asked in zip(PROMPTS, server.asked, strict=True))
        server.answer = "no idea"
        with pytest.raises(RewardServiceError, match="'no idea' has no number"):
            judge(request)
    finally:
        server.stop()
    with pytest.raises(RewardServiceError, match="judge: http"):
        load_model_reward("judge", server.url)(request_of())


def test_marks_are_tenths_at_most_one():
    assert mark_of("7") == 0.7
    assert mark_of("about 8.5/10") == 0.85
    assert mark_of("11") == 1.0


def test_a_reward_that_is_none_is_refused():
    with pytest.raises(WfmConfigError, match="beauty is no model reward; there are cosmos_reason1"):
        load_model_reward("beauty", "x")
    with pytest.raises(WfmConfigError, match="say where it is, as ocr=DIRECTORY"):
        load_model_reward("ocr", "")


@pytest.mark.parametrize("name", sorted(MODEL_REWARDS.keys() - {"judge"}))
def test_a_directory_without_a_model_is_refused_by_name(name, tmp_path):
    with pytest.raises(WfmConfigError, match=str(tmp_path)):
        load_model_reward(name, str(tmp_path))
