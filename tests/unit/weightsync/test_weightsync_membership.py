"""The rules of the directory, without sockets: time is a number."""

from dataclasses import replace

import pytest

from cosmos_weightsync import ConfigurationError, ProtocolError, Quorum, VersionError
from cosmos_weightsync.ballots import Content, Standing
from cosmos_weightsync.membership import Member, MembershipTable


def sender(rank: int, member_id: str = "") -> Member:
    return Member(id=member_id or f"s{rank}", role="sender", rank=rank, num_ranks=2)


def receiver(name: str, group: str = "g") -> Member:
    return Member(id=name, role="receiver", group=group)


@pytest.fixture
def table() -> MembershipTable:
    return MembershipTable(lease_s=10.0)


def ids(table: MembershipTable) -> list[str]:
    return [member.id for member in table.view().members]


def test_the_epoch_counts_comings_and_goings_and_the_revision_everything(table):
    table.join(sender(0), None, 0.0)
    table.join(receiver("r"), None, 0.0)
    assert (table.view().epoch, ids(table)) == (2, ["s0", "r"])
    before = table.view().revision
    table.hold("r", 7, "run")
    assert (table.view().epoch, table.view().revision) == (2, before + 1)
    table.join(sender(0), None, 1.0)  # Nothing new.
    assert (table.view().epoch, table.view().revision) == (2, before + 1)
    table.leave("r")
    table.leave("r")
    assert (table.view().epoch, ids(table)) == (3, ["s0"])


def test_a_lease_that_is_not_renewed_ends(table):
    table.join(sender(0), None, 0.0)
    table.join(sender(1), None, 0.0)
    assert table.renew("s1", 9.0)
    table.expire(10.5)
    assert ids(table) == ["s1"]
    assert not table.renew("s0", 11.0)


def test_a_sender_that_registers_for_a_rank_takes_the_place_of_the_one_before(table):
    table.join(sender(0), None, 0.0)
    table.join(sender(1), None, 0.0)
    table.join(sender(0, "again"), None, 1.0)
    assert ids(table) == ["s1", "again"]


def test_a_layout_is_kept_as_long_as_a_member_has_it(table):
    member = Member(id="a", role="receiver", layout="digest")
    table.join(member, {"tensors": []}, 0.0)
    assert table.layout("digest") == {"tensors": []}
    table.leave("a")
    with pytest.raises(VersionError, match="no member has a layout of digest digest"):
        table.layout("digest")


def test_all_waits_for_the_last_one_and_never_changes_its_mind(table):
    for name in "abc":
        table.join(receiver(name), None, 0.0)
    table.join(receiver("other", "another group"), None, 0.0)
    assert table.vote("a", 1, "ready", Quorum()) == "open"
    assert table.vote("b", 1, "ready", Quorum()) == "open"
    assert table.vote("c", 1, "ready", Quorum()) == "commit"
    assert table.vote("a", 1, "failed", Quorum()) == "commit"


def test_all_is_broken_by_one_failure_but_not_by_a_death(table):
    for name in "abc":
        table.join(receiver(name), None, 0.0)
    table.vote("a", 1, "ready", Quorum())
    assert table.vote("b", 1, "failed", Quorum()) == "abort"
    table.vote("a", 2, "ready", Quorum())
    table.vote("b", 2, "ready", Quorum())
    assert table.decision("a", 2) == "open"
    table.leave("c")
    assert table.decision("a", 2) == "commit"


def test_at_least_k_is_broken_when_too_few_are_left(table):
    quorum = Quorum("at_least", 2)
    for name in "abc":
        table.join(receiver(name), None, 0.0)
    assert table.vote("a", 1, "failed", quorum) == "open"
    assert table.vote("b", 1, "ready", quorum) == "open"
    assert table.vote("c", 1, "ready", quorum) == "commit"
    table.vote("a", 2, "failed", quorum)
    assert table.vote("b", 2, "failed", quorum) == "abort"


def test_a_vote_can_be_taken_back_while_nothing_is_decided(table):
    for name in "ab":
        table.join(receiver(name), None, 0.0)
    table.vote("a", 1, "ready", Quorum())
    assert table.vote("a", 1, "withdrawn", Quorum()) == "open"
    assert table.vote("b", 1, "ready", Quorum()) == "open"


def test_who_took_a_vote_back_is_not_ready_because_it_has_the_version(table):
    for name in "ab":
        table.join(receiver(name), None, 0.0)
    table.hold("a", 1, "run")
    table.vote("a", 1, "ready", Quorum(), "run")
    table.vote("a", 1, "withdrawn", Quorum(), "run")
    assert table.vote("b", 1, "ready", Quorum(), "run") == "open"
    assert table.vote("a", 1, "ready", Quorum(), "run") == "commit"


def test_each_commits_for_itself(table):
    table.join(receiver("a"), None, 0.0)
    table.join(receiver("b"), None, 0.0)
    assert table.vote("a", 1, "ready", Quorum("each")) == "commit"


def test_whoever_has_the_version_already_counts_as_ready_for_a_new_directory(table):
    table.join(receiver("a"), None, 0.0)
    table.join(receiver("b"), None, 0.0)
    table.hold("b", 5, "run")
    assert table.vote("a", 5, "ready", Quorum(), "run") == "commit"


def test_a_group_has_one_quorum(table):
    table.join(receiver("a"), None, 0.0)
    table.join(receiver("b"), None, 0.0)
    table.vote("a", 1, "ready", Quorum())
    with pytest.raises(ConfigurationError, match="group 'g', version 1"):
        table.vote("b", 1, "ready", Quorum("each"))


