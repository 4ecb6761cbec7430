"""Subcommands of `lightning-zero`, one per file, each with a `main(arguments) -> exit code`."""
