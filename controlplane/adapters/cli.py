"""The commands of this package: `orgs`, `projects`, `keys`, `limits`, `models`, straight on the database.

Owns: arguments, output (a table, or `--json` with stable keys) and exit codes. Does not own: any rule (`keys_sql`,
`catalog_sql`), nor `serve` and `demo` (`serve_cli`). No gateway needs to run: a running one learns of a change by its
feed. The embedded SQLite file is brought to the current tables on the way; another database needs `db upgrade`. Only
what can be the first thing done to a house (`orgs create`, `keys bootstrap-admin`, `limits set-class`, `models set`)
makes a data folder; every other command says that there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from controlplane.adapters.cli_session import Place, Stores
    from controlplane.adapters.tenancy_records import LimitQuery, ListQuery, Page
    from controlplane.tenancy import ScopeKind

Commands = dict[str, Callable[..., None]]

DatabaseUrl = Annotated[
    str | None, typer.Option("--database-url", help="SQLAlchemy URL. Default: INFERPLANE_DATABASE_URL.")
]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder of the embedded database and the key pepper.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
After = Annotated[str | None, typer.Option("--after", help="`next_after` of the page before.")]
Count = Annotated[int, typer.Option("--limit", help="Rows of a page (1 to 1000).")]


def register(app: typer.Typer) -> None:
    """Add this package's commands to the root command."""
    for name, about, commands in _groups():
        group = typer.Typer(help=about, no_args_is_help=True)
        for command, function in commands.items():
            group.command(command)(function)
        app.add_typer(group, name=name)
    if find_spec("controlplane.adapters.serve_cli") is not None:
        import_module("controlplane.adapters.serve_cli").register(app)


def _groups() -> tuple[tuple[str, str, Commands], ...]:
    """(group, what it is about, its commands)."""
    orgs: Commands = {"create": orgs_create, "list": orgs_list, "show": orgs_show, "revoke": orgs_revoke}
    projects: Commands = {
        "create": projects_create,
        "list": projects_list,
        "show": projects_show,
        "revoke": projects_revoke,
    }
    keys: Commands = {"create": keys_create, "list": keys_list, "show": keys_show, "revoke": keys_revoke}
    limits: Commands = {"set": limits_set, "list": limits_list, "delete": limits_delete, "classes": limits_classes}
    models: Commands = {"set": models_set, "list": models_list, "delete": models_delete}
    return (
        ("orgs", "Tenants.", {**orgs, "restore": orgs_restore, "set-class": orgs_set_class}),
        ("projects", "Projects of an org.", {**projects, "restore": projects_restore}),
        ("keys", "API keys.", {**keys, "rotate": keys_rotate, "bootstrap-admin": keys_bootstrap_admin}),
        ("limits", "Limits of orgs, projects and keys.", {**limits, "set-class": limits_set_class}),
        ("models", "Names that tenants may ask for, and what serves them.", models),
    )


def _place(
    database_url: str | None, data_dir: Path | None, as_json: bool, *, begins: bool = False, **options: str
) -> Place:
    """`options`: field=option, where the field is an argument of other commands."""
    from controlplane.adapters.cli_session import Place

    return Place(database_url, data_dir, as_json, begins, options)


def _show(place: Place, work: Callable[[Stores], dict[str, Any]]) -> None:
    from controlplane.adapters.cli_session import show

    show(place, work)


def _list(place: Place, work: Callable[[Stores], Page[Any] | tuple[Any, ...]]) -> None:
    from controlplane.adapters.cli_session import listing

    listing(place, work)


def _query(after: str | None, limit: int, org: str | None = None, project: str | None = None) -> ListQuery:
    from controlplane.adapters.tenancy_records import ListQuery

    return ListQuery(after, limit, org, project)


def _one_scope(org: str | None, project: str | None, key: str | None) -> tuple[ScopeKind, str]:
    from controlplane.errors import BadRequest

    owners: list[tuple[ScopeKind, str | None]] = [("org", org), ("project", project), ("key", key)]
    given = [(kind, ref) for kind, ref in owners if ref is not None]
    if len(given) != 1:
        raise BadRequest(f"{len(given)} owners were given; expected exactly one of --org, --project and --key.")
    return given[0]


# Orgs


