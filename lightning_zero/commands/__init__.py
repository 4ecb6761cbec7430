"""Subcommands of `lightning-zero`, one per file, each with a `main(arguments) -> exit code`."""

COMMANDS = {
    "train": "lightning_zero.commands.train",
    "checkpoint": "lightning_zero.commands.checkpoint",
    "bench": "lightning_zero.commands.bench",
}
