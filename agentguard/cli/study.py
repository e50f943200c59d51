"""`agentguard study run` and `agentguard demo`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentguard.cli.options import RecipeName
from agentguard.cli.run import run

if TYPE_CHECKING:
    from agentguard.gateway.server import Stack
    from agentguard.policy import Policy
    from agentguard.study.grid import Close, Grid
    from agentguard.study.runner import StudyPlan

ARMS = "strict;cactus:delta=0.5"
DEMO_ARMS = "strict;cactus:delta=1;cactus:delta=1,p_min=0.1,top_k=10"
_JSON = click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the table's numbers here.")
_EVENTS = click.option(
    "--events", type=click.Path(path_type=Path, dir_okay=False), help="Keep the recording here; an older one is replaced."
)
_SEED = click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of problems and sampling.")


@click.group()
def study() -> None:
    """Length-corrected evaluation of verification rules."""


def _engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """What both `run` and `full` ask about the engine and about where things go."""
    for option in reversed(
        (
            click.option("--model", help="Target model; the reference pair's by default."),
            click.option("--draft", help="Draft model; 'draft' and 'draft-short' are the reference pair's.  [default: draft]"),
            click.option(
                "--recipe",
                type=RecipeName(),
                help="A recipe for models and engine; --model and --draft go before it.",
            ),
            click.option("--temperature", default=1.0, show_default=True, help="Of sampling."),
            click.option("--concurrency", default=24, show_default=True, type=click.IntRange(1), help="Sessions at once."),
            click.option(
                "--budget", type=click.IntRange(32), help="Tokens of a closed run; a pilot's median strict trace by default."
            ),
            click.option(
                "--fresh-engine", is_flag=True, help="Start an engine anew for each rule, instead of one with a rule a request."
            ),
            click.option("--resume", is_flag=True, help="Go on with the study in --out, which was killed or stopped."),
        )
    ):
        command = option(command)
    return command


@study.command("run")
@click.option("--suite", default="chain", show_default=True, help="chain, chain-long, chain-agent, prose, or a set in --data.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="File of gsm8k, aime24, humaneval, livecodebench, mt-bench, longbench-v2 or prompts.",
)
@click.option("--tokens", type=click.IntRange(32), help="The client's limit of a call; the suite's by default.")
@click.option("--arms", help=f"Rules, separated by ';'; strict is the baseline. [default: {ARMS}; with --close: strict]")
@click.option("--n", "sessions", default=96, show_default=True, type=click.IntRange(1), help="Sessions an arm.")
@_SEED
@_engine_options
@click.option(
    "--guard",
    type=click.Choice(["on", "off"]),
    default="off",
    show_default=True,
    help="on: the gateway assigns sessions to arms and switches a losing one to strict; n sessions an arm on average.",
)
@click.option(
    "--close",
    type=click.Choice(["adaptive", "fixed", "off"]),
    help="Run every arm a second time under a budget and close its traces so; with one arm, adaptive is held against fixed too. "
    "off: no trace is closed.  [default: off]",
)
@_JSON
@_EVENTS
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Keep recording, numbers and report in this folder.")
def run_command(
    suite: str, data: Path | None, tokens: int | None, arms: str | None, sessions: int, seed: int, temperature: float,
    concurrency: int, model: str | None, draft: str | None, recipe: Path | None, guard: str, close: Close | None,
    budget: int | None, json_path: Path | None, events: Path | None, out: Path | None, resume: bool, fresh_engine: bool,
) -> None:  # fmt: skip
    """Run paired sessions of a suite under several rules and print the table."""
    from agentguard.study import suites
    from agentguard.study.grid import Grid, cells_of
    from agentguard.study.runner import StudyPlan, parse_arms

    rules = parse_arms(arms or (ARMS if close is None else "strict"))
    asked = suites.get(suite, data, tokens)
    if guard == "on":
        _refuse(
            "--guard on",
            close=close if close != "off" else None,
            out=out,
            resume=resume,
            budget=budget,
            recipe=recipe,
            fresh_engine=fresh_engine,
        )
        plan = StudyPlan(asked, rules, sessions, seed, temperature, concurrency, guarded=True)
        _run(plan, model, draft or "draft", json_path, events)
        return
    closes: tuple[Close, ...] = ("off",) if close in (None, "off") else ("off", close)
    if close == "adaptive" and len(rules) == 1:
        closes = ("off", "fixed", "adaptive")
    grid = Grid(asked, cells_of(rules, closes, sessions), seed, temperature, concurrency, budget)
    _run_cells(grid, policy_for(model, draft, recipe), out, resume, fresh_engine, json_path, events)


@study.command("full")
@click.option("--suite", default="chain", show_default=True, help="chain, or a graded set in --data.")
@click.option("--data", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="File of the suite's tasks.")
@click.option("--tokens", type=click.IntRange(32), help="The client's limit of a call; the suite's by default.")
@click.option(
    "--n", "sessions", default=256, show_default=True, type=click.IntRange(1), help="Sessions of strict and of the paper's rules."
)
@click.option("--n-rest", default=96, show_default=True, type=click.IntRange(1), help="Sessions of every other rule.")
@click.option(
    "--close", type=click.Choice(["adaptive", "fixed", "off"]), default="adaptive", show_default=True, help="Beside the close off."
)
@_SEED
@_engine_options
@click.option(
    "--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder of the recording, numbers and report."
)
def full_command(
    suite: str, data: Path | None, tokens: int | None, sessions: int, n_rest: int, close: Close, seed: int, temperature: float,
    concurrency: int, model: str | None, draft: str | None, recipe: Path | None, budget: int | None, out: Path, resume: bool,
    fresh_engine: bool,
) -> None:  # fmt: skip
    """Every rule, without and with the support filter, without and with closing: the whole grid, unattended."""
    from agentguard.study import suites
    from agentguard.study.grid import Grid, full_cells

    cells = full_cells(sessions, min(sessions, n_rest), ("off",) if close == "off" else ("off", close))
    grid = Grid(suites.get(suite, data, tokens), cells, seed, temperature, concurrency, budget)
    _run_cells(grid, policy_for(model, draft, recipe), out, resume, fresh_engine, None, None)


@study.command("report")
@click.argument("out", type=click.Path(path_type=Path, file_okay=False, exists=True))
def report_command(out: Path) -> None:
    """Write the report of a study's folder anew, also of one that was stopped early."""
    from agentguard.study.report import write_report

    for path in write_report(out):
        click.echo(str(path))


