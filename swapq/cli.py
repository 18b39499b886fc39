"""The command line. Every refusal is one line on stderr, ``error: ...``, with exit code 2. Exit code 1: the answer is no. 130: Ctrl-C."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from swapq._version import __version__
from swapq.errors import SwapqError

__all__ = ["app", "main", "stderr", "stdout"]

#: where answers go
stdout = Console() if sys.stdout.isatty() else Console(width=180)
#: where messages, progress and errors go
stderr = Console(stderr=True, soft_wrap=True)

#: newer typer vendors click, so the class is found through typer
_UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "UsageError")


class _Commands(TyperGroup):
    """Turns every error that swapq raises on purpose, and the system's about files, into one line and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SwapqError as error:
            typer.echo(f"error: {error}", err=True)
        except _UsageError as error:
            command = error.ctx.command_path if error.ctx else "swapq"
            typer.echo(f"error: {error.format_message()} (see `{command} --help`)", err=True)
        except OSError as error:
            typer.echo(f"error: {error.filename or 'file'}: {error.strerror or error}", err=True)
        except KeyboardInterrupt as stop:  # with what the command says of it
            typer.echo(f"stopped{': ' if stop.args else ''}{' '.join(map(str, stop.args))}", err=True)
            ctx.exit(130)
        ctx.exit(2)


def _say(text: str, *, on: Console | None = None, style: str | None = None) -> None:
    """One line as it is: paths and names may hold brackets, and a line cut in two is found by no search."""
    (on or stdout).print(text, style=style, markup=False, soft_wrap=True)


app = typer.Typer(
    cls=_Commands,
    name="swapq",
    help="Train and roll out the same low-precision MoE policy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RecipeOption = Annotated[
    str,
    typer.Option("--recipe", "-r", help="A named recipe (see `swapq recipes`) or a .json file.", show_default=False),
]
BaseModel = Annotated[
    str | None, typer.Option("--base-model", metavar="OWNER/NAME", help="The base model on the Hub, for the card.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def plan(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint folder.", show_default=False)],
    recipe: RecipeOption,
    tp: Annotated[int, typer.Option("--tp", help="Tensor-parallel size of the engine.")] = 1,
    ep: Annotated[int, typer.Option("--ep", help="Expert-parallel size; above 1, tp does not cut experts.")] = 1,
    as_json: Json = False,
) -> None:
    """Show what a recipe would do to a checkpoint. Reads headers only, writes nothing."""
    from swapq.checkpoint.preflight import refusal, unsound
    from swapq.plan import plan as make

    made = make(source, recipe, tp=tp, ep=ep)
    warnings = []
    if refused := refusal(made, source):
        warnings.append(f"swapq convert refuses it: {refused}")
    elif fault := unsound(source):
        warnings.append(f"swapq verify would call a conversion unsound: {fault}")
    if as_json:
        told = made.to_dict()
        told["summary"]["warnings"] += warnings
        typer.echo(json.dumps(told, indent=1))
        return
    stdout.print(made)
    for warning in warnings:
        _say(f"warning: {warning}")


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A checkpoint folder; never modified.", show_default=False)
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="A new or empty folder.", show_default=False)],
    recipe: RecipeOption,
    layout: Annotated[
        str, typer.Option("--layout", help="How weights are stored: swapq, modelopt or compressed-tensors.")
    ] = "swapq",
    workers: Annotated[int, typer.Option("--workers", help="Threads. The bytes written do not depend on it.")] = 1,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what an earlier conversion or export wrote to DST.")
    ] = False,
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", help="Size of one output file.")] = "5GB",
    push_to_hub: Annotated[
        str | None, typer.Option("--push-to-hub", metavar="REPO", help="Write the card, verify, and upload.")
    ] = None,
    base_model: BaseModel = None,
) -> None:
    """Convert a checkpoint, streaming. Run the same command again to finish an interrupted conversion."""
    from swapq.checkpoint.conversion import convert_checkpoint
    from swapq.headers import SCRATCH_NAME

    if push_to_hub is not None:
        from swapq.checkpoint.card import check_base_model, replaced, write_card
        from swapq.checkpoint.upload import check_repository, upload

        check_repository(push_to_hub)
        check_base_model(base_model)
    elif base_model is not None:
        raise typer.BadParameter(
            "--base-model is for the card, which --push-to-hub writes; add it, or give --base-model to `swapq card`"
        )
    options: dict[str, Any] = {"layout": layout, "workers": workers, "max_shard_size": max_shard_size}
    try:
        done = convert_checkpoint(source, destination, recipe, overwrite=overwrite, **options)
    except KeyboardInterrupt:
        if not (destination / SCRATCH_NAME).is_dir():
            raise
        raise KeyboardInterrupt(
            f"{destination} is unfinished; the same command goes on from where it stopped"
        ) from None
    if done.already_done:
        _say(f"{destination} is finished already: same source, same recipe. Nothing was touched.")
    else:
        _print_conversion(destination, done)
    if push_to_hub is not None:
        command = f"swapq convert {source.name} {destination.name} --recipe {recipe} --layout {layout}"
        if before := replaced(destination):
            _say(f"note: {before}", on=stderr)
        write_card(destination, base_model=base_model, source=source, command=command)
        _say(f"uploaded: {upload(destination, push_to_hub)}")


