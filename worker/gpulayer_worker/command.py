"""The command line of `python -m gpulayer_worker`: one worker in the foreground, until it is told to stop."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys

from gpulayer_broker import arguments
from gpulayer_broker.arguments import Wording
from gpulayer_broker.connection import Endpoint, Link
from gpulayer_broker.errors import GpulayerError, UsageError
from gpulayer_broker.folders import locate_folders
from gpulayer_broker.server_check import check_server
from gpulayer_broker.settings import Settings, load_settings
from gpulayer_worker.agent import Agent, Options
from gpulayer_worker.secrecy import blank


def main(argv: list[str] | None = None) -> int:
    """Runs the worker; the exit code of the error that stopped it, 0 after an orderly stop."""
    parser = argparse.ArgumentParser(
        prog="gpulayer-worker", description="Takes jobs from a queue and runs them."
    )
    parser.add_argument(
        "--redis", metavar="URL", default=None, help="the queue's server (default: GPULAYER_REDIS_URL)"
    )
    parser.add_argument("--namespace", default=None, help="namespace of the queue (default: default)")
    parser.add_argument(
        "--name", default=socket.gethostname(), help="name of this worker (default: the host's)"
    )
    parser.add_argument("--slots", type=int, default=None, help="CPU slots (default: cores)")
    parser.add_argument(
        "--gpus",
        default="",
        metavar="LIST",
        help="GPUs to offer: 0,1 as nvidia-smi counts, UUIDs, or none (default: all)",
    )
    parser.add_argument(
        "--gpu-share", type=int, default=1, metavar="N", help="so many jobs share each GPU (default: 1)"
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        metavar="PATH",
        help="the Python that runs jobs (default: the worker's own)",
    )
    parser.add_argument(
        "--label", action="append", default=[], metavar="K=V", help="a label that jobs can ask for"
    )
    parser.add_argument("--node", default="", help="name of the machine, where several are simulated on one")
    parser.add_argument("--private", action="store_true", help="part of this user's private set-up")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("dramatiq").setLevel(
        logging.CRITICAL
    )  # a job's failure is the job's, told in its record
    try:
        return _run(args)
    except GpulayerError as error:
        print(f"gpulayer worker: {error}", file=sys.stderr)
        return error.exit_code


def _run(args: argparse.Namespace) -> int:
    settings: Settings = load_settings()
    if args.namespace:
        settings = settings.changed(namespace=args.namespace)
    words = Wording(True)
    labels, name = arguments.labels(words, args.label), arguments.worker_name(words, args.name)
    endpoint = _endpoint(args.redis, settings.redis_url)
    with Link(endpoint) as link:
        for warning in check_server(link):
            logging.getLogger("gpulayer").warning("%s", warning)
    if args.gpu_share < 1:
        raise UsageError(f"--gpu-share {args.gpu_share}: at least 1 job has a GPU", value=args.gpu_share)
    options = Options(
        endpoint,
        private=args.private,
        name=name,
        slots=args.slots,
        labels=labels,
        node=args.node,
        gpus=args.gpus,
        gpu_share=args.gpu_share,
        python=args.python,
    )
    return Agent(options, settings, locate_folders().create()).run()


def _endpoint(flag: str | None, setting: str | None) -> Endpoint:
    """Where the queue is; its password is shown to nobody who looks at this process."""
    url = flag or setting
    if not url:
        raise UsageError("a worker needs a queue: give --redis URL, or set GPULAYER_REDIS_URL")
    endpoint = Endpoint.parse(url)
    if str(endpoint) != endpoint.url:
        blank(url)
        os.environ.pop("GPULAYER_REDIS_URL", None)
    return endpoint