def policy_for(model: str | None, draft: str | None, recipe: Path | None) -> Policy:
    """The recipe's policy, or the reference pair's; --model and --draft go before what it says."""
    from agentguard.policy import Policy, parse, read
    from agentguard.reference import DRAFTS, reference_model

    chosen = str(reference_model(draft)) if draft in DRAFTS else draft
    if recipe is not None:
        given = {name: value for name, value in (("model", model), ("draft", chosen)) if value is not None}
        return parse(read(recipe) | given)
    return Policy(model=model or str(reference_model("target")), draft=chosen or str(reference_model("draft")))


def _refuse(beside: str, **given: object) -> None:
    from agentguard.errors import ConfigError

    for name, value in given.items():
        if value:
            raise ConfigError("--" + name.replace("_", "-"), str(value), f"is not for {beside}; leave one of them out")


def _run_cells(
    grid: Grid, policy: Policy, out: Path | None, resume: bool, fresh: bool, json_path: Path | None, events: Path | None
) -> None:
    from rich.console import Console

    from agentguard.errors import ConfigError
    from agentguard.study.command import run_cells
    from agentguard.study.comparison import summarise_records
    from agentguard.study.progress import progress_of
    from agentguard.study.report import RECORDING, check_report, write_report
    from agentguard.study.table import render_arms

    if resume and out is None:
        raise ConfigError("--resume", None, "goes on with the study in a folder; name it with --out")
    if events is not None:  # a recording of events begins anew with every engine
        _refuse("--events", resume=resume, fresh_engine=fresh)
    for option, path in (("--json", json_path), ("--events", events)):
        check_writable(option, path)
    if out is not None:
        check_report()
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("--out", str(out), f"cannot be made ({error.strerror}); choose another folder") from None
    with tempfile.TemporaryDirectory() as scratch:
        folder = out or Path(scratch)
        with progress_of(f"{grid.suite.name}, seed {grid.seed}", grid.sessions) as progress:
            run(
                run_cells(
                    grid, policy, folder / RECORDING, resume=resume, fresh=fresh, events=events,
                    on_ready=lambda stack: progress.say(f"watch it: agentguard tui --gateway {stack.url}"),
                    on_found=progress.found, on_session=progress.advance,
                )
            )  # fmt: skip
        summary = summarise_records(folder / RECORDING)
        for table in render_arms(summary):
            Console().print(table)
        if out is not None:
            for path in write_report(out, summary):
                click.echo(f"wrote {path}", err=True)
    if json_path is not None:
        json_path.write_text(summary.to_json())


