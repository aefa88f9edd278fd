"""What is read back of the samples that rollout replicas kept."""

from pathlib import Path

from cosmos_app.report import Sample
from cosmos_app.samples import append_samples, last_samples


def test_texts_with_ends_of_lines_of_any_kind_are_samples_like_others(tmp_path: Path) -> None:
    path = tmp_path / "samples-rollout-0.jsonl"
    samples = [
        Sample(prompt=f"{index}", response=f"one{end}two", reward=1.0, version=3)
        for index, end in enumerate(("\n", "\r\n", "\x0c", "\x85", "\u2028", "\u2029"))
    ]
    append_samples(path, samples)
    assert last_samples(tmp_path) == samples


def test_a_line_torn_within_a_letter_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "samples-rollout-0.jsonl"
    samples = [Sample(prompt=p, response="é", reward=1.0, version=3) for p in ("a", "b")]
    append_samples(path, samples)
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex("é".encode()) + 1])
    assert last_samples(tmp_path) == samples[:1]