def test_strangers_have_no_vote(table):
    with pytest.raises(VersionError, match="not known"):
        table.vote("nobody", 1, "ready", Quorum())


def test_who_is_waited_for_and_who_failed_is_told_by_name(table):
    for name in "abcd":
        table.join(Member(id=name, role="receiver", name=name.upper(), host="h"), None, 0.0)
    table.join(Member(id="e", role="receiver", endpoint="e:1"), None, 0.0)
    assert table.standing("a", 1) == Standing("open")
    quorum = Quorum("at_least", 4)
    table.vote("a", 1, "ready", quorum)
    table.vote("b", 1, "withdrawn", quorum)
    table.vote("c", 1, "failed", quorum)
    missing = ("B on h, which gave up waiting", "D on h", "receiver at e:1")
    assert table.standing("a", 1) == Standing("open", missing, ("C on h",))
    table.leave("c")  # Whoever fails and leaves is named all the same.
    table.vote("d", 1, "failed", quorum)
    table.vote("e", 1, "failed", quorum)
    assert table.standing("a", 1).failed == ("C on h", "D on h", "receiver at e:1")


@pytest.mark.parametrize(
    ("said", "decision"), [("commit", "commit"), ("abort", "abort"), ("open", "open")]
)
def test_a_directory_of_an_earlier_release_tells_the_decision_alone(said, decision):
    assert Standing.from_json({"decision": said}) == Standing(decision)


def test_how_a_group_is_crosses_the_wire():
    standing = Standing("abort", ("a",), ("b", "c"))
    assert Standing.from_json(standing.to_json()) == standing


@pytest.mark.parametrize("arguments", [("at_least", 0), ("all", 2), ("each", 1)])
def test_a_count_goes_with_at_least_only(arguments):
    with pytest.raises(ConfigurationError):
        Quorum(*arguments)


def test_members_cross_the_wire_and_junk_does_not():
    member = Member(id="x", role="receiver", rank=3, name="n", version=4, layout="l")
    assert Member.from_json(member.to_json()) == member
    with pytest.raises(ProtocolError, match="not a member"):
        Member.from_json({"id": "x"})


def test_another_run_of_the_trainer_is_voted_on_anew(table):
    for name in "ab":
        table.join(receiver(name), None, 0.0)
        table.hold(name, 7, "one")
        table.vote(name, 7, "ready", Quorum(), "one")
    assert table.decision("a", 7, "one") == "commit"
    table.hold("a", 5, "two")
    assert table.vote("a", 5, "ready", Quorum(), "two") == "open"
    table.hold("b", 5, "two")
    assert table.vote("b", 5, "ready", Quorum(), "two") == "commit"


def test_a_vote_of_no_run_is_for_that_of_the_senders(table):
    table.join(Member(id="s", role="sender", run_id="two"), None, 0.0)
    for name in "ab":
        table.join(receiver(name), None, 0.0)
    table.vote("a", 5, "ready", Quorum(), "two")
    assert table.vote("b", 5, "failed", Quorum()) == "abort"


def ready(table: MembershipTable, name: str, content: Content, quorum: Quorum | None = None):
    return table.vote(name, 1, "ready", quorum or Quorum(), "run", content=content)


def test_other_bytes_in_the_same_pieces_end_it_for_all(table):
    for name in "abc":
        table.join(receiver(name), None, 0.0)
    assert ready(table, "a", Content("whole", "1")) == "open"
    assert ready(table, "b", Content("half", "2")) == "open"  # Of other pieces: not comparable.
    assert ready(table, "c", Content("whole", "3")) == "abort"
    assert [table.standing(name, 1, "run").unlike[:8] for name in "abc"] == ["", "", "receiver"]
    assert len(table.standing("a", 1, "run").failed) == 1


@pytest.mark.parametrize("quorum", [Quorum("each"), Quorum("at_least", 1)])
def test_who_comes_after_a_commit_with_other_bytes_is_told_so(table, quorum):
    for name in "ab":
        table.join(receiver(name), None, 0.0)
    assert ready(table, "a", Content("whole", "1"), quorum) == "commit"
    table.leave("a")
    ready(table, "b", Content("whole", "2"), quorum)
    assert table.standing("b", 1, "run").unlike.startswith("receiver")
    ready(table, "b", Content("whole", "1"), quorum)
    assert table.standing("b", 1, "run") == Standing("commit")


def test_what_somebody_had_who_is_gone_counts_no_more(table):
    for name in "abc":
        table.join(receiver(name), None, 0.0)
    ready(table, "a", Content("whole", "1"))
    table.leave("a")
    assert ready(table, "b", Content("whole", "2")) == "open"
    table.vote("b", 1, "withdrawn", Quorum(), "run")
    assert ready(table, "c", Content("whole", "3")) == "open"
    assert ready(table, "b", Content("whole", "3")) == "commit"


@pytest.mark.parametrize(("digest", "decision"), [("1", "commit"), ("2", "open")])
def test_who_has_a_version_counts_without_a_word_if_it_has_the_same_bytes(table, digest, decision):
    table.join(receiver("a"), None, 0.0)
    has = replace(receiver("b"), version=1, run_id="run", content=Content("whole", digest))
    table.join(has, None, 0.0)
    assert ready(table, "a", Content("whole", "1")) == decision
    if decision == "open":
        assert ready(table, "b", Content("whole", "2")) == "abort"


def test_a_member_of_an_earlier_release_says_nothing_of_what_it_has():
    told = receiver("a").to_json()
    del told["content"]
    assert Member.from_json(told) == receiver("a")