@study.command("probe")
@click.option("--n", "traces", default=96, show_default=True, type=click.IntRange(1), help="Traces.")
@_SEED
@click.option("--model", help="Target model; the reference pair's by default.")
@_JSON
def probe_command(traces: int, seed: int, model: str | None, json_path: Path | None) -> None:
    """When is the answer ready? Close strict traces of `chain` at every tenth of their length and grade what is said."""
    import json

    from rich.console import Console

    from agentguard.policy import Policy
    from agentguard.reference import reference_model
    from agentguard.study import suites
    from agentguard.study.command import with_stack
    from agentguard.study.probe import run_probe
    from agentguard.study.runner import StudyPlan, parse_arms
    from agentguard.study.table import render_probe

    check_writable("--json", json_path)
    policy = Policy(model=model or str(reference_model("target")), draft=None if model else str(reference_model("draft")))
    plan = StudyPlan(suites.get("chain"), parse_arms("strict"), traces, seed)
    result = run(with_stack(policy, lambda stack: run_probe(plan, stack)))
    Console().print(render_probe(result, f"chain, {result.traces} traces, seed {seed}: closed in a branch"))
    if json_path is not None:
        json_path.write_text(json.dumps({"suite": "chain", "seed": seed, "probe": result.as_json()}, indent=1) + "\n")


@study.command("tts")
@click.option("--suite", default="chain-long", show_default=True, help="chain-long, or prose for a model with a real vocabulary.")
@click.option("--tokens", type=click.IntRange(64), help="Most tokens of a request; the suite's by default.")
@click.option(
    "--n", "sessions", default=64, show_default=True, type=click.IntRange(1), help="Problems, each run frozen and learning."
)
@click.option(
    "--grid", "grid_n", default=16, show_default=True, type=click.IntRange(0), help="Problems a cell of the grid; 0: none."
)
@click.option("--cells", help="Cells of the grid to run, separated by ';'.  [default: all]")
@click.option("--batch", default=0, show_default=True, type=click.IntRange(0), help="Also run this many requests at once.")
@click.option("--alternate", metavar="SUITE", help="Instead: requests of --suite and of this one in turn, n of each.")
@click.option("--set", "knobs", multiple=True, metavar="KNOB=VALUE", help="A setting of the learning arm, such as stride=10.")
@_SEED
@click.option("--model", help="Target model; the reference pair's by default.")
@click.option("--draft", help="Draft model.", default="draft-short", show_default=True)
@_JSON
def tts_command(
    suite: str, sessions: int, tokens: int | None, grid_n: int, cells: str | None, batch: int,
    alternate: str | None, knobs: tuple[str, ...], seed: int, model: str | None, draft: str, json_path: Path | None,
) -> None:  # fmt: skip
    """A frozen draft against one that learns while it drafts (TTS), on long outputs, one request at a time."""
    import json

    import yaml
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from agentguard.errors import ConfigError, nearest
    from agentguard.policy import EngineOptions, Policy
    from agentguard.reference import DRAFTS, reference_model
    from agentguard.study import suites
    from agentguard.study.command import with_stack
    from agentguard.study.runner import StudyPlan, parse_arms
    from agentguard.study.table import render_tts
    from agentguard.study.tts import GRID, Against, document, run_alternating, run_batch, run_tts
    from agentguard.tts_settings import TtsSettings

    check_writable("--json", json_path)
    raw = dict(knob.partition("=")[::2] for knob in knobs)
    settings = TtsSettings.parse({name: yaml.safe_load(value) for name, value in raw.items()})
    wanted = [c.strip() for c in cells.split(";") if c.strip()] if cells is not None else list(GRID)
    for cell in wanted:
        if cell not in GRID:
            raise ConfigError("--cells", cell, nearest(cell, GRID))
    grid = {cell: GRID[cell] for cell in wanted} if grid_n else {}
    asked = suites.get(suite)
    asked = asked if tokens is None else asked.shortened(tokens)
    plan = StudyPlan(asked, parse_arms("strict"), sessions, seed, concurrency=1)
    drafted = str(reference_model(draft)) if draft in DRAFTS else draft
    # a prompt's KV cache would carry what one run's draft had learned into the next run of the same problem
    options = EngineOptions(extra_args=("--no-enable-prefix-caching",))
    policy = Policy(model=model or str(reference_model("target")), draft=drafted, tts=settings, engine=options)
    other = None if alternate is None else suites.get(alternate)
    if other is not None and tokens is not None:
        other = other.shortened(tokens)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    extra: dict[str, object] = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:
        total = (
            4 * sessions if other is not None else 2 * sessions + len(grid) * min(grid_n, sessions) + (2 * sessions if batch else 0)
        )
        task = progress.add_task("starting the engine", total=total)

        async def work(stack: Stack) -> list[Against]:
            progress.update(task, description=f"{suite}, seed {seed}")
            if other is not None:
                extra["alternating"] = await run_alternating(plan, other, stack, lambda: progress.advance(task))
                return []
            rows = await run_tts(plan, stack, settings, grid, grid_n, lambda: progress.advance(task))
            if batch:
                extra["batch"] = await run_batch(plan, stack, batch, lambda: progress.advance(task))
            return rows

        rows = run(with_stack(policy, work))
    if other is not None:
        Console().print_json(data=extra["alternating"])
    else:
        title = f"{suite}: {sessions} problems, seed {seed}, K = {policy.engine.draft_tokens}, {Path(drafted).name}"
        Console().print(render_tts(rows, title))
    if json_path is not None:
        json_path.write_text(json.dumps(document(rows, plan, policy, settings, extra), indent=1) + "\n")


