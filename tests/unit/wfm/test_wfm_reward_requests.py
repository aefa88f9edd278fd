"""Requests to a reward service as bytes, and a client against a server of a few lines."""

import io
import json
import struct
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import numpy as np
import pytest
import torch

from cosmos_wfm import (
    EnqueueTimeout,
    LatentDecoder,
    PipelineError,
    RewardClient,
    RewardRequest,
    RewardRequestError,
    RewardServiceConfig,
    RewardServiceError,
    ShardCaptionsConfig,
    UploadConfig,
    VideoCaptionsConfig,
    WfmConfigError,
    latents_of,
    load_adapter,
    media_of,
    pack_request,
    parse_request,
)
from cosmos_wfm.families.shared import wan_latents

MEDIA = np.arange(2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def body(array=MEDIA, **head):
    told = {"prompts": ["a", "b"], "reward_fn": {"x": 1.0}, "media_type": "image", **head}
    return json.dumps(told).encode() + b"\n" + npy(array)


def test_a_request_is_a_line_of_json_and_an_array():
    request = RewardRequest(
        prompts=("a", "b"),
        rewards={"x": 1.0},
        media_type="image",
        media=MEDIA,
        extra={"geneval_tags": ["t"]},
    )
    packed = pack_request(request)

    assert packed == body(geneval_tags=["t"])
    again = parse_request(packed)
    assert np.array_equal(again.media, MEDIA)
    assert (again.prompts, again.rewards, again.extra) == (
        ("a", "b"),
        {"x": 1.0},
        {"geneval_tags": ["t"]},
    )


def test_pixels_go_over_as_bytes_and_come_back_as_frames():
    pixels = torch.tensor([-1.0, 0.0, 1.0])[None, :, None, None].expand(2, 3, 4, 6)
    kind, media = media_of(pixels)
    assert (kind, media.shape, media[0, 0, 0].tolist()) == ("image", (2, 4, 6, 3), [0, 128, 255])
    image = RewardRequest(prompts=("a", "b"), rewards={"x": 1.0}, media_type=kind, media=media)
    assert image.pixels().shape == (2, 3, 1, 4, 6)
    assert image.pixels()[0, :, 0, 0, 0].tolist() == [0.0, pytest.approx(128 / 255), 1.0]

    kind, media = media_of(pixels[:, :, None].expand(2, 3, 5, 4, 6))
    assert (kind, media.shape) == ("video", (2, 3, 5, 4, 6))
    video = RewardRequest(prompts=("a", "b"), rewards={"x": 1.0}, media_type=kind, media=media)
    assert video.pixels().shape == (2, 3, 5, 4, 6)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_latents_go_over_in_half_precision_or_as_bytes_of_bfloat16(as_bytes):
    latents = torch.tensor([0.5, -2.0, 3.25, 8.0])[None, :, None, None, None].expand(2, 4, 3, 2, 2)
    media = latents_of(latents)
    assert (media.shape, media.dtype) == ((2, 4, 3, 2, 2), np.float16)
    if as_bytes:
        media = latents.bfloat16().contiguous().view(torch.uint8).numpy()
        assert media.shape == (2, 4, 3, 2, 4)
    sent = RewardRequest(prompts=("a", "b"), rewards={"x": 1.0}, media_type="latent", media=media)
    came = parse_request(pack_request(sent))

    assert torch.equal(came.latents(), latents)
    with pytest.raises(RewardRequestError, match="latents, which have to be decoded first"):
        came.pixels()
    with pytest.raises(RewardRequestError, match="no latents but of type image"):
        parse_request(body()).latents()


def test_decoded_latents_are_the_pixels_that_the_model_has(model_dirs):
    adapter = load_adapter(model_dirs("wan"))
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn((2, *adapter.latent_shape(5, 16, 16)), generator=generator)
    media = latents_of(wan_latents(adapter, latents))
    sent = RewardRequest(prompts=("a", "b"), rewards={"x": 1.0}, media_type="latent", media=media)
    decode = LatentDecoder(str(model_dirs("wan") / "vae"))

    decoded = decode(parse_request(pack_request(sent)))
    kind, pixels = media_of(adapter.decode(latents))
    assert decoded.media_type == kind == "video"
    assert decoded.media.shape == pixels.shape == (2, 3, 5, 16, 16)
    # Half precision has 11 bits: a step of 8 bits is lost here and there.
    assert np.abs(decoded.media.astype(int) - pixels).max() <= 1
    assert decode(parse_request(body())).media_type == "image"
    narrow = replace(sent, media=media[:, :3])
    with pytest.raises(RewardRequestError, match="3 channels, but the VAE here has 16"):
        decode(narrow)
    with pytest.raises(WfmConfigError, match="no AutoencoderKLWan"):
        LatentDecoder(str(model_dirs("wan") / "transformer_2"))


def test_latents_of_other_models_are_not_sent(adapter):
    with pytest.raises(PipelineError, match="this model has a AutoencoderKL"):
        wan_latents(adapter, torch.zeros(1, 16, 2, 2))


def test_rewards_without_weight_are_not_asked_for():
    assert parse_request(body(reward_fn={"x": 2, "y": 0.0, "z": -1})).rewards == {"x": 2.0}


def claims_more_than_it_has():
    """Return an array whose header promises a terabyte."""
    head = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1048576, 1024, 1024, 1), }"
    head = head.ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + b"12"


