"""The command line: one module per command; each imports what it needs when it runs."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated, Any, NoReturn

import typer
from typer.exceptions import Abort, TyperException

from thalweg import __version__
from thalweg.cli.list import list_methods
from thalweg.cli.report import report
from thalweg.cli.show import show
from thalweg.cli.solve import solve
from thalweg.cli.verify import verify
from thalweg.common.optional import MissingExtraError

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="thalweg",
    help="Recently published optimization methods, each with rerunnable evidence.",
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("list")(list_methods)
app.command("show")(show)
app.command("verify")(verify)
app.command("report")(report)
app.add_typer(solve, name="solve")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"thalweg {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Exit codes: 0 when the work was done, 1 for an error while doing it, 2 for wrong arguments or
    files, 3 when ``verify`` finds that a claim fails, 130 after Ctrl-C. Errors are one line on
    stderr; ``--debug`` adds the traceback.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        code: Any = app(words or ["--help"], prog_name="thalweg", standalone_mode=False)
    except TyperException as error:
        _fail(f"{error.format_message()}{_hint(error)}", EXIT_USAGE)
    except (KeyboardInterrupt, Abort):
        _fail("interrupted", EXIT_INTERRUPTED)
    except Exception as error:
        if "--debug" in words:
            traceback.print_exc()
        _fail(_message(error), EXIT_USAGE if _is_users(error) else EXIT_ERROR)
    sys.exit(code if isinstance(code, int) else 0)


def _is_users(error: Exception) -> bool:
    """Whether the user can mend it: a wrong name, file, folder or a missing package."""
    return isinstance(error, (LookupError, ValueError, OSError, MissingExtraError))


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split()) or "no message"
    expected = type(error).__module__.startswith("thalweg.") or isinstance(error, ValueError)
    return text if expected else f"{type(error).__name__}: {text} (--debug shows where)"


def _hint(error: TyperException) -> str:
    context = getattr(error, "ctx", None)  # of usage errors
    return f" (see: {context.command_path} --help)" if context else ""


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"thalweg: {message}", err=True)
    sys.exit(code)
