"""A replica's process of the bubble benchmark: told of one run after the other on its input.

    python benchmarks/async_worker.py rollout-0 FILES < jobs

A line of input is a `Job`; "ready" and then "done" for each job are its output. Imports, the
learner's model and the reward's processes are paid for once.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import torch
from async_arms import SPANS, Job
from async_learner import TinyLearner
from async_paced import PacedDecoder, PacedTrainer, PacedWeights, open_diary
from async_waits import SlowEnvironment, TimedScorer, Waits

from cosmos_app.control_files import read_address
from cosmos_app.parent import die_with_parent
from cosmos_app.prepare import run_files
from cosmos_app.recipe import Recipe
from cosmos_app.roles.policy import PolicyProcess
from cosmos_app.roles.process import RunContext, TorchrunPlace
from cosmos_app.roles.rollout import ReplicaParts, RolloutProcess
from cosmos_app.roles.weights import ReceivedWeights
from cosmos_core.bus import Bus
from cosmos_core.config import config_from_json
from cosmos_core.rundir import RunDirectory
from cosmos_rollout import RewardPoolConfig
from cosmos_rollout.engines.in_process import InProcessEngine


def open_job(job: Job) -> RunContext:
    """Return what the role processes need to know."""
    run = RunDirectory.open(Path(job.run_dir))
    recipe = config_from_json(Recipe, job.recipe)
    url, namespace = read_address(run)
    files = run_files(recipe, Path(job.files_dir))
    return RunContext(run=run, recipe=recipe, files=files, redis_url=url, namespace=namespace)


async def roll_out(job: Job, replica: str, pool: Any) -> None:
    """Run a rollout replica until it is told to stop."""
    context, waits = open_job(job), Waits()
    diary = open_diary("rollout", replica, context.run.path / SPANS)
    decoder = PacedDecoder(job.system, diary, waits)
    source = ReceivedWeights(context.recipe.weight_sync)
    engine = InProcessEngine(
        decoder,
        source=PacedWeights(source, job.system),
        max_running=job.system.speed.max_running,
    )
    scorer: Any = TimedScorer(pool, waits)
    environment = None
    if job.system.environment_s:
        environment = SlowEnvironment(job.system, context.recipe.seed, waits)
    try:
        async with await Bus.connect(context.redis_url, context.namespace) as bus:
            parts = ReplicaParts(engine=engine, pool=scorer, environment=environment, diary=diary)
            await RolloutProcess(context, bus, replica, parts).run()
    finally:
        await engine.aclose()
        source.close()
        decoder.rest()
        diary.close()


async def train(job: Job, replica: str, learner: TinyLearner) -> None:
    """Run the policy replica until it is told to stop."""
    context = open_job(job)
    diary = open_diary("policy", replica, context.run.path / SPANS)
    async with await Bus.connect(context.redis_url, context.namespace) as bus:
        process = PolicyProcess(
            context,
            bus,
            replica,
            TorchrunPlace(),
            make_trainer=lambda: PacedTrainer(job.system, learner, diary, context.run.path),
        )
        await process.run()
    diary.close()


async def work(replica: str, files: Path) -> None:
    """Do the jobs, one after the other."""
    pool = RewardPoolConfig().build()
    learner = TinyLearner(files) if replica.startswith("policy") else None
    if learner is None:
        await pool.start()
    print("ready", flush=True)
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            job = config_from_json(Job, line)
            if learner is not None:
                await train(job, replica, learner)
            else:
                await roll_out(job, replica, pool)
            print("done", flush=True)
    finally:
        await pool.aclose()


if __name__ == "__main__":
    die_with_parent()
    torch.set_num_threads(1)
    asyncio.run(work(sys.argv[1], Path(sys.argv[2])))