def _print_conversion(destination: Path, done: Any) -> None:
    from swapq.headers import read_folder
    from swapq.plan_table import human_bytes

    before, after = sum(e.bytes_before for e in done.plan), read_folder(destination).nbytes
    _say(
        f"{len(done.plan.quantized)} weights quantized, {human_bytes(before)} -> {human_bytes(after)} of tensors in {destination} "
        f"({human_bytes(done.output_bytes)} in files)"
    )
    if done.resumed:
        _say(f"{done.resumed} shards were finished by an earlier run")
    if done.underflowed_blocks:
        _say(f"{done.underflowed_blocks} non-zero blocks underflow to zeros (too small for their format)")
    for name in done.left_out:
        _say(
            f"note: {name} was not copied: weights that are not the checkpoint's own, a linked folder, or no file",
            on=stderr,
        )


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A quantized folder.", show_default=False)],
    source: Annotated[
        Path | None, typer.Option("--source", help="The folder it was made from: compare bit for bit.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Folder for a JSON file and a picture of the errors.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that a quantized folder holds what it says. Exit code 1 if it does not."""
    from swapq.checkpoint.verify import verify as check
    from swapq.headers import folder_path

    folder_path(directory)
    if report is not None:
        report.mkdir(parents=True, exist_ok=True)
    found = check(directory, source=source, progress=not as_json)
    if report is not None:
        (report / "verify.json").write_text(json.dumps(found.to_dict(), indent=1) + "\n")
        if any(row.get("rel_error") for row in found.tensors.values()):
            from swapq.checkpoint.plots import draw_errors

            draw_errors(found.tensors, report / "errors.png")
        else:
            found.notes.append("no picture of errors: none was measured, or nothing was lost")
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
    else:
        _print_verification(directory, found)
    if not found.ok:
        raise typer.Exit(1)


def _print_verification(directory: Path, found: Any) -> None:
    from swapq.plan_table import human_bytes

    totals = dict(found.totals)
    by_role = totals.pop("by_role", {})
    for name, value in totals.items():
        shown = f"{value:,} ({human_bytes(value)} of tensors)" if name == "bytes" else value
        _say(f"{name.replace('_', ' ')}: {shown}")
    if by_role:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in ("role", "relative error", "SQNR"):
            table.add_column(column)
        for role, row in by_role.items():
            sqnr = "lossless" if row["sqnr_db"] is None else f"{row['sqnr_db']:.2f} dB"
            table.add_row(role, f"{row['rel_error']:.5f}", sqnr)
        stdout.print(table)
    for note in found.notes:
        _say(f"note: {note}")
    for problem in found.problems[:50]:
        _say(f"problem: {problem}", style="red")
    if len(found.problems) > 50:
        _say(f"... and {len(found.problems) - 50} more problems", style="red")
    _say(f"{directory}: {'sound' if found.ok else 'NOT sound'}", style="bold")


@app.command()
def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Any checkpoint folder.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Show what lies in a checkpoint folder: dtypes, roles, quantization. Reads headers only."""
    from swapq.checkpoint.inspection import inspect as look
    from swapq.plan_table import human_bytes

    found = look(directory)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
        return
    _say(
        f"{directory}: {found.family or 'family not stated'}, quantization {found.quantization}, layout {found.layout}"
    )
    _say(f"{found.tensors} tensors, {human_bytes(found.nbytes)} in {len(found.files)} files")
    for title, rows in (("dtype", found.dtypes), ("role", found.roles)):
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in (title, *next(iter(rows.values()), {})):
            table.add_column(column, justify="left" if column == title else "right")
        for name, row in rows.items():
            table.add_row(name, *(f"{value:,}" for value in row.values()))
        if rows:
            stdout.print(table)
    for note in found.notes:
        _say(f"note: {note}")


@app.command()
def card(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A quantized folder that verifies.", show_default=False)
    ],
    base_model: BaseModel = None,
    source: Annotated[
        Path | None, typer.Option("--source", help="The folder it was made from: adds measured errors.")
    ] = None,
    license: Annotated[
        str | None, typer.Option("--license", help="Identifier of the license, as the Hub spells it.")
    ] = None,
) -> None:
    """Write the model card (README.md) of a quantized folder from its own verification."""
    from swapq.checkpoint.card import replaced, write_card

    before = replaced(directory)
    _say(f"wrote {write_card(directory, base_model=base_model, source=source, license=license)}")
    if before:
        _say(f"note: {before}", on=stderr)


@app.command()
def recipes(as_json: Json = False) -> None:
    """List the named recipes, and which pairs of training and rollout are supported."""
    from swapq.cli_recipes import as_dict, tables
    from swapq.recipe import Recipe, names

    made = [Recipe.named(name) for name in names()]
    if as_json:
        typer.echo(json.dumps(as_dict(made), indent=1))
        return
    for table in tables(made):
        stdout.print(table)


@app.command()
def sensitivity(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="A BF16 checkpoint folder.", show_default=False)],
    recipe: RecipeOption,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="One prompt a line; else a few built-in ones.")
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option("--keep", help="Layers to propose; else as many as the recipe keeps, or 15 %.", min=0),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.json", help="Write the proposed recipe.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Where to run the model.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Rank the layers by what quantizing them costs (KL of the logits), and propose which to keep in BF16."""
    from swapq.cli_sensitivity import check_output, measure, shown, write_recipe

    if output is not None:
        check_output(output)
    found, what = measure(source, recipe, prompts, device, stderr)
    if as_json:
        typer.echo(json.dumps(found.to_dict(keep) | {"prompts": what}, indent=1))
    else:
        for part in shown(found, what, keep):
            if isinstance(part, str):
                _say(part)
            else:
                stdout.print(part)
    if output is not None:
        write_recipe(found, keep, output)
        _say(f"wrote {output}: use it as --recipe {output}", on=stderr)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what is installed, what is supported, which kernels will run, and what to do about each gap."""
    from dataclasses import asdict

    from swapq.doctor import examine

    findings = examine()
    if as_json:
        typer.echo(
            json.dumps(
                {"ok": all(f.status != "gap" for f in findings), "findings": [asdict(f) for f in findings]}, indent=1
            )
        )
    else:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in ("", "what", "found", "remark, or what to do"):
            table.add_column(column, overflow="fold")
        marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "gap": "[red]GAP[/]"}
        for f in findings:
            table.add_row(marks[f.status], *(escape(text) for text in (f.topic, f.found, f.advice)))
        stdout.print(table)
    if any(f.status == "gap" for f in findings):
        raise typer.Exit(1)


def main() -> None:
    """Entry point of ``swapq`` and ``python -m swapq``."""
    app()
