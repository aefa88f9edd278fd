"""``cosmos-weightsync simulate``: the numbers are those of the library, errors say what to do."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from capabilities import needs
from click.testing import CliRunner, Result

from cosmos_weightsync import Link, Links, Topology, plan_transfer, simulate
from cosmos_weightsync.command_line import main
from cosmos_weightsync.command_line.layouts import made_up_layout, read_layout
from cosmos_weightsync.command_line.simulating import parse_failure
from cosmos_weightsync.cuts import cut_layout, parse_cut


def run(*arguments: object, status: int = 0) -> Result:
    result = CliRunner().invoke(main, ["simulate", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


def facts(*arguments: object, status: int = 0) -> dict:
    return json.loads(run(*arguments, "--json", status=status).stdout)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("16GB", 16e9), ("1.5 TB", 1.5e12), ("300mb", 3e8), ("20KB", 20e3)],
)
def test_a_size_is_a_layout_of_about_so_many_bytes(text, num_bytes):
    found = sum(spec.num_bytes for spec in read_layout(text).specs_of(0))
    assert found == pytest.approx(num_bytes, rel=0.05)


def test_two_copies_over_one_card_take_twice_as_long():
    # 1 GB over a card of 10 GB/s is 0.1 s; without relays it leaves the sender's card twice.
    arguments = ("1GB", "--receivers", "replicas=2", "--gpus-per-host", 1, "--nic-gb-per-s", 10)
    arguments += ("--piece-us", 0)
    direct = facts(*arguments, "--relays", "never")
    assert direct["seconds"] == pytest.approx(0.2, rel=0.01)
    assert direct["finish_s"] == pytest.approx([0.2, 0.2], rel=0.01)
    assert direct["links"][0]["link"] == "sender-0 rail 0 out"
    assert direct["links"][0]["share"] == pytest.approx(1.0, rel=0.01)
    relayed = facts(*arguments, "--chunk-mib", 1)
    assert relayed["seconds"] == pytest.approx(0.1, rel=0.02)
    assert relayed["relayed_bytes"] * 2 == relayed["total_bytes"]


def test_it_is_the_simulation_of_the_library():
    layout = made_up_layout(4_000_000_000)
    sides = (
        cut_layout(layout, parse_cut("fsdp=4")),
        cut_layout(layout, parse_cut("tp=2,replicas=4")),
    )
    topology = Topology.uniform(4, 8, gpus_per_host=4, cards_per_host=2)
    expected = simulate(plan_transfer(*sides, topology))
    cuts = ("--senders", "fsdp=4", "--receivers", "tp=2,replicas=4")
    found = facts("4GB", *cuts, "--gpus-per-host", 4, "--nics-per-host", 2)
    assert found["seconds"] == expected.seconds
    assert found["finish_s"] == expected.finish_s.tolist()


def test_a_topology_file_says_as_much_as_it_likes(tmp_path: Path):
    links = tmp_path / "links.json"
    links.write_text(json.dumps({"links": {"rail": {"bytes_per_s": 1e9}}}))
    # 1 GB over 1 GB/s.
    assert facts("1GB", "--gpus-per-host", 1, "--topology", links)["seconds"] == pytest.approx(
        1.0, rel=1e-3
    )
    # An option counts more than the file.
    options = ("--topology", links, "--nic-gb-per-s", 2)
    assert facts("1GB", *options)["seconds"] == pytest.approx(0.5, rel=1e-3)
    whole = tmp_path / "cluster.json"
    slow = Link(bytes_per_s=0.5e9)
    topology = Topology.from_hosts(["a"], ["b"], links=Links(network=slow, rail=slow))
    whole.write_text(json.dumps(topology.to_json()))
    assert facts("1GB", "--topology", whole)["seconds"] == pytest.approx(2.0, rel=1e-3)


def test_ranks_on_the_same_hosts_use_the_links_inside():
    # Sender and receiver are two GPUs of one host, at 450 GB/s.
    inside = facts("45GB", "--hosts", 1, "--gpus-per-host", 2, "--piece-us", 0)
    assert inside["cross_host_bytes"] == 0
    assert inside["seconds"] == pytest.approx(0.1, rel=1e-3)


def test_a_death_is_recovered_from_or_ends_with_status_1():
    cut = ("1GB", "--receivers", "replicas=3", "--gpus-per-host", 1, "--nic-gb-per-s", 10)
    found = facts(*cut, "--fail", "receiver:0@0.05", "--detect-s", 0.1)
    assert found["recovered"] is True
    assert found["dead"] == [1]
    assert found["seconds"] > 0.15
    lost = facts(*cut, "--fail", "sender:0@0.05", status=1)
    assert (lost["recovered"], lost["seconds"]) == (False, None)
    assert lost["finish_s"] == [None] * 3


def test_people_see_links_receivers_and_a_timeline():
    result = run("1GB", "--receivers", "replicas=3", "--fail", "receiver:1@0.01", "--detect-s", 0)
    assert "times the bound" in result.output
    assert "busiest links" in result.output
    assert "died" in result.output
    assert "####" in result.output


def test_more_hosts_than_ranks_cost_nothing():
    assert facts("1GB", "--hosts", 10**15)["total_bytes"] == facts("1GB")["total_bytes"]


def test_nothing_between_nobody_takes_no_time(tmp_path):
    (tmp_path / "none.json").write_text('{"num_ranks": 0, "geometries": [], "tensors": []}')
    assert facts(str(tmp_path / "none.json"))["seconds"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("./nowhere",), "or a size such as 16GB"),
        (("1GB", "--fail", "2@1"), "write receiver:3@0.5 or sender:0@1.25"),
        (("1GB", "--fail", "receiver:4@1"), "receiver ranks are 0 to 0"),
        (("1GB", "--gpus-per-host", 8, "--nics-per-host", 3), "cannot share 3 cards evenly"),
        (("1GB", "--nic-gb-per-s", -1), "a link needs bytes_per_s > 0"),
        (("9GB", "--receivers", "replicas=9", "--hosts", 1), "10 ranks on 1 hosts of 8, for 8"),
        (("1GB", "--chunk-mib", "nan"), "--chunk-mib nan: must be above 0, and finite"),
        (("1GB", "--chunk-mib", "inf"), "--chunk-mib inf: must be above 0, and finite"),
        (("1GB", "--chunk-mib", 0), "--chunk-mib 0.0: must be above 0, and finite"),
        (("1GB", "--chunk-mib", -1), "--chunk-mib -1.0: must be above 0, and finite"),
        (("1GB", "--detect-s", "nan"), "a time, finite and not negative"),
        (("1GB", "--detect-s", "inf"), "a time, finite and not negative"),
        (("1GB", "--fail", "receiver:0@1e999"), "a time, finite and not negative"),
        (("1GB", "--senders", "fsdp=99999999"), "'fsdp=99999999': more than 1048576 ranks"),
        (("1GB", "--receivers", "pp=2"), "write replicas=N or fsdp=N or tp=N"),
        (("99999999999999999999TB",), "no tensor has more than 576460752303423488 elements"),
        (("70000000TB", "--receivers", "replicas=9"), "9 receivers want 6.3e+20 bytes"),
    ],
)
def test_errors_are_one_line_and_say_what_to_do(arguments, message):
    result = run(*arguments, status=1)
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Expecting property name"),
        ('{"link": {}}', "did you mean 'links'?"),
        ('{"links": {"rails": {}}}', "did you mean 'rail'?"),
        ('{"links": {"rail": {"bytes_per_sec": 1}}}', "did you mean 'bytes_per_s'?"),
        ('{"chunk_bytes": NaN}', "chunk_bytes must be positive, not nan"),
        ('{"links": {"rail": 5}}', "an object with bytes_per_s"),
        ('{"links": {"rail": {"latency_s": 1}}}', "missing 1 required"),
        ('{"senders": [["a", 0, 0]]}', "places of one side only"),
        ('{"senders": [["a", 0, 0]], "receivers": []}', "places 1 sender and 0 receiver ranks"),
    ],
)
def test_a_topology_file_that_makes_no_sense_is_named(content, message, tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(content)
    result = run("1GB", "--topology", path, status=1)
    assert message in result.output


def test_places_are_said_once(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(Topology.from_hosts(["a"], ["b"]).to_json()))
    assert "leave --hosts" in run("1GB", "--topology", path, "--hosts", 2, status=1).output


def test_a_failure_is_a_rank_of_either_side():
    assert parse_failure("sender:1@0.5", 2, 4).holder == 1
    assert parse_failure("receiver:1@1e-3", 2, 4).holder == 3
    assert parse_failure("receiver:1@1e-3", 2, 4).at_s == 1e-3


def test_the_timeline_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "timeline.png"
    run("1GB", "--receivers", "replicas=3", "--fail", "receiver:0@0.001", "--figure", path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    result = run("1GB", "--figure", "timeline.doc", status=1)
    assert "timeline.doc" in result.output
    assert "Traceback" not in result.output


@needs("no-matplotlib", find_spec("matplotlib") is None)
def test_a_figure_without_matplotlib_says_what_to_install():
    result = run("1GB", "--figure", "timeline.png", status=1)
    assert 'pip install "cosmos-weightsync[figure]"' in result.output
