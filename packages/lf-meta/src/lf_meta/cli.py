"""``loongforge``: train, resume, eval, infer, update, digest, config.

Exit codes: 0 done, 1 failed while running, 2 wrong usage, configuration or data, 128 + signal after a signal (143
for SIGTERM, 130 for SIGINT, 129 for SIGHUP) with the interrupted step saved. A second signal ends the process at once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import lf_meta
from lf_meta.errors import ConfigError, MetaError
from lf_meta.launch import EXIT_FILE, Launch, die_with_parent, report_exit
from lf_meta.output import make_lenient
from lf_meta.signals import StopSignal, exit_code

PORT = 8642
"""Where ``infer --serve`` listens and ``update`` asks, unless told otherwise."""

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "loongforge", description="Train GR00T-class models and resume them bit for bit."
    )
    parser.add_argument("--version", action="version", version=f"loongforge {lf_meta.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_resume(commands)
    _add_eval(commands)
    _add_infer(commands)
    _add_update(commands)
    _add_digest(commands)
    _add_config(commands)
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text}: from 0 to 2**63 - 1")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**16:
        raise argparse.ArgumentTypeError(f"{text}: from 0 to 65535")
    return value


def _temperature(text: str) -> float:
    value = float(text)
    if value != 0 and not 1e-3 <= value <= 1e3:  # nan is in no range
        raise argparse.ArgumentTypeError(f"{text}: 0, or from 0.001 to 1000")
    return value


def _nodes(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", text):
        raise argparse.ArgumentTypeError(f"{text}: a number, or MIN:MAX")
    return text


def _add_launch(p: argparse.ArgumentParser) -> None:
    p.add_argument("--nproc", type=_count, default=1, help="ranks on this machine (default 1)")
    p.add_argument(
        "--nnodes", type=_nodes, default="1", help="machines, N or MIN:MAX as for torchrun (default 1)"
    )
    p.add_argument("--node-rank", type=int, help="number of this machine")
    p.add_argument("--rdzv-endpoint", help="HOST:PORT of the rendezvous when nnodes > 1")


def _add_memory(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--memory-safety-mode",
        action="store_true",
        help="find batches that are written or read when they should not be (slow); LOONGFORGE_DEBUG_MEMORY=1",
    )


def _add_checkpoint(p: argparse.ArgumentParser) -> None:
    which = p.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="checkpoint to take (default: newest good)")
    which.add_argument(
        "--file",
        type=Path,
        help="take the checkpoint in this file instead (lf-ckpt export RUN/ckpt --lfckpt)",
    )


def _chosen(args: argparse.Namespace) -> int | Path | None:
    chosen: int | Path | None = args.step if args.file is None else args.file
    return chosen


def _add_overrides(p: argparse.ArgumentParser) -> None:
    p.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings, e.g. optim.lr=1e-3")


def _add_train(commands: Commands) -> None:
    p = commands.add_parser("train", help="start a run; without arguments: the built-in job on real text")
    p.add_argument(
        "arguments", nargs="*", metavar="[CONFIG.yaml] KEY=VALUE", help="a YAML file and/or settings"
    )
    _add_launch(p)
    _add_memory(p)
    p.set_defaults(handler=_train)


def _add_resume(commands: Commands) -> None:
    p = commands.add_parser("resume", help="continue a run from its newest good checkpoint")
    p.add_argument("run", help="folder of the run")
    p.add_argument(
        "--file",
        type=Path,
        help="go on from the checkpoint in this file (lf-ckpt export RUN/ckpt --lfckpt); it joins the run's own",
    )
    _add_overrides(p)
    _add_launch(p)
    _add_memory(p)
    p.set_defaults(handler=_resume)


def _add_eval(commands: Commands) -> None:
    p = commands.add_parser("eval", help="loss of a run's newest checkpoint on its eval split")
    p.add_argument("run", help="folder of the run")
    _add_checkpoint(p)
    _add_overrides(p)
    p.set_defaults(handler=_eval)


def _add_infer(commands: Commands) -> None:
    p = commands.add_parser("infer", help="generate text from a run's newest checkpoint")
    p.add_argument("run", help="folder of the run")
    p.add_argument("--prompt", default="The ", help="text to continue")
    p.add_argument("--tokens", type=_count, default=200, help="tokens to generate")
    p.add_argument("--temperature", type=_temperature, default=0.8, help="0 takes the most likely token")
    p.add_argument("--top-k", type=_seed, default=40, help="draw from the k most likely tokens; 0: all")
    p.add_argument("--seed", type=_seed, default=0)
    p.add_argument("--serve", action="store_true", help="answer POST /generate until a signal comes")
    p.add_argument("--host", default="127.0.0.1", help="address to serve on (default: this machine only)")
    p.add_argument("--port", type=_port, default=PORT, help=f"port to serve on, 0: any (default {PORT})")
    _add_checkpoint(p)
    p.set_defaults(handler=_infer)


def _add_update(commands: Commands) -> None:
    p = commands.add_parser("update", help="exchange the weights of a running `infer --serve`")
    p.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="FILE",
        help="the new weights (lf-ckpt export RUN/ckpt --lfckpt FILE)",
    )
    p.add_argument("--server", default=f"http://127.0.0.1:{PORT}", help="its address (default %(default)s)")
    p.set_defaults(handler=_update)


def _add_digest(commands: Commands) -> None:
    p = commands.add_parser(
        "digest", help="sha256 over a checkpoint's weights, optimizer, generators and position"
    )
    p.add_argument("run", help="folder of the run")
    _add_checkpoint(p)
    p.set_defaults(handler=_digest)


def _add_config(commands: Commands) -> None:
    p = commands.add_parser("config", help="show every setting with its origin, or the schema")
    p.add_argument("action", choices=["show", "schema"])
    p.add_argument("arguments", nargs="*", metavar="[CONFIG.yaml] KEY=VALUE")
    p.set_defaults(handler=_config)


def _split(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """A leading word without '=' is the YAML file."""
    if arguments and "=" not in arguments[0]:
        return arguments[0], list(arguments[1:])
    return None, list(arguments)


def _launched(args: argparse.Namespace, *rank_arguments: str) -> int | None:
    """Start the ranks if this process is to be their launcher; None if it is to do the work itself."""
    from lf_meta import launch

    if args.nnodes != "1" and args.rdzv_endpoint is None:
        raise ConfigError("--rdzv-endpoint", "HOST:PORT of the first machine is needed with --nnodes")
    wanted = Launch(args.nproc, args.nnodes, args.node_rank, args.rdzv_endpoint)
    return launch.run(wanted, rank_arguments) if wanted.needed else None


def _train(args: argparse.Namespace) -> int:
    from lf_meta.config import load_config

    path, overrides = _split(args.arguments)
    config = load_config(path, overrides)
    if (code := _launched(args, "train", *args.arguments)) is not None:
        return code
    with StopSignal() as signal:
        from lf_meta.jobs import start_run

        return _ended(start_run(config, signal))


def _resume(args: argparse.Namespace) -> int:
    from lf_meta import rundir

    run = rundir.find(args.run)
    config = rundir.read_config(run, args.overrides)
    file = [] if args.file is None else ["--file", str(args.file)]
    if (code := _launched(args, "resume", args.run, *file, *args.overrides)) is not None:
        return code
    with StopSignal() as signal:
        from lf_meta.jobs import resume_run

        return _ended(resume_run(config, run, signal, args.file))


def _ended(signum: int) -> int:
    return exit_code(signum) if signum else 0


def _eval(args: argparse.Namespace) -> int:
    from lf_meta.jobs import evaluate_run

    print(evaluate_run(args.run, _chosen(args), args.overrides))
    return 0


def _infer(args: argparse.Namespace) -> int:
    if args.serve:
        with StopSignal() as signal:
            from lf_meta.serve import serve_run

            return _ended(serve_run(args.run, args.host, args.port, _chosen(args), signal))
    from lf_meta.infer import Sampling
    from lf_meta.jobs import generate_text

    sampling = Sampling(args.tokens, args.temperature, args.top_k, args.seed)
    print(args.prompt + generate_text(args.run, args.prompt, sampling, _chosen(args)))
    return 0


def _update(args: argparse.Namespace) -> int:
    from lf_meta.update import update_server

    now = update_server(args.model, args.server)
    print(f"step {now['step']}, weights {now['weights']} answer now; before: {now['previous']}")
    return 0


def _digest(args: argparse.Namespace) -> int:
    from lf_meta.jobs import run_digest

    step, value = run_digest(args.run, _chosen(args))
    print(f"{value}  step {step}")
    return 0


def _config(args: argparse.Namespace) -> int:
    from lf_meta.config import Config, config_origins

    if args.action == "schema":
        print(json.dumps(Config.model_json_schema(), indent=2))
        return 0
    for key, (value, origin) in config_origins(*_split(args.arguments)).items():
        print(f"{key} = {json.dumps(value)}  # {origin}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Settings may also follow options, where argparse gives them to no positional any more."""
    parser = _parser()
    args, extra = parser.parse_known_args(arguments)
    settings = vars(args).get("overrides", vars(args).get("arguments"))
    unknown = [word for word in extra if settings is None or word.startswith("-") or "=" not in word]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if settings is not None:
        settings += extra
    return args


def _fail(error: Exception, code: int) -> int:
    rank = os.environ.get("RANK")
    print(f"loongforge: error: {error}" if rank is None else f"[rank {rank}] error: {error}", file=sys.stderr)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the ``loongforge`` command."""
    make_lenient()
    args = _parse(arguments)
    if getattr(args, "memory_safety_mode", False):
        os.environ["LOONGFORGE_DEBUG_MEMORY"] = "1"  # read by lf-memory when a pool is made, in every rank
    if EXIT_FILE in os.environ:
        die_with_parent()  # a rank whose torchrun is gone stops like after SIGTERM, with its step saved
    try:
        code = args.handler(args)
    except MetaError as e:
        code = _fail(e, e.exit_code)
    except OSError as e:  # a read-only or full disk, a folder that was removed
        code = _fail(e, 1)
    return report_exit(code)


if __name__ == "__main__":
    sys.exit(main())
