"""A row of supervised data that is one example."""

from cosmos_parallel import SftExample, encode_examples


def only_example(row, tokenizer, **others) -> SftExample:
    (example,) = encode_examples(row, tokenizer, **others)
    return example
