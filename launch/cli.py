"""The command line: options to a JobSpec; checks first, then shows or does."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from launch.agreement import package_version
from launch.errors import UsageError
from launch.foreign import in_the_way
from launch.network import LOOPBACK_INTERFACE, Endpoint
from launch.spec import Command, JobSpec, expand, shares, table

STRATEGIES = ("auto", "single", "naive", "pipeline", "ddp", "hybrid")
DEVICES = ("auto", "cpu", "cuda")
ENGINE_OPTIONS = (
    "stages",
    "stages_per_worker",
    "replicas",
    "micro_batches",
    "schedule",
    "strategy",
    "logdir",
    "device",
    "share_gpus",
    "timeout",
    "verify",
    "memory",
    "plan",
)
USAGE = 2


class OneLine(click.Command):
    """A command whose usage errors are one line."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except UsageError as error:
            text = str(error)
        except click.UsageError as error:
            text = " ".join(error.format_message().split()) + " See pipe-launch --help."
        except click.Abort:
            sys.exit(130)
        else:
            sys.exit(code or 0)
        click.echo(f"pipe-launch: {text}", err=True)
        sys.exit(USAGE)


@click.command(
    cls=OneLine,
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit code: the script's; 128+n for a worker killed by signal n; 2 for a usage error. On several hosts node 0's options "
    "hold for all, and node 0 hands a random secret, which signs all messages, to the others over the network; where that is not trusted, "
    "set PIPE_SECRET (64 hexadecimal digits) on every host.",
)
@click.option("--stages", type=int, help="Workers of one pipeline, each with one stage.  [default: 1]")
@click.option("--stages-per-worker", type=int, help="Stages that each worker holds.")
@click.option("--replicas", type=int, help="Whole pipelines, each on its share of the batch.  [default: 1]")
@click.option("--micro-batches", type=int, help="Pieces that each mini-batch is cut into.")
@click.option("--schedule", help="gpipe or 1f1b.")
@click.option("--strategy", help=f"One of {', '.join(STRATEGIES)}.")
@click.option("--nnodes", type=int, default=1, help="Hosts.  [default: 1]")
@click.option("--node-rank", type=int, help="This host's number, from 0.")
@click.option("--rdzv-endpoint", metavar="HOST:PORT", help="Where node 0 listens and the others find it.")
@click.option("--rdzv-timeout", type=float, default=300.0, metavar="SECONDS", help="How long hosts wait for each other.  [default: 300]")
@click.option("--interface", metavar="IF", help="Network interface of this host.  [default: the one that reaches the endpoint]")
@click.option("--nproc-per-node", type=int, metavar="K", help="Workers of this host, where hosts are unequal.")
@click.option("--max-restarts", type=int, default=0, help="How often to start again after a failure.  [default: 0]")
@click.option("--logdir", metavar="DIR", help="TensorBoard events and traces.")
@click.option("--device", help="auto, cpu or cuda.")
@click.option("--share-gpus", is_flag=True, help="Several workers may use one GPU.")
@click.option("--memory", metavar="SIZE", help="What each worker may use, such as 8GiB; the cut keeps to it.")
@click.option("--timeout", type=float, metavar="SECONDS", help="Longest wait for another worker; 0: no limit.")
@click.option("--verify", type=int, metavar="N", help="Compute the first N steps in one process, too, and compare every number.")
@click.option("--plan", is_flag=True, help="Print how the model is cut, and train nothing.")
@click.option("--dry-run", is_flag=True, help="Print what each worker would run, and run nothing.")
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module's name, as with python -m.")
@click.version_option(package_version(), prog_name="pipe-launch")
@click.argument("script", required=False)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
def command(**given: Any) -> int:
    """Trains a model over several processes: SCRIPT runs once, on rank 0, the other workers serve it.

    Options after SCRIPT are the script's.
    """
    job = read(given)
    if given["dry_run"]:
        click.echo(show(job))
        return 0
    return start(job)


