"""The command `noria`: every verb calls one function."""

import os
import sys
from typing import Annotated

import typer

from noria.cli_db import db
from noria.cli_keys import keys
from noria.config import load
from noria.contracts.errors import ConfigError, NoriaError

EXIT_FAILED = 1
EXIT_CONFIG = 2

app = typer.Typer(
    help="Turns the traffic of an LLM agent in production into a better model behind that agent.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(db, name="db")
app.add_typer(keys, name="keys")


@app.command()
def up() -> None:
    """Run everything on this machine: services, traffic, Dagster UI. Ctrl-C stops it."""
    from noria.up import up as run

    try:
        code = run(load())
    except KeyboardInterrupt:
        print("Noria has stopped.")
        code = 0
    raise typer.Exit(code)


@app.command()
def demo(
    rounds: Annotated[int, typer.Option(min=1, help="How many rounds to turn.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object in the last line.")] = False,
) -> None:
    """Turn the wheel a fixed number of rounds without the UI, and print a table of the rounds."""
    command = [sys.executable, "-m", "pipelines.demo", "--rounds", str(rounds), "--seed", str(seed)]
    # This process becomes the demo: a signal to it reaches the demo, which ends its services.
    os.execv(sys.executable, [*command, *(["--json"] if json else [])])


@app.command()
def status() -> None:
    """Print the wheel: per target what is live, the last round, its verdict, and what the sensors wait for."""
    from noria.release.status import wheel

    for line in wheel(load()):
        print(f"{line.target}{'' if line.enabled else '  (off)'}")
        print(f"  live        {line.live}")
        print(f"  last round  {line.last_round}  {line.reached}")
        print(f"  verdict     {line.verdict}")
        print(f"  waits for   {line.waits_for}")


@app.command()
def check() -> None:
    """Read noria.toml and say whether everything that it names is there."""
    from noria.preflight import check as preflight

    config = load()
    preflight(config)
    print(f"noria.toml is sound; targets that turn: {', '.join(config.enabled_targets) or 'none'}")


@app.command("cold-start")
def cold_start() -> None:
    """Make the base weights if there are none yet."""
    from noria.preflight import check as preflight
    from noria.processes import prepare_home
    from noria.up import cold_start as make
    from noria.up import upgrade_store

    config = load()
    preflight(config)
    prepare_home(config)
    upgrade_store(config)
    make(config)


def main() -> None:
    """Run the command; an error is one line on stderr; exit code 2 is for what the user must mend, 1 for the rest."""
    try:
        app()
    except NoriaError as error:
        print(f"noria: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED)


if __name__ == "__main__":
    main()
