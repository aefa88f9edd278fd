"""What a user is told of a wrong recipe of a world model: one error that names it, nothing written.

In one process, so that a table of them is quick: each is given to the command line.
"""

import json
import shutil
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

pytest.importorskip("diffusers")

from cosmos_app.cli import main
from cosmos_wfm import save_pipeline, tiny_captions, tiny_sd3_pipeline, tiny_wan_pipeline

RL = """
kind = "wfm_rl"
model = "{root}/sd3"
prompts = "mock"
output = "{root}/out"
num_steps = 1
groups_per_step = 1
samples_per_group = 2
rewards = {{ prompt_colour = 1.0 }}
sampler = {{ num_steps = 1, height = 16, width = 16 }}
tuning = {{ kind = "lora", rank = 2 }}
dashboard = {{ enabled = false }}
"""
SFT = """
kind = "wfm_sft"
model = "{root}/sd3"
output = "{root}/out"
num_steps = 1
batch_size = 1
data = {{ kind = "images", path = "{root}/data", height = 16, width = 16 }}
tuning = {{ kind = "lora", rank = 2 }}
dashboard = {{ enabled = false }}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Models, data and recipes, whole ones and broken ones."""
    root = tmp_path_factory.mktemp("refusals")
    save_pipeline(tiny_sd3_pipeline(num_layers=1), root / "sd3")
    save_pipeline(tiny_wan_pipeline(num_layers=1), root / "wan")
    tiny_captions(root / "data")
    break_models(root)
    break_data(root)
    (root / "rl.toml").write_text(RL.format(root=root))
    (root / "sft.toml").write_text(SFT.format(root=root))
    (root / "torn.toml").write_text("kind = [")
    return root


def break_models(root):
    weights = "transformer/diffusion_pytorch_model.safetensors"
    for name in ("noindex", "flux", "badindex", "noweights", "torn", "notokenizer"):
        shutil.copytree(root / "sd3", root / name)
    (root / "noindex/model_index.json").unlink()
    (root / "badindex/model_index.json").write_text("{")
    index = json.loads((root / "flux/model_index.json").read_text())
    (root / "flux/model_index.json").write_text(json.dumps({**index, "_class_name": "Flux"}))
    (root / "noweights" / weights).unlink()
    (root / "torn" / weights).write_bytes((root / "sd3" / weights).read_bytes()[:1000])
    shutil.rmtree(root / "notokenizer/tokenizer")


def break_data(root):
    for name in ("empty", "nocaption", "badcaption", "badpicture", "tars"):
        (root / name).mkdir()
    picture = next((root / "data").glob("*.png")).read_bytes()
    (root / "nocaption/0001.png").write_bytes(picture)
    (root / "badcaption/0001.png").write_bytes(picture)
    (root / "badcaption/0001.json").write_text("{no")
    (root / "badpicture/0001.png").write_bytes(b"no picture")
    (root / "badpicture/0001.json").write_text('{"prompt": "a"}')
    (root / "tars/000.tar").write_text("no tar at all" * 100)
    (root / "empty.txt").write_text("")
    (root / "file").write_text("")
    (root / "colourless.txt").write_text("a thing\n")
    (root / "untitled.jsonl").write_text('{"text": "a"}\n')


def refused(root, command, recipe, changes, code=2):
    """Return what is said of a recipe, after looking that it is one error and left nothing."""
    given = [change.replace("{root}", str(root)) for change in changes.split()]
    result = CliRunner().invoke(main, [command, str(root / recipe), *given])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert not (root / "out").exists()
    return " ".join(result.stderr.split())


WAN = "model={root}/wan sampler.height=32 sampler.width=32"
SHARDS = "data.kind=shards data.index={root}/index"
DDRL = "algorithm.kind=ddrl sampler.num_steps=3 data.kind=images"
FILE = "as {root}/file is a file"