def read(given: dict[str, Any]) -> JobSpec:
    """The job that was asked for.

    Raises:
        UsageError: it cannot be.
    """
    nodes, node = given["nnodes"], given["node_rank"]
    if nodes > 1 and node is None:
        raise UsageError(f"--nnodes is {nodes} without --node-rank; each host has its own, 0 to {nodes - 1}: give it")
    if given["max_restarts"] < 0:
        raise UsageError(f"--max-restarts is {given['max_restarts']}; it is at least 0")
    if not given["rdzv_timeout"] > 0:
        raise UsageError(f"--rdzv-timeout is {given['rdzv_timeout']:g}; it is seconds, above 0")
    options = {name: given[name] for name in ENGINE_OPTIONS if given[name] is not None and given[name] is not False}  # 0 is a value
    check_options(options)
    job = JobSpec(
        command=Command(
            script=find_script(given["script"], given["module"], needed=not node),
            argv=given["argv"],
            module=given["module"],
            options=options,
            max_restarts=given["max_restarts"],
        ),
        nodes=nodes,
        node=node or 0,
        endpoint=Endpoint.parse(given["rdzv_endpoint"]) if given["rdzv_endpoint"] is not None else None,
        interface=given["interface"],
        here=given["nproc_per_node"],
        patience=given["rdzv_timeout"],
    )
    if job.command.script and (line := in_the_way([job.command.folder])):
        raise UsageError(line)
    return job


def check_options(options: dict[str, Any]) -> None:
    for flag, known in (("strategy", STRATEGIES), ("device", DEVICES)):
        if options.get(flag, known[0]) not in known:
            raise UsageError(f"--{flag} is '{options[flag]}'; it is one of {', '.join(known)}: choose one")
    if options.get("timeout", 0) < 0:
        raise UsageError(f"--timeout is {options['timeout']:g}; it is seconds, or 0 for no limit")
    if options.get("verify", 0) < 0:
        raise UsageError(f"--verify is {options['verify']}; it is a number of steps, or 0 for none")
    if "memory" in options:
        from pipe.errors import PlanError
        from pipe.placement import size

        try:
            size(options["memory"])
        except PlanError as error:
            raise UsageError(f"--{error}") from None
    if "schedule" in options:
        from pipe.errors import PlanError
        from pipe.schedules import schedule

        try:
            schedule(options["schedule"], 1, 1, options.get("stages_per_worker"))
        except PlanError as error:
            raise UsageError(f"--schedule: {error}") from None


def find_script(script: str | None, module: bool, *, needed: bool) -> str:
    """The script's absolute path or the module's name.

    Args:
        needed: whether it runs on this host; others take node 0's word for it.
    """
    if script is None:
        if needed:
            raise UsageError("no SCRIPT given; it is the training script to run: pipe-launch --stages 2 train.py")
        return ""
    if module:
        top = script.partition(".")[0]
        if needed and importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
            raise UsageError(f"module '{script}' is not found; -m takes a module on Python's path or in {os.getcwd()}: check its name")
        return script
    path = Path(script).absolute()
    if needed and not path.is_file():
        what = "is a folder" if path.is_dir() else "is not found"
        raise UsageError(f"script '{script}' {what}; SCRIPT is a Python file, looked for from {os.getcwd()}: check the path")
    return str(path)


def show(job: JobSpec) -> str:
    """What `--dry-run` prints; hosts of unequal size are known only when all have met, so each shows its own."""
    workers = shares(job.command, [job.here] * job.nodes)
    interface = LOOPBACK_INTERFACE if job.endpoint is None else job.interface or "(the one that reaches the endpoint)"
    return table(expand(job.command, workers, os.environ, interface=interface, cores=cores(), secret=""))


def check_here(options: Mapping[str, Any]) -> None:
    """Checks what depends on this host: its GPUs and its environment."""
    from pipe.errors import PlanError
    from pipe.placement import threads_for

    if options.get("device") == "cuda":
        import torch

        if torch.cuda.device_count() == 0:
            raise UsageError(
                "--device is 'cuda' and this host has no visible GPU; use --device cpu, or auto to take GPUs where there are any"
            )
    try:
        threads_for(1, 1, os.environ.get("OMP_NUM_THREADS"))
    except PlanError as error:
        raise UsageError(str(error)) from None


def start(job: JobSpec) -> int:
    """Runs the job to its end; returns the exit code."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is loaded; its store warns of each peer that leaves
    check_here(job.command.options)
    from launch.processes import run, say
    from launch.rendezvous import announce, meet

    meeting = meet(job, os.environ)
    if job.nodes > 1:
        say(announce(meeting, job.node))
    runs = expand(meeting.command, meeting.workers, os.environ, interface=meeting.link.interface, cores=cores(), secret=meeting.secret)
    return run(meeting, job.node, [r for r in runs if r.node == job.node])


def cores() -> int:
    return len(os.sched_getaffinity(0))
