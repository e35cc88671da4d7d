"""The commands that start, stop and inspect the service, and send it traffic; `flows.cli` adds them."""

import json
import os
import time
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from flows.command import NONE, RecipeName, complete_erasures, open_settings, prepare
from infra.views.results import counting, out, working
from models.recipe import DEFAULT_RECIPE

if TYPE_CHECKING:
    from infra.processes import Child
    from infra.settings import Settings
    from infra.supervisor import Program

POLL_S = 0.2

Resolve = Annotated[
    bool, typer.Option("--resolve", help="Each address that a URL's host resolves to is a server, now and later.")
]
ServerCache = Annotated[str, typer.Option(help="Where servers see our folder cache/; by default under the same path.")]
WeightsUrl = Annotated[
    str, typer.Option(help="Where the servers reach this command to fetch drafts, http://HOST:PORT, not read them.")
]
ReadMetrics = Annotated[
    bool, typer.Option("--read-metrics", help="Take acceptance from the servers' metrics: no recorder is needed.")
]
Ca = Annotated[str, typer.Option(help="File of the certificates that sign the recorded server's.")]


def serve(
    recipe: RecipeName = DEFAULT_RECIPE,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="TCP port; by default the recipe's. 0 takes a free one.")
    ] = None,
) -> None:
    """Serve the champions behind an OpenAI-compatible endpoint, until Ctrl-C.

    Example: redraft serve --port 8000
    """
    settings, parsed = prepare(recipe)
    if port is not None:
        parsed = parsed.model_copy(update={"serve": parsed.serve.model_copy(update={"port": port})})
    complete_erasures(settings)
    from infra.home import SERVED_NAME
    from infra.service_process import END_TIMEOUT_S, require_startable, start_service, starting

    require_startable(settings, parsed.serve.port)
    from tasks.check_recipe import configure_service

    config = configure_service.fn(parsed, os.environ.get("PREFECT_API_URL", ""))
    with working(starting(config, settings)) as tell:
        child, url = start_service(config, settings, tell)
    try:
        out.print(f'serving model "{SERVED_NAME}" on {url}/v1, log in {child.log_path}', soft_wrap=True)
        _wait_for_end(child)
    finally:
        child.stop(parsed.serve.drain_s + END_TIMEOUT_S)


def _wait_for_end(child: "Child") -> NoReturn:
    """Wait until Ctrl-C; RuntimeError if the program ends before."""
    while child.poll() is None:
        time.sleep(POLL_S)
    raise RuntimeError(f"{child.name} ended with exit code {child.poll()}\n{child.tail()}")


def attach(
    servers: Annotated[
        list[str], typer.Argument(metavar="URL...", help="Of vLLM servers with the plugin redraft_vllm, without /v1.")
    ],
    recipe: RecipeName = DEFAULT_RECIPE,
    resolve: Resolve = False,
    server_cache: ServerCache = "",
    weights_url: WeightsUrl = "",
    read_metrics: ReadMetrics = False,
) -> None:
    """Keep the drafts of vLLM servers that you run at the registry's champion, until Ctrl-C; the first tries it first.

    Example: redraft attach http://127.0.0.1:8001
    """
    settings, parsed = prepare(recipe)
    from infra.service_process import attach_program
    from tasks.check_recipe import configure_service

    config = configure_service.fn(parsed, os.environ.get("PREFECT_API_URL", ""))
    told = {"servers": [server.rstrip("/") for server in servers], "resolve": resolve}
    told |= {"server_cache": server_cache, "weights_url": weights_url, "read_metrics": read_metrics}
    _run(attach_program({**config, **told}, settings), f"following the champion for {', '.join(servers)}", settings)


def _run(program: "Program", told: str, settings: "Settings") -> NoReturn:
    from infra.service_process import END_TIMEOUT_S, start_program

    child = start_program(program, settings)
    try:
        out.print(f"{told}, log in {child.log_path}", soft_wrap=True, markup=False)
        _wait_for_end(child)
    finally:
        child.stop(END_TIMEOUT_S)


def record(
    model: Annotated[list[str], typer.Option(help="Name by which the server knows the target; may be given again.")],
    server: Annotated[
        str, typer.Argument(help="URL of an OpenAI-compatible server, without /v1; none for one that records itself.")
    ] = "",
    port: Annotated[int, typer.Option(min=1, max=65535, help="TCP port that clients are to ask.")] = 8080,
    recipe: RecipeName = DEFAULT_RECIPE,
    ca: Ca = "",
) -> None:
    """Pass requests on to a server that you run, and log those whose clients consent, until Ctrl-C.

    Without URL, write what a vLLM server needs to log them itself, and say how it is started.

    Example: redraft record http://127.0.0.1:8001 --port 8000 --model target
    """
    settings, parsed = prepare(recipe)
    from infra.service_process import record_program, write_recording
    from tasks.check_recipe import configure_service

    told = configure_service.fn(parsed)
    target = {"models": model} | {name: told[name] for name in ("target_dir", "target_version")}
    if not server:
        if ca:
            raise ValueError("--ca is for a server that is asked; one that records itself needs none")
        out.print(write_recording(target, settings), soft_wrap=True, markup=False)
        return
    program = record_program({**target, "server": server.rstrip("/"), "port": port, "ca": ca}, settings)
    _run(program, f"{program.url} passes requests on to {server}", settings)


