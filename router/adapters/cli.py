"""The commands of this package: `inferplane route explain`.

Owns: options, what is printed and exit codes: 0, 1 with one line on stderr, 2 for wrong usage. Does not own: the
decision, which is the production router's, asked offline about a fleet that is idle and cold but for what the options
say. Heavy imports stand inside the command, so that `inferplane --help` is quick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from router.decision import NoRoute, RouteDecision
    from router.endpoints import Endpoint
    from router.route import Router

# Bytes of prompt per token without a tokenizer, as the router assumes until engines have reported counts.
_BYTES_PER_TOKEN = 4

# A prompt file beyond the gateway's default body limit could never be sent.
_PROMPT_MAX_BYTES = 32 * 1024 * 1024


def register(app: typer.Typer) -> None:
    """Add this package's commands to the root app."""
    group = typer.Typer(help="Where requests go, and why.", no_args_is_help=True)
    group.callback()(_group)
    group.command("explain")(explain)
    app.add_typer(group, name="route")


def _group() -> None:
    """Where requests go, and why."""


def explain(  # noqa: PLR0913 - each option of the command is one parameter
    endpoints: Annotated[
        Path,
        typer.Option("--endpoints", envvar="INFERPLANE_ENDPOINTS_FILE", help="The endpoints file.", show_default=False),
    ],
    prompt_file: Annotated[
        Path, typer.Option(help="The prompt: an OpenAI request in JSON, or plain text.", show_default=False)
    ],
    *,
    model: Annotated[str, typer.Option(help="The model; without it the request's, or the only one listed.")] = "",
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens that the answer is expected to have.")] = 256,
    warm: Annotated[list[str] | None, typer.Option(help="ID: this endpoint holds the whole prompt.")] = None,
    running: Annotated[list[str] | None, typer.Option(help="ID=N: this endpoint runs N requests.")] = None,
    backlog: Annotated[
        list[str] | None, typer.Option(help="ID=SECONDS: this endpoint has so much prefill to do.")
    ] = None,
    zone: Annotated[str, typer.Option(help="Where the gateway is.")] = "",
    region: Annotated[str, typer.Option(help="Where the gateway is.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show, offline, what each endpoint would cost for a prompt, in seconds by term, and which one would get it.

    The fleet is taken as idle and cold, except for what --warm, --running and --backlog say.
    """
    from router.adapters.discovery import read_endpoints
    from router.endpoints import HopTable, Place
    from router.errors import RouterError
    from router.route import Router, RouterConfig

    try:
        listed = read_endpoints(endpoints)
    except RouterError as error:
        _fail(str(error))
    text, named = _read_prompt(prompt_file)
    asked = model or named or _only_model(listed)
    fleet = _serving(listed, asked)
    router = Router(RouterConfig(hops=HopTable(Place(zone, region)), default_output_tokens=output_tokens))
    router.set_endpoints(fleet, 0.0)
    answer = _ask(
        router, fleet, (asked, text, output_tokens), _WhatIf.read(fleet, warm or [], running or [], backlog or [])
    )
    _show(answer, as_json=as_json)


class _WhatIf:
    """What the options say of the fleet's state."""

    def __init__(self, warm: frozenset[str], running: Mapping[str, float], backlog_s: Mapping[str, float]) -> None:
        self.warm = warm
        self.running = running
        self.backlog_s = backlog_s

    @classmethod
    def read(
        cls, fleet: Sequence[Endpoint], warm: Sequence[str], running: Sequence[str], backlog: Sequence[str]
    ) -> _WhatIf:
        """From option values; a wrong one is a usage error."""
        known = {each.endpoint_id for each in fleet}
        for endpoint_id in warm:
            _known(endpoint_id, known, "--warm")
        return cls(
            frozenset(warm), _pairs(running, known, "--running", int), _pairs(backlog, known, "--backlog", float)
        )


def _known(endpoint_id: str, known: set[str], option: str) -> None:
    if endpoint_id not in known:
        raise typer.BadParameter(
            f"{endpoint_id!r} is no endpoint of this model; there are {', '.join(sorted(known))}.", param_hint=option
        )


def _pairs(values: Sequence[str], known: set[str], option: str, kind: Callable[[str], float]) -> dict[str, float]:
    pairs: dict[str, float] = {}
    for value in values:
        wrong = typer.BadParameter(f"{value!r} is not ID={'N' if kind is int else 'SECONDS'}.", param_hint=option)
        endpoint_id, _, number = value.rpartition("=")
        if not endpoint_id:
            raise wrong
        _known(endpoint_id, known, option)
        try:
            pairs[endpoint_id] = kind(number)
        except ValueError:
            raise wrong from None
        if not 0 <= pairs[endpoint_id] < float("inf"):
            raise typer.BadParameter(f"{value!r}: a number of at least 0 was expected.", param_hint=option)
    return pairs


def _read_prompt(path: Path) -> tuple[bytes, str]:
    """The bytes that identify the prompt, and the model that a JSON request names ("" for none)."""
    import orjson

    try:
        if path.stat().st_size > _PROMPT_MAX_BYTES:
            _fail(f"{path} has over {_PROMPT_MAX_BYTES} bytes; no gateway would take it.")
        content = path.read_bytes()
    except OSError as error:
        _fail(f"{path} cannot be read: {error.strerror}.")
    try:
        request = orjson.loads(content)
    except orjson.JSONDecodeError:
        return content, ""
    if not isinstance(request, dict) or not ("messages" in request or "prompt" in request):
        return content, ""
    parts = [orjson.dumps(request[name]) for name in ("tools", "messages", "prompt") if name in request]
    name = request.get("model", "")
    return b"".join(parts), name if isinstance(name, str) else ""


def _only_model(listed: Sequence[Endpoint]) -> str:
    names = sorted(frozenset().union(*(each.models for each in listed)))
    if len(names) != 1:
        raise typer.BadParameter(f"name one; the endpoints list {', '.join(names) or 'none'}.", param_hint="--model")
    return names[0]


def _serving(listed: Sequence[Endpoint], model: str) -> list[Endpoint]:
    """The endpoints that serve the model; one whose models are not listed is taken to, since nobody can be asked
    offline.
    """
    from dataclasses import replace

    fleet = [replace(each, models=each.models or frozenset({model})) for each in listed]
    serving = [each for each in fleet if model in each.models]
    if not serving:
        _fail(f"No endpoint of the file serves {model!r}.")
    return serving


# When the request is asked for, after the engines were warmed at 0: long enough that nothing of that is still felt.
_ASKED_S = 600.0


def _ask(
    router: Router, fleet: Sequence[Endpoint], wanted: tuple[str, bytes, int], what_if: _WhatIf
) -> RouteDecision | NoRoute:
    """Bring the router into the asked state and route."""
    from router.blocks import BlockHasher
    from router.decision import RouteDecision, RouteRequest
    from router.endpoints import Ending, Finish, LoadNews
    from router.route import News

    model, text, output_tokens = wanted
    chain = BlockHasher(b"").chain(model, "", (text,))
    tokens = max(1, len(text) // _BYTES_PER_TOKEN)
    names = frozenset(each.endpoint_id for each in fleet)
    for endpoint_id in sorted(what_if.warm):
        earlier = router.route(RouteRequest(model, chain, tokens, output_tokens, names - {endpoint_id}), 0.0, _no_dice)
        if isinstance(earlier, RouteDecision):
            router.first_token(earlier.ticket, 0.0)
            router.finished(earlier.ticket, Finish(Ending.COMPLETED), 0.0)
    for endpoint_id in names:
        backlog_s = what_if.backlog_s.get(endpoint_id, 0.0)
        count = int(what_if.running.get(endpoint_id, 0))
        # The size of those requests is not known; one token marks the engine as in use.
        load = LoadNews(endpoint_id, backlog_s, int(backlog_s > 0), count, int(backlog_s > 0 or count > 0))
        router.hear("what if", News(loads=(load,)), _ASKED_S)
    return router.route(RouteRequest(model, chain, tokens, output_tokens), _ASKED_S, _no_dice)


def _no_dice() -> float:
    return 0.0


def _show(answer: RouteDecision | NoRoute, *, as_json: bool) -> None:
    import orjson

    from router.cost import TERMS
    from router.decision import RouteDecision

    if not isinstance(answer, RouteDecision):
        why = ", ".join(f"{endpoint_id} {unfit.value}" for endpoint_id, unfit in answer.unfit)
        _fail(f"No endpoint can take it ({answer.reason.value}): {why or 'none is listed'}.")
    if as_json:
        typer.echo(orjson.dumps(answer.record(), option=orjson.OPT_INDENT_2).decode())
        return
    rows = [["endpoint", "total_s", *(f"{term}_s" for term in TERMS), "cached_tokens", "lost_by"]]
    for each in answer.candidates:
        if each.terms_s is None:
            rows.append([each.endpoint_id, *["-"] * (len(TERMS) + 2), each.lost_by])
            continue
        numbers = [f"{value:.4f}" for value in (each.total_s or 0.0, *each.terms_s)]
        rows.append([each.endpoint_id, *numbers, str(each.cached_tokens), each.lost_by or "picked"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    head = f"{answer.ticket.input_tokens} input tokens of {answer.ticket.model} go to {answer.endpoint.endpoint_id}"
    typer.echo(f"{head}; first token in {answer.predicted_ttft_s:.3f} s")
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _fail(reason: str) -> NoReturn:
    typer.echo(reason, err=True)
    raise typer.Exit(1)