def orgs_create(
    name: str,
    *,
    tenant_class: Annotated[str, typer.Option("--class", help="Tenant class.")] = "default",
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make an org. The same name again gives the same org."""
    place = _place(database_url, data_dir, as_json, begins=True, tenant_class="--class")
    _show(place, lambda stores: asdict(stores.keys.create_org(name, tenant_class).record))


def orgs_list(
    *,
    after: After = None,
    limit: Count = 100,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """List orgs."""
    _list(_place(database_url, data_dir, as_json), lambda stores: stores.keys.list_orgs(_query(after, limit)))


def orgs_show(org: str, *, database_url: DatabaseUrl = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show one org, by id or name."""
    _show(_place(database_url, data_dir, as_json), lambda stores: asdict(stores.keys.org(org)))


def orgs_revoke(
    org: str, *, database_url: DatabaseUrl = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Shut an org out, with all its projects and keys."""
    _show(_place(database_url, data_dir, as_json), lambda stores: asdict(stores.keys.revoke_org(org)))


def orgs_restore(
    org: str, *, database_url: DatabaseUrl = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Let a revoked org in again."""
    _show(_place(database_url, data_dir, as_json), lambda stores: asdict(stores.keys.restore_org(org)))


def orgs_set_class(
    org: str, tenant_class: str, *, database_url: DatabaseUrl = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Put an org into a tenant class."""
    place = _place(database_url, data_dir, as_json)
    _show(place, lambda stores: asdict(stores.catalog.set_org_class(org, tenant_class)))


# Projects


def projects_create(
    name: str,
    *,
    org: Annotated[str, typer.Option("--org", help="Id or name of the org.")],
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a project of an org. The same name again gives the same project."""
    place = _place(database_url, data_dir, as_json)
    _show(place, lambda stores: asdict(stores.keys.create_project(org, name).record))


def projects_list(
    *,
    org: Annotated[str | None, typer.Option("--org", help="Only of this org.")] = None,
    after: After = None,
    limit: Count = 100,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """List projects."""
    place = _place(database_url, data_dir, as_json)
    _list(place, lambda stores: stores.keys.list_projects(_query(after, limit, org)))


def projects_show(
    project: str, *, database_url: DatabaseUrl = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Show one project, by id or ORG/PROJECT."""
    _show(_place(database_url, data_dir, as_json), lambda stores: asdict(stores.keys.project(project)))


def projects_revoke(
    project: str, *, database_url: DatabaseUrl = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Shut a project out, with all its keys."""
    _show(_place(database_url, data_dir, as_json), lambda stores: asdict(stores.keys.revoke_project(project)))


def projects_restore(
    project: str, *, database_url: DatabaseUrl = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Let a revoked project in again."""
    _show(_place(database_url, data_dir, as_json), lambda stores: asdict(stores.keys.restore_project(project)))


# Keys


def keys_create(
    *,
    project: Annotated[str, typer.Option("--project", help="Id, or ORG/PROJECT.")],
    name: Annotated[str, typer.Option("--name")] = "",
    scope: Annotated[list[str], typer.Option("--scope", help="inference, usage:read, explain, admin. Repeatable.")] = [  # noqa: B006 - typer reads it, nobody changes it
        "inference"
    ],
    model: Annotated[list[str] | None, typer.Option("--model", help="May name only these. Repeatable.")] = None,
    expires: Annotated[str | None, typer.Option("--expires", help="Life, such as 30d. Default: no end.")] = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a key. Its secret is printed once and kept nowhere."""

    def make(stores: Stores) -> dict[str, Any]:
        from controlplane.adapters.cli_session import new_key
        from controlplane.adapters.tenancy_records import KeyWish, parse_duration

        life_s = None if expires is None else parse_duration("--expires", expires)
        wish = KeyWish(name, tuple(scope), tuple(model) if model else None, life_s)
        return new_key(stores.keys.create_key(project, wish))

    _show(_place(database_url, data_dir, as_json, name="--name"), make)


def keys_list(
    *,
    org: Annotated[str | None, typer.Option("--org", help="Only of this org.")] = None,
    project: Annotated[str | None, typer.Option("--project", help="Only of this project.")] = None,
    after: After = None,
    limit: Count = 100,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """List keys, revoked ones included."""
    place = _place(database_url, data_dir, as_json)
    _list(place, lambda stores: stores.keys.list_keys(_query(after, limit, org, project)))


def keys_show(key: str, *, database_url: DatabaseUrl = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show one key, by id or public prefix."""
    _show(_place(database_url, data_dir, as_json), lambda stores: asdict(stores.keys.key(key)))


def keys_revoke(
    key: str, *, database_url: DatabaseUrl = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """End a key for good."""
    _show(_place(database_url, data_dir, as_json), lambda stores: asdict(stores.keys.revoke_key(key)))


def keys_rotate(
    key: str,
    *,
    overlap: Annotated[str, typer.Option("--overlap", help="How long the old key goes on; 0: not at all.")] = "24h",
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a successor with the same rights and limits."""

    def rotate(stores: Stores) -> dict[str, Any]:
        from controlplane.adapters.cli_session import new_key
        from controlplane.adapters.tenancy_records import parse_duration

        return new_key(stores.keys.rotate_key(key, parse_duration("--overlap", overlap)))

    _show(_place(database_url, data_dir, as_json), rotate)


def keys_bootstrap_admin(
    *,
    force: Annotated[bool, typer.Option("--force", help="Even when a live admin key is there.")] = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make the first admin key. It can do everything under /admin/v1, and no inference."""

    def make(stores: Stores) -> dict[str, Any]:
        from controlplane.adapters.cli_session import new_key

        return new_key(stores.keys.bootstrap_admin(force=force))

    _show(_place(database_url, data_dir, as_json, begins=True), make)


# Limits and tenant classes

OrgScope = Annotated[str | None, typer.Option("--org", help="Of this org.")]
ProjectScope = Annotated[str | None, typer.Option("--project", help="Of this project.")]
KeyScope = Annotated[str | None, typer.Option("--key", help="Of this key (and its successors).")]


def limits_set(  # noqa: PLR0913 - each is an option of the command
    *,
    dimension: Annotated[
        str, typer.Option("--dimension", help="requests, input_tokens, output_tokens or concurrency.")
    ],
    amount: Annotated[int, typer.Option("--amount")],
    per: Annotated[str, typer.Option("--per", help="Period, such as 1m.")] = "1m",
    burst: Annotated[int | None, typer.Option("--burst", help="Default: the amount.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Only for this model.")] = None,
    org: OrgScope = None,
    project: ProjectScope = None,
    key: KeyScope = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make or change a limit."""

    def put(stores: Stores) -> dict[str, Any]:
        from controlplane.adapters.tenancy_records import LimitWish, parse_duration

        kind, ref = _one_scope(org, project, key)
        wish = LimitWish(kind, ref, dimension, amount, parse_duration("--per", per), burst, model)
        return asdict(stores.catalog.set_limit(wish))

    _show(_place(database_url, data_dir, as_json), put)


def limits_list(
    *,
    org: OrgScope = None,
    project: ProjectScope = None,
    key: KeyScope = None,
    after: After = None,
    limit: Count = 100,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """List limits: all, or those of one owner."""

    def query() -> LimitQuery:
        from controlplane.adapters.tenancy_records import LimitQuery

        if org is None and project is None and key is None:
            return LimitQuery(None, None, _query(after, limit))
        return LimitQuery(*_one_scope(org, project, key), _query(after, limit))

    _list(_place(database_url, data_dir, as_json), lambda stores: stores.catalog.list_limits(query()))


def limits_delete(
    limit_id: str, *, database_url: DatabaseUrl = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Take a limit away."""
    _show(_place(database_url, data_dir, as_json), lambda stores: asdict(stores.catalog.delete_limit(limit_id)))


def limits_classes(*, database_url: DatabaseUrl = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List tenant classes: what their limits do while Redis is gone."""
    _list(_place(database_url, data_dir, as_json), lambda stores: stores.catalog.list_tenant_classes())


def limits_set_class(
    name: str,
    *,
    outage_policy: Annotated[str, typer.Option("--outage-policy", help="refuse or allow.")],
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make or change a tenant class."""
    place = _place(database_url, data_dir, as_json, begins=True)
    _show(place, lambda stores: asdict(stores.catalog.set_tenant_class(name, outage_policy)))


# Model names


def models_set(
    name: str,
    *,
    served: Annotated[str, typer.Option("--served", help="The name that the engines know.")],
    default_max_output_tokens: Annotated[int | None, typer.Option("--default-max-output-tokens")] = None,
    context_tokens: Annotated[int | None, typer.Option("--context-tokens")] = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make or change a model name that tenants may ask for."""

    def put(stores: Stores) -> dict[str, Any]:
        from controlplane.tenancy import ModelAlias

        return asdict(stores.catalog.set_model(ModelAlias(name, served, default_max_output_tokens, context_tokens)))

    _show(_place(database_url, data_dir, as_json, begins=True), put)


def models_list(*, database_url: DatabaseUrl = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List model names."""
    _list(_place(database_url, data_dir, as_json), lambda stores: stores.catalog.list_models())


def models_delete(
    name: str, *, database_url: DatabaseUrl = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Take a model name away."""
    _show(_place(database_url, data_dir, as_json), lambda stores: asdict(stores.catalog.delete_model(name)))
