"""The subcommands of `lf-hal`, one module each: `arguments(parser)` declares options, `run(args)` returns the exit
code."""

__all__: list[str] = []
