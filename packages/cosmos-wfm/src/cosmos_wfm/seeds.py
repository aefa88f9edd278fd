"""Random generators that are functions of numbers: of a run's seed, a step, a sample."""

import numpy as np
import torch


def seeded_generator(*parts: int) -> torch.Generator:
    """Return a generator that is a function of these numbers."""
    mixed = np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(mixed >> 1))
