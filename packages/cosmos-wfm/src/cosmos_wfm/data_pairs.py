"""What DDRL stays close to: for every noisy step of a rollout as many samples of data."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from cosmos_wfm.encoding import SampleEncoder
from cosmos_wfm.flow_batches import NoisingConfig, noise_encoded
from cosmos_wfm.flow_matching import FlowBatch
from cosmos_wfm.rollouts import Rollout, counted_numbers
from cosmos_wfm.seeds import seeded_generator
from cosmos_wfm.training_data import LeftOut


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DataPairs:
    """Data that goes with rollouts: each sample of a step has one, noised anew for each noisy step.

    Attributes:
        encoder: gives latents and embedded prompts, once for a rollout.
        left_out: keeps the names of broken samples.
        noising: how they are noised.
        seed: of the run.
        num_samples: of a step, over all ranks.
    """

    encoder: SampleEncoder
    left_out: LeftOut
    noising: NoisingConfig
    seed: int
    num_samples: int

    def batches(
        self, step: int, rollout: Rollout, advantages: Float[Tensor, " N"]
    ) -> list[FlowBatch]:
        """Return a batch for each noisy step of a rollout of step ``step``.

        Args:
            step: of the run.
            rollout: the samples.
            advantages: of all samples of the step; NaN of those that are left out, as then their
                data is.

        Raises:
            CaptionDataError: if a sample is broken and that is fatal.
        """
        counts = ~advantages.isnan()
        numbers = counted_numbers(rollout.numbers, counts)
        first, data = step * self.num_samples, self.encoder.data
        rows = self.encoder.rows([data.order(first + number, self.seed) for number in numbers])
        self.left_out.write()
        counted = [float(n < len(counts) and bool(counts[n])) for n in rollout.numbers]
        batches: list[FlowBatch] = []
        for place in range(len(rollout.steps)):
            generators = [seeded_generator(self.seed, step, n, 2, place) for n in numbers]
            noising, dropped = self.noising, self.encoder.dropped
            batch = noise_encoded(self.encoder.adapter, rows, generators, noising, dropped)
            batches.append(replace(batch, weights=torch.tensor(counted).to(batch.weights)))
        return batches