def traffic(
    recipe: RecipeName = DEFAULT_RECIPE,
    domain: Annotated[str, typer.Option(help="One of the recipe's domains; by default the first.")] = "",
    num_requests: Annotated[int, typer.Option(min=0, help="How many requests; 0 sends as many as the recipe has.")] = 0,
    repeat: Annotated[bool, typer.Option("--repeat", help="Send prompts that were sent before again.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 8,
    url: Annotated[str, typer.Option(help="Address of the service; by default the one started last.")] = "",
) -> None:
    """Send prompts of a recipe that were not sent before, and report failures and acceptance, look-up's apart.

    Example: redraft traffic --domain code --num-requests 50
    """
    settings, parsed = prepare(recipe)
    from infra.service_process import client_of
    from infra.views.overview import counts
    from tasks.send_traffic import choose_requests, send_traffic, sent_before

    domain = domain or next(iter(parsed.traffic))
    prompts = choose_requests(parsed, domain, num_requests, () if repeat else sent_before(settings.home))
    client = client_of(settings, url)
    with counting(console=out) as bar:
        task = bar.add_task(f"{domain} traffic", total=len(prompts))
        traffic, max_tokens, home = parsed.traffic, parsed.generate.max_tokens, settings.home
        report = send_traffic.fn(client, prompts, traffic, max_tokens, concurrency, home, lambda _: bar.advance(task))
    out.print(f"{report.num_ok} of {report.num_requests} answered, {report.tokens_per_s:.0f} tokens/s")
    out.print(report.taus(), markup=False)
    if report.draft_versions:
        out.print(f"answered with draft {counts(report.draft_versions)}", markup=False)
    if report.failures:
        out.print(f"failed with {counts(report.failures)}", markup=False)
    if report.num_ok < report.num_requests:
        raise RuntimeError(f"{report.num_requests - report.num_ok} requests failed")


def up(
    recipe: RecipeName = DEFAULT_RECIPE,
    attach: Annotated[
        list[str],
        typer.Option(metavar="URL", help="Of a vLLM server with the plugin redraft_vllm; then none of ours is served."),
    ] = NONE,
    resolve: Resolve = False,
    server_cache: ServerCache = "",
    weights_url: WeightsUrl = "",
    read_metrics: ReadMetrics = False,
    record: Annotated[
        str, typer.Option(metavar="URL", help="Of what clients' requests go on to; by default the first --attach.")
    ] = "",
    port: Annotated[int, typer.Option(min=1, max=65535, help="TCP port that clients of --attach are to ask.")] = 8080,
    model: Annotated[list[str], typer.Option(help="Its name for the target; without one nothing is recorded.")] = NONE,
    ca: Ca = "",
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay here until SIGTERM, as a container's program does.")
    ] = False,
) -> None:
    """Start all processes, the service and the flows among them, in the background. Crashed ones are restarted.

    Example: redraft up --recipe tiny
    """
    settings, _ = prepare(recipe)
    from flows.up import start, supervisor_argv
    from infra.service_process import RECORD, SERVICE, Attached
    from infra.waiting import FIRST_LOOK_S

    attached = None
    if not attach and (resolve or server_cache or weights_url or read_metrics or record or model or ca):
        raise ValueError("--attach is missing, for which the other options are")
    if not model and (record or ca):
        raise ValueError("--record and --ca need --model, without which nothing is recorded")
    if attach:
        told = {"resolve": resolve, "server_cache": server_cache, "weights_url": weights_url, "port": port, "ca": ca}
        told |= {"servers": [server.rstrip("/") for server in attach], "models": model, "read_metrics": read_metrics}
        attached = Attached.model_validate({**told, "recorded": (record or attach[0]).rstrip("/")})
    if foreground:
        argv = supervisor_argv(recipe, settings, attached)
        os.execv(argv[0], argv)  # noqa: S606 - a list, as everywhere; signals then reach the supervisor itself
    with working("starting; `redraft logs` shows the progress"):
        state = start(recipe, settings, attached)
    for program in state.programs:
        path = "/v1" if program.name in (SERVICE, RECORD) else ""
        at = f"{program.url}{path}" if program.url else "running"
        out.print(f"{program.name:8} {at}", soft_wrap=True)
    out.print("Prefect's and MLflow's pages ask for what `redraft keys pages` prints")
    out.print(f"first look whether a refresh is due in {FIRST_LOOK_S:.0f} s; see: redraft status")


def down() -> None:
    """Stop what `redraft up` started. Running requests finish first.

    Example: redraft down
    """
    settings = open_settings()
    from flows.up import stop

    with working("stopping"):
        stop(settings)
    out.print("redraft is down")


def logs(
    name: Annotated[str, typer.Argument(help="A program, such as service; by default all of them.")] = "",
    num_lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many lines of each.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines until Ctrl-C.")] = False,
) -> None:
    """Show the last lines of the programs' logs.

    Example: redraft logs service --follow
    """
    settings = open_settings()
    from infra.files import follow_logs, last_lines

    folder = settings.home / "logs"
    files = sorted(folder.glob(f"{name or '*'}.log"))
    if not files and not name:
        raise ValueError("no logs yet; run: redraft serve, or redraft up")
    if not files:
        known = ", ".join(sorted(file.stem for file in folder.glob("*.log"))) or "none"
        raise ValueError(f'there is no log "{name}"; there are: {known}')
    for file in files:
        for line in last_lines(file, num_lines):
            typer.echo(f"{file.stem}: {line}")
    if follow:
        for file, line in follow_logs(files):
            typer.echo(f"{file.stem}: {line}")


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
) -> None:
    """Show the drafts with lineage and verdict, acceptance by domain, the query log, and what runs where.

    Example: redraft status --json
    """
    settings = open_settings()
    from infra.overview import overview
    from infra.views.overview import show_overview

    seen = overview(settings)
    if as_json:
        typer.echo(json.dumps(seen.model_dump(mode="json")))
    else:
        show_overview(seen, out)
