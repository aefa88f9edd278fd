"""The spans of a replica: one for each state it was in, with the requests and tokens of each."""

from dataclasses import dataclass

from cosmos_core.simulation import Diary, LogRecord, Span
from cosmos_rollout.occupancy_spans import OccupancySpans


@dataclass
class Engine:
    num_tokens_generated: int = 0
    weight_version: int = 0


def test_each_state_is_a_span_and_decoding_has_its_requests_on_average_and_its_tokens() -> None:
    log: list[LogRecord] = []
    diary, engine = Diary("rollout", "r", log.extend, start_s=0.0), Engine()
    spans = OccupancySpans(diary, engine, 0.0)
    diary.given(0.5, 1.0)
    spans.account("decoding", 4, 1.0)
    spans.account("decoding", 2, 2.0)
    engine.num_tokens_generated = 60
    spans.account("waiting_for_environment", 0, 4.0)
    spans.account("waiting_for_rewards", 0, 4.5)
    spans.account("decoding", 1, 5.0)
    engine.num_tokens_generated, engine.weight_version = 70, 1
    spans.stalled(0.25, 6.0)
    engine.num_tokens_generated = 72
    spans.tell(7.0)
    diary.close()
    told = [(r.activity, r.start_s, r.end_s, r.width, r.tokens) for r in log if isinstance(r, Span)]
    assert told == [
        ("idle_no_work", 0.0, 0.5, 0, 0),
        ("gated_staleness", 0.5, 1.0, 0, 0),
        ("decode", 1.0, 4.0, 3, 60),  # 4 for a second, 2 for two: 8 / 3
        ("env_wait", 4.0, 4.5, 0, 0),
        ("reward_wait", 4.5, 5.0, 0, 0),
        ("decode", 5.0, 5.75, 1, 10),
        ("swap", 5.75, 6.0, 0, 0),
        ("decode", 6.0, 7.0, 1, 2),
    ]


def test_without_a_diary_nothing_is_written() -> None:
    spans = OccupancySpans(None, Engine(), 0.0)
    spans.account("decoding", 1, 1.0)
    spans.stalled(0.1, 2.0)
    spans.tell(3.0)