@pytest.mark.parametrize(
    ("recipe", "changes", "said"),
    [
        ("nowhere.toml", "", "there is no file"),
        ("torn.toml", "", "not TOML"),
        ("rl.toml", "num_steps", "is not of the form path=value"),
        ("rl.toml", "sampler.stepz=3", "unknown key sampler.stepz; known keys here: num_steps"),
        ("rl.toml", "micro_batch_size=four", 'needs a whole number, found "four"'),
        ("rl.toml", "sampler=5", "sampler needs a table"),
        ("rl.toml", "algorithm.kind=ppo", 'one of "nft", "awm", "flow_grpo", "ddrl"'),
        ("rl.toml", "steps_without_rewards=0", "steps_without_rewards is 0; it must be 1 or more"),
        ("rl.toml", "reward_deadline_s=0", "reward_deadline_s is 0.0; it must be above 0"),
        ("rl.toml", "parallel.pp=2", "shared by dp_shard, dp_replicate and cp only"),
        ("rl.toml", "parallel.dp_shard=0", "it must be 1 or more, or -1 for the rest"),
        ("rl.toml", "model={root}/file", "is no diffusers pipeline: it has no model_index.json"),
        ("rl.toml", "model={root}/noindex", "it has no model_index.json"),
        ("rl.toml", "model={root}/badindex", "names no pipeline class"),
        ("rl.toml", "model={root}/flux", "there is no adapter for Flux"),
        ("rl.toml", "model={root}/noweights", "has no weights (*.safetensors)"),
        ("rl.toml", "model={root}/torn", "model.safetensors is no whole file of weights"),
        ("rl.toml", "model={root}/notokenizer", "has no tokenizer/"),
        ("rl.toml", "prompts={root}/empty.txt", "has 0 prompts"),
        ("rl.toml", "prompts={root}/untitled.jsonl", "line 1 has no text called prompt"),
        ("rl.toml", "prompts={root}/colourless.txt", "'a thing' names none of red"),
        ("rl.toml", "prompts={root}/empty", "has none of train_metadata.jsonl"),
        ("rl.toml", "sampler.height=-16", ": sampler: height is -16; it must be 1 or more"),
        ("rl.toml", "sampler.height=18", "18x16 pixels, but this model needs multiples of 4"),
        ("rl.toml", f"{WAN} sampler.frames=2", "2 frames, but this model needs 1 and a multiple"),
        ("rl.toml", "sampler.frames=5", "this is a model of images"),
        ("rl.toml", "sampler.guidance=0.5", "it must be above 1"),
        ("rl.toml", "sampler.guidance=nan", "has to be a number"),
        ("rl.toml", "sampler.guidance=4.5", "nft trains the velocity without guidance"),
        ("rl.toml", 'tuning.targets=["nothing"]', "no layers to adapt called nothing"),
        ("rl.toml", "tuning.rank=0", "rank 0 and alpha 64 must be positive"),
        ("rl.toml", "tuning.kind=adapters", 'one of "lora", "full"'),
        ("rl.toml", "rewards.beauty=1.0", "beauty is no reward"),
        ("rl.toml", "validation.prompts=[]", "validation: there are no prompts"),
        ("rl.toml", "validation.prompt_set=/nowhere", "there is no file of prompts /nowhere"),
        ("rl.toml", 'validation.prompts=["a"] validation.sampler.height=17', "validation.sampler:"),
        ("rl.toml", "learner.optimizer.lr=-1", "lr is -1.0; it must be 0 or more"),
        ("rl.toml", "compute.dtype=float8", 'needs one of "float32", "bfloat16"'),
        ("rl.toml", "compute.compile=foo", "there is no backend foo of torch.compile"),
        ("rl.toml", "disaggregated.replicas=0", "disaggregated: replicas is 0"),
        ("rl.toml", "algorithm.kind=ddrl", "ddrl needs data"),
        ("rl.toml", 'loggers=[{kind="comet"}]', 'one of "tensorboard", "wandb", "mlflow"'),
        ("rl.toml", "dashboard.port=99999", "want 0 for any free one, or 1 to 65535"),
        ("rl.toml", 'output=""', "output: names no directory"),
        ("rl.toml", "output={root}/file", f"output: {{root}}/file cannot be a directory, {FILE}"),
        ("rl.toml", "output={root}/file/a/b", f"cannot be a directory, {FILE}"),
        ("rl.toml", "checkpoints={root}/file", "checkpoints: {root}/file cannot be a directory"),
        ("rl.toml", "checkpoints=nonsense://a", "Protocol not known"),
        ("rl.toml", "upload.url=nonsense://a", "upload: url is nonsense://a: Protocol not known"),
        ("sft.toml", "cache={root}/file", f"cache: {{root}}/file cannot be a directory, {FILE}"),
        ("sft.toml", "data.path=/nowhere", "/nowhere is not a directory"),
        ("sft.toml", "data.path={root}/empty", "has no <name>.json or .txt beside"),
        ("sft.toml", "data.path={root}/nocaption", "there is no 0001.json or 0001.txt"),
        ("sft.toml", "data.path={root}/badcaption", "0001.json: no prompt"),
        ("sft.toml", f"{SHARDS} data.path={{root}}/tars", "000.tar: no whole tar file"),
        ("sft.toml", f"{SHARDS} data.path={{root}}/{{000..003}}.tar", "000.tar cannot be read"),
        ("sft.toml", "data.height=17", "data: 17x16 pixels"),
        ("sft.toml", "data.buckets=[[16]]", "needs a list of 2 whole numbers"),
        ("sft.toml", "data.kind=videos data.frames=5", "this is a model of images"),
        ("sft.toml", "batch_size=0", "batch_size is 0"),
        ("sft.toml", "learner.ema.decay=2", ": learner.ema: decay is 2.0"),
        ("sft.toml", "rewards.x=1", "unknown key rewards; did you mean validation.rewards?"),
    ],
)
def test_check_refuses_what_cannot_run(root, recipe, changes, said):
    told = refused(root, "check", recipe, changes)
    assert said.replace("{root}", str(root)) in told