def pickled():
    """Return an array of objects, which only unpickling could read."""
    buffer = io.BytesIO()
    np.save(buffer, np.array([{}, {}], dtype=object), allow_pickle=True)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{}", "no line end"),
        (b"[1]\n", "no JSON object"),
        (b"{x\n", "is no JSON"),
        (body(media_type="sound"), "'sound'; there are image, video and latent"),
        (body(media_type="latent"), "want uint8 or float16 of 5 axes"),
        (body(MEDIA[..., None], media_type="latent"), "no pairs of bytes of bfloat16"),
        (body(prompts=["a"]), "1 prompts for 2 samples"),
        (body(prompts="ab"), "no list of texts"),
        (body(reward_fn={"x": 0}), "no reward with a weight above 0"),
        (body(reward_fn={"x": "1"}), "reward_fn.x is no number"),
        (body(MEDIA.astype(np.float32)), "want uint8 of 4 axes"),
        (body(np.asfortranarray(MEDIA)), "in C order"),
        (body(media_type="video"), "of 5 axes"),
        (body()[:-1], "143 bytes, its header says"),
        (body()[: body().index(b"\n") + 1] + claims_more_than_it_has(), "2 bytes, its header"),
        (body()[: body().index(b"\n") + 1] + pickled(), "want uint8"),
        (body()[: body().index(b"\n") + 1] + b"GIF89a...", "cannot be read"),
    ],
    ids=range(17),
)
def test_what_is_no_request_is_refused_and_says_why(data, message):
    with pytest.raises(RewardRequestError, match=message):
        parse_request(data)


class OldServer(BaseHTTPRequestHandler):
    """The existing protocol: 400 for not yet, a form of uuid and type, a replica to go back to."""

    def do_POST(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        notes = self.server.notes
        notes.append((self.path, self.headers.get("X-Lepton-Replica-Target"), data))
        if self.headers["Authorization"] != "Bearer secret":
            self.answer(401, {})
        elif self.path == "/enqueue":
            self.answer(*self.server.enqueued())
        else:
            form = parse_qs(data.decode())
            self.answer(*self.server.pulled(form["uuid"][0], form["type"][0]))

    def answer(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), OldServer)
    server.notes, server.daemon_threads = [], True
    server.enqueued = lambda: (200, {"uuid": "u1", "replica_id": "r7"})
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def client(server, weights, token="secret", **settings):
    url = f"http://127.0.0.1:{server.server_port}"
    config = RewardServiceConfig(enqueue_url=f"{url}/enqueue", fetch_url=f"{url}/pull", **settings)
    return RewardClient(config, weights, token=token)


def test_scores_are_cut_weighed_and_scaled_and_400_means_not_yet(server):
    early = iter([True, True])

    def pulled(uuid, name):
        if next(early, False):
            return 400, {}
        scores = {
            "ocr": {"ocr_reward": [1.0, 0.5]},
            "dance": {"vq": [3.0, 1.0], "mq": [4.0, 1.0]},
        }
        return 200, {"scores": scores[name], "type": name}

    server.pulled = pulled
    weights = {"ocr": 2.0, "dance": 0.5, "unused": 0.0}
    with client(server, weights, score_keys={"dance": "vq+mq"}, scale=10.0) as asked:
        scores = asked(torch.zeros(2, 3, 4, 4), ["a", "b"]).result(timeout=30)

    # 2 * 1 + 0.5 * min(7, 5) = 4.5 and 2 * 0.5 + 0.5 * 2 = 2, times 10
    assert scores == [45.0, 20.0]
    path, replica, sent = server.notes[0]
    assert (path, replica) == ("/enqueue", None)
    assert parse_request(sent).rewards == {"ocr": 2.0, "dance": 0.5}
    assert {(p, r) for p, r, _ in server.notes[1:]} == {("/pull", "r7")}
    assert len(server.notes) == 1 + 3 + 1


def test_a_penalty_lowers_the_sum_and_the_service_is_told_its_size(server):
    scores = {"good": [1.0, 0.5], "bad": [0.5, 2.0]}
    server.pulled = lambda uuid, name: (200, {"scores": {name: scores[name]}})
    with client(server, {"good": 1.0, "bad": -0.5}) as asked:
        assert asked(torch.zeros(2, 3, 4, 4), ["a", "b"]).result(timeout=30) == [0.75, -0.5]
    assert parse_request(server.notes[0][2]).rewards == {"good": 1.0, "bad": 0.5}