@click.command()
@click.option("--n", "sessions", default=12, show_default=True, type=click.IntRange(1), help="Sessions an arm.")
@_SEED
@_JSON
@_EVENTS
def demo(sessions: int, seed: int, json_path: Path | None, events: Path | None) -> None:
    """Agent sessions on the reference pair under strict, under a relaxed rule, and under it with the support filter."""
    from agentguard.study import suites
    from agentguard.study.runner import StudyPlan, parse_arms

    _run(StudyPlan(suites.get("chain-agent"), parse_arms(DEMO_ARMS), sessions, seed), None, "draft", json_path, events)


def check_writable(option: str, path: Path | None) -> None:
    """A result must not be lost after minutes of work because its folder is not there."""
    from agentguard.errors import ConfigError

    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(option, str(path), "cannot be written; choose a file in a folder that exists and is yours")


def _run(plan: StudyPlan, model: str | None, draft: str, json_path: Path | None, events: Path | None) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from agentguard.policy import Economics, Policy
    from agentguard.reference import DRAFTS, reference_model
    from agentguard.study.command import Outcome, run_study, write_json
    from agentguard.study.table import render

    for option, path in (("--json", json_path), ("--events", events)):
        check_writable(option, path)
    policy = Policy(
        model=model or str(reference_model("target")),
        draft=str(reference_model(draft)) if draft in DRAFTS else draft,
        economics=plan.economics() if plan.guarded else Economics(),
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with tempfile.TemporaryDirectory() as scratch, Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting the engine", total=plan.steps)

        def ready(stack: Stack) -> None:
            progress.update(task, description=f"{plan.suite.name}, seed {plan.seed}")
            progress.console.print(f"watch it: agentguard tui --gateway {stack.url}")

        outcome: Outcome = run(
            run_study(
                plan,
                policy,
                events or Path(scratch, "events.jsonl"),
                on_ready=ready,
                on_step=lambda: progress.advance(task),
            )
        )
    if outcome.guard is not None:
        from agentguard.study.guarded import render_guard

        Console().print(render_guard(outcome.guard, f"{plan.suite.name}, seed {plan.seed}: what the guard decided"))
        for switch in outcome.guard.switches:
            click.echo(
                f"{switch.arm} switched {'on' if switch.on else 'to strict'} after {switch.sessions} sessions: {switch.reason}"
            )
        if json_path is not None:
            write_json(outcome, json_path)
        return
    n = outcome.rows[0].sessions
    title = (
        f"{plan.suite.name}: {n} sessions an arm, {plan.suite.steps} steps each, seed {plan.seed}, K = {policy.engine.draft_tokens}"
    )
    for table in render(outcome.rows, title):
        Console().print(table)
    if json_path is not None:
        write_json(outcome, json_path)