@pytest.mark.parametrize(
    ("recipe", "changes", "said"),
    [
        ("rl.toml", "output={root}/file", "output: {root}/file cannot be a directory"),
        ("sft.toml", "cache={root}/file/here", "cache: {root}/file/here cannot be a directory"),
        ("sft.toml", "data.path=/nowhere", "/nowhere is not a directory"),
        ("sft.toml", "data.path={root}/empty", "empty is an empty directory"),
        ("sft.toml", f"{SHARDS} data.path={{root}}/empty", "there is no shard at {root}/empty"),
        ("sft.toml", f"{SHARDS} data.path=/nowhere", "/nowhere is not there"),
        ("rl.toml", f"{DDRL} data.path=/nowhere", "/nowhere is not a directory"),
        ("rl.toml", "prompts={root}/no/such/folder", "there is no file of prompts"),
        ("rl.toml", "prompts={root}/empty", "has none of train_metadata.jsonl"),
        ("rl.toml", "model={root}/torn", "is no whole file of weights"),
        ("rl.toml", "upload.url=nonsense://a", "Protocol not known"),
        ("rl.toml", "parallel.dp_shard=3", "makes 3 ranks, but the replica has 1"),
        ("rl.toml", "reward_service.clip=3", "REMOTE_REWARD_ENQUEUE_URL is not set"),
    ],
)
def test_a_run_that_cannot_begin_says_so_and_writes_nothing(
    root, recipe, changes, said, monkeypatch
):
    monkeypatch.delenv("REMOTE_REWARD_ENQUEUE_URL", raising=False)
    monkeypatch.delenv("WFM_REWARD_ENQUEUE_URL", raising=False)
    told = refused(root, "run", recipe, changes)
    assert said.replace("{root}", str(root)) in told


@pytest.mark.parametrize(
    ("recipe", "others"),
    [("rl.toml", ""), ("rl.toml", "disaggregated.replicas=1"), ("sft.toml", "--resume")],
)
def test_a_run_whose_dashboard_has_no_port_says_so_and_writes_nothing(root, recipe, others):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        told = refused(root, "run", recipe, f"dashboard={{port={port}}} {others}")
    assert f"dashboard: cannot listen on 127.0.0.1 port {port} (Address already in use)" in told
    assert "any free one with dashboard.port=0" in told


class Closed(BaseHTTPRequestHandler):
    """Knows no token."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def closed():
    """The address of a service that refuses everybody."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Closed)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("apart", ["", "disaggregated.replicas=1"])
@pytest.mark.parametrize(
    ("fetch_url", "code", "said"),
    [
        ("", 1, "answered 401: it does not take this token"),
        ("http://127.0.0.1:9/pull", 1, "cannot be reached"),
        ("localhost:8000", 2, "reward_service: 'localhost:8000' is no address"),
    ],
)
def test_a_service_that_does_not_serve_this_run_is_said_before_anything_is_drawn(
    root, closed, fetch_url, code, said, apart, monkeypatch
):
    for name in ("ENQUEUE", "FETCH"):
        monkeypatch.setenv(f"REMOTE_REWARD_{name}_URL", f"{closed}/{name}")
    monkeypatch.setenv("REMOTE_REWARD_TOKEN", "another's")
    own = f"reward_service.fetch_url={fetch_url}" if fetch_url else ""
    changes = f"reward_service.deadline_s=0.2 {own} {apart}"
    result = CliRunner().invoke(main, ["run", str(root / "rl.toml"), *changes.split()])

    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, "Traceback" in result.output) == (code, False), result.output
    assert said in " ".join(result.stderr.split())
    assert not (root / "out").exists()


def test_check_warns_of_a_service_that_refuses_the_token(root, closed, monkeypatch):
    for name in ("ENQUEUE", "FETCH"):
        monkeypatch.setenv(f"REMOTE_REWARD_{name}_URL", f"{closed}/{name}")
    monkeypatch.setenv("REMOTE_REWARD_TOKEN", "another's")
    checked = CliRunner().invoke(main, ["check", str(root / "rl.toml"), "reward_service.clip=3"])
    assert checked.exit_code == 0, checked.output
    assert "answered 401: it does not take this token" in " ".join(checked.stdout.split())


def test_a_run_goes_on_from_no_other_models_checkpoint_and_leaves_it_alone(root, tmp_path):
    trained = [f"output={tmp_path}/run", "checkpoint_every=1", "num_steps=2"]
    recipe = str(root / "sft.toml")
    first = CliRunner().invoke(main, ["run", recipe, *trained])
    assert first.exit_code == 0, first.output
    checkpoint = tmp_path / "run" / "checkpoints"
    before = sorted((path, path.stat().st_size) for path in checkpoint.rglob("*"))

    for changes, said in [
        (["tuning.rank=4"], "is of another model"),
        (["tuning.alpha=4"], "adapters were trained with alpha 64, and the recipe says alpha 4"),
        ([f"model={root}/wan"], "is of another model"),
    ]:
        again = [*trained, "num_steps=4", *changes, "--resume"]
        result = CliRunner().invoke(main, ["run", recipe, *again])
        assert isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code == 2, result.output
        assert said in " ".join(result.stderr.split())
    assert sorted((path, path.stat().st_size) for path in checkpoint.rglob("*")) == before