def test_a_fetch_address_of_something_else_is_an_error_and_not_asked_for_ever(server):
    server.pulled = lambda uuid, name: (404, {})
    expected = pytest.raises(RewardServiceError, match="is it the address of that service")
    with client(server, {"x": 1.0}, deadline_s=0.5) as asked, expected:
        asked(torch.zeros(1, 3, 4, 4), ["a"]).result(timeout=30)


def test_generation_goes_on_while_scores_are_computed(server):
    released = threading.Event()
    server.pulled = lambda uuid, name: (
        (200, {"scores": {"x": [1.0]}}) if released.is_set() else (400, {})
    )
    with client(server, {"x": 1.0}) as asked:
        futures = [asked(torch.zeros(1, 3, 4, 4), ["a"]) for _ in range(3)]
        assert not any(future.done() for future in futures)
        released.set()
        assert [future.result(timeout=30) for future in futures] == [[1.0]] * 3


def test_a_service_that_forgot_or_has_no_room_is_asked_again(server):
    rooms = iter([(503, {}), (200, {"uuid": "u1"}), (200, {"uuid": "u2"})])
    server.enqueued = lambda: next(rooms)
    server.pulled = lambda uuid, name: (
        (404, {}) if uuid == "u1" else (200, {"scores": {"x": [0.25]}})
    )
    with client(server, {"x": 1.0}) as asked:
        assert asked(torch.zeros(1, 3, 4, 4), ["a"]).result(timeout=30) == [0.25]
        assert asked.num_retries == 2


@pytest.mark.parametrize(
    ("pulled", "message"),
    [
        ((500, {"error": "out of memory"}), "x: .* answered 500.*out of memory"),
        ((200, {"scores": None}), "x: the service answered without scores"),
        ((200, {"scores": {"y": [1.0]}}), r"want 1 scores called x; there are y \(1\)"),
        ((200, {"scores": {"x": [1.0, 2.0]}}), r"want 1 scores called x; there are x \(2\)"),
        ((200, {"scores": {"x": [None]}}), "x of sample 0 is None"),
        ((200, {"scores": {"x": [float("nan")]}}), "x of sample 0 is nan"),
        ((200, []), "no JSON object"),
    ],
    ids=range(7),
)
def test_answers_without_the_scores_are_errors_at_once(server, pulled, message):
    server.pulled = lambda uuid, name: pulled
    with client(server, {"x": 1.0}) as asked, pytest.raises(RewardServiceError, match=message):
        asked(torch.zeros(1, 3, 4, 4), ["a"]).result(timeout=30)


def test_a_wrong_token_and_a_deadline_that_passes_are_errors(server):
    server.pulled = lambda uuid, name: (400, {})
    pixels = torch.zeros(1, 3, 4, 4)
    for settings, message in [
        ({"token": "other"}, "answered 401"),
        ({"deadline_s": 0.3}, r"no scores in 0.3 s.*answered 400"),
    ]:
        expected = pytest.raises(RewardServiceError, match=message)
        with client(server, {"x": 1.0}, **settings) as asked, expected:
            asked(pixels, ["a"]).result(timeout=30)
    with client(server, {"x": 1.0}) as asked:
        abandoned = asked(pixels, ["a"])
    with pytest.raises(RewardServiceError, match="closed"):
        abandoned.result(timeout=30)


@pytest.mark.parametrize(("mebibytes", "seconds"), [(0, 60), (10, 60), (50, 180), (1000, 600)])
def test_uploads_have_time_by_their_size(mebibytes, seconds):
    timeout = EnqueueTimeout().of(mebibytes << 20)
    assert (timeout.read, timeout.connect) == (seconds, 100)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: EnqueueTimeout(base_s=-1.0), "base_s is -1.0"),
        (lambda: EnqueueTimeout(min_s=10.0, max_s=5.0), "min_s 10.0 is above max_s 5.0"),
        (lambda: RewardServiceConfig(clip=0.0), "clip is 0.0"),
        (lambda: RewardServiceConfig(scale=0.0), "scale is 0"),
        (lambda: RewardServiceConfig(max_requests=0), "max_requests is 0"),
        (lambda: UploadConfig(url="/"), "url is '/'"),
        (lambda: VideoCaptionsConfig(path="x", max_enlargement=-1.0), "max_enlargement is -1.0"),
        (lambda: ShardCaptionsConfig(path="x", lanes=0), "lanes is 0"),
    ],
)
def test_settings_out_of_range_are_refused(build, message):
    with pytest.raises(WfmConfigError, match=message):
        build()


def test_a_client_needs_addresses_token_and_a_reward():
    url = {"enqueue_url": "http://a/e", "fetch_url": "http://a/p"}
    for config, weights, token, message in [
        (RewardServiceConfig(), {"x": 1.0}, "t", "no enqueue_url"),
        (RewardServiceConfig(enqueue_url="http://a"), {"x": 1.0}, "t", "no fetch_url"),
        (RewardServiceConfig(**url), {"x": 1.0}, "", "no token"),
        (RewardServiceConfig(**url), {"x": 0.0}, "t", "no reward"),
    ]:
        with pytest.raises(WfmConfigError, match=message):
            RewardClient(config, weights, token=token)
