"""Runs train.py under Ray: one process per worker, restarted if a worker dies.

    python ray_train.py --workers 2 -- --steps 40 --out /shared/run
    python ray_train.py --workers 2 --gpus 8 -- --steps 40 --out /shared/run

What follows `--` goes to train.py.
"""
# pyright: reportMissingImports=false

import argparse
import logging
import os

import ray.train
from ray.train.v2.jax import JaxConfig, JaxTrainer


def worker(config):
    import train  # here: JAX is imported after Ray has set the worker up

    logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax is talkative under Ray
    size = ray.train.get_context().get_world_size()
    train.main([*config["argv"], "--processes", str(size)])


def main():
    parser = argparse.ArgumentParser(description="Runs train.py under Ray.")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="per worker")
    parser.add_argument("--restarts", type=int, default=1, metavar="N")
    parser.add_argument("argv", nargs="*", metavar="-- OPTIONS", help="of train.py")
    args = parser.parse_args()
    resources = {"GPU": args.gpus} if args.gpus else {"CPU": 1}
    here = os.path.dirname(os.path.abspath(__file__))
    env = {"PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    if not args.gpus:
        env["JAX_PLATFORMS"] = "cpu"
    trainer = JaxTrainer(
        worker,
        train_loop_config={"argv": args.argv},
        # Ray initialises JAX only if this says GPU or TPU, on CPUs too: without it each
        # worker would be alone, and `check_processes` in train.py would say so.
        jax_config=JaxConfig(use_gpu=True),
        scaling_config=ray.train.ScalingConfig(
            num_workers=args.workers,
            use_gpu=args.gpus > 0,
            resources_per_worker=resources,
        ),
        run_config=ray.train.RunConfig(
            failure_config=ray.train.FailureConfig(max_failures=args.restarts),
            worker_runtime_env={"env_vars": env},
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
