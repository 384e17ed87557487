"""Three doors to the same rules: `KeyStore` itself, the HTTP API, and the command line.

Owns: one small interface over the three, so that one suite holds them to the same behaviour (`test_doors.py`). Answers
are dicts in the fields of the records; a refusal is `Refused` with the HTTP status that its door means by it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx
import typer
from fastapi import FastAPI
from typer.testing import CliRunner

from controlplane.adapters import cli
from controlplane.adapters.catalog_sql import CatalogStore
from controlplane.adapters.keys_sql import KeyStore
from controlplane.adapters.tenancy_records import KeyWish, LimitQuery, LimitWish, ListQuery, NewKey
from controlplane.errors import BadRequest

Record = dict[str, Any]
T = TypeVar("T")


class Refused(Exception):
    """The door said no. `status` is 400, 404, 409 (or 1: the command line tells those two apart by words only)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Door(Protocol):
    """What every door can do."""

    def create_org(self, name: str) -> Record: ...
    def list_orgs(self, after: str | None, limit: int) -> tuple[list[Record], str | None]: ...
    def switch_org(self, org: str, verb: str) -> Record: ...
    def create_project(self, org: str, name: str) -> Record: ...
    def switch_project(self, project: str, verb: str) -> Record: ...
    def create_key(self, project: str, **wish: Any) -> Record: ...
    def show_key(self, key: str) -> Record: ...
    def list_keys(self, project: str) -> list[Record]: ...
    def revoke_key(self, key: str) -> Record: ...
    def rotate_key(self, key: str, overlap_s: int) -> Record: ...
    def set_limit(self, kind: str, ref: str, **wish: Any) -> Record: ...
    def list_limits(self, kind: str, ref: str) -> list[Record]: ...
    def delete_limit(self, limit_id: str) -> None: ...


class StoreDoor:
    """Straight to the stores."""

    def __init__(self, keys: KeyStore) -> None:
        self._keys = keys
        self._catalog = CatalogStore(keys.db)

    def create_org(self, name: str) -> Record:
        return self._do(lambda: asdict(self._keys.create_org(name).record))

    def list_orgs(self, after: str | None, limit: int) -> tuple[list[Record], str | None]:
        page = self._do(lambda: self._keys.list_orgs(ListQuery(after, limit)))
        return [asdict(org) for org in page.items], page.next_after

    def switch_org(self, org: str, verb: str) -> Record:
        return self._do(lambda: asdict(getattr(self._keys, f"{verb}_org")(org)))

    def create_project(self, org: str, name: str) -> Record:
        return self._do(lambda: asdict(self._keys.create_project(org, name).record))

    def switch_project(self, project: str, verb: str) -> Record:
        return self._do(lambda: asdict(getattr(self._keys, f"{verb}_project")(project)))

    def create_key(self, project: str, **wish: Any) -> Record:
        return self._do(lambda: self._new(self._keys.create_key(project, KeyWish(**wish))))

    def show_key(self, key: str) -> Record:
        return self._do(lambda: asdict(self._keys.key(key)))

    def list_keys(self, project: str) -> list[Record]:
        page = self._do(lambda: self._keys.list_keys(ListQuery(project_id=project)))
        return [asdict(key) for key in page.items]

    def revoke_key(self, key: str) -> Record:
        return self._do(lambda: asdict(self._keys.revoke_key(key)))

    def rotate_key(self, key: str, overlap_s: int) -> Record:
        return self._do(lambda: self._new(self._keys.rotate_key(key, overlap_s)))

    def set_limit(self, kind: str, ref: str, **wish: Any) -> Record:
        return self._do(lambda: asdict(self._catalog.set_limit(LimitWish(kind, ref, **wish))))  # type: ignore[arg-type] # the literal kinds

    def list_limits(self, kind: str, ref: str) -> list[Record]:
        page = self._do(lambda: self._catalog.list_limits(LimitQuery(kind, ref)))  # type: ignore[arg-type] # as above
        return [asdict(limit) for limit in page.items]

    def delete_limit(self, limit_id: str) -> None:
        self._do(lambda: self._catalog.delete_limit(limit_id))

    @staticmethod
    def _new(new: NewKey) -> Record:
        return {"secret": new.secret, **asdict(new.record)}

    @staticmethod
    def _do(work: Callable[[], T]) -> T:
        try:
            return work()
        except BadRequest as fault:
            raise Refused(fault.status, fault.message) from None


class HttpDoor:
    """Through the HTTP API, with an admin key."""

    def __init__(self, app: FastAPI, secret: str, runner: asyncio.Runner) -> None:
        self._app = app
        self._headers = {"authorization": f"Bearer {secret}"}
        self._runner = runner

    def create_org(self, name: str) -> Record:
        return self._ask("POST", "/orgs", {"name": name})

    def list_orgs(self, after: str | None, limit: int) -> tuple[list[Record], str | None]:
        answer = self._ask("GET", "/orgs", params={"limit": limit, **({"after": after} if after else {})})
        return answer["data"], answer["next_after"]

    def switch_org(self, org: str, verb: str) -> Record:
        return self._ask("DELETE", f"/orgs/{org}") if verb == "revoke" else self._ask("POST", f"/orgs/{org}/restore")

    def create_project(self, org: str, name: str) -> Record:
        return self._ask("POST", "/projects", {"org_id": org, "name": name})

    def switch_project(self, project: str, verb: str) -> Record:
        path = f"/projects/{project}"
        return self._ask("DELETE", path) if verb == "revoke" else self._ask("POST", f"{path}/restore")

    def create_key(self, project: str, **wish: Any) -> Record:
        names = {"life_s": "expires_in_s"}
        body = {
            names.get(name, name): list(value) if isinstance(value, tuple) else value for name, value in wish.items()
        }
        return self._ask("POST", "/keys", {"project_id": project, **body})

    def show_key(self, key: str) -> Record:
        return self._ask("GET", f"/keys/{key}")

    def list_keys(self, project: str) -> list[Record]:
        found: list[Record] = self._ask("GET", "/keys", params={"project_id": project})["data"]
        return found

    def revoke_key(self, key: str) -> Record:
        return self._ask("DELETE", f"/keys/{key}")

    def rotate_key(self, key: str, overlap_s: int) -> Record:
        return self._ask("POST", f"/keys/{key}/rotate", {"overlap_s": overlap_s})

    def set_limit(self, kind: str, ref: str, **wish: Any) -> Record:
        return self._ask("POST", "/limits", {"scope_kind": kind, "scope_id": ref, **wish})

    def list_limits(self, kind: str, ref: str) -> list[Record]:
        found: list[Record] = self._ask("GET", "/limits", params={"scope_kind": kind, "scope_id": ref})["data"]
        return found

    def delete_limit(self, limit_id: str) -> None:
        self._ask("DELETE", f"/limits/{limit_id}")

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None, **more: Any) -> Record:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app=self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://admin", headers=self._headers) as client:
                return await client.request(method, f"/admin/v1{path}", json=body, **more)

        answer = self._runner.run(go())
        if answer.status_code >= 400:
            raise Refused(answer.status_code, answer.json()["error"]["message"])
        record: Record = answer.json()
        return record


class CliDoor:
    """Through the command line, in this process."""

    def __init__(self, url: str, data_dir: Path) -> None:
        self._where = ["--database-url", url, "--data-dir", str(data_dir), "--json"]
        self._app = typer.Typer()
        cli.register(self._app)

    def create_org(self, name: str) -> Record:
        return self._run("orgs", "create", name)

    def list_orgs(self, after: str | None, limit: int) -> tuple[list[Record], str | None]:
        answer = self._run("orgs", "list", "--limit", str(limit), *(["--after", after] if after else []))
        return answer["data"], answer["next_after"]

    def switch_org(self, org: str, verb: str) -> Record:
        return self._run("orgs", verb, org)

    def create_project(self, org: str, name: str) -> Record:
        return self._run("projects", "create", name, "--org", org)

    def switch_project(self, project: str, verb: str) -> Record:
        return self._run("projects", verb, project)

    def create_key(self, project: str, **wish: Any) -> Record:
        options = ["--project", project]
        for name, value in wish.items():
            match name:
                case "life_s":
                    options += ["--expires", f"{value}s"]
                case "scopes" | "models":
                    for item in value:
                        options += [f"--{name[:-1]}", item]
                case _:
                    options += [f"--{name}", value]
        return self._run("keys", "create", *options)

    def show_key(self, key: str) -> Record:
        return self._run("keys", "show", key)

    def list_keys(self, project: str) -> list[Record]:
        found: list[Record] = self._run("keys", "list", "--project", project)["data"]
        return found

    def revoke_key(self, key: str) -> Record:
        return self._run("keys", "revoke", key)

    def rotate_key(self, key: str, overlap_s: int) -> Record:
        return self._run("keys", "rotate", key, "--overlap", str(overlap_s))

    def set_limit(self, kind: str, ref: str, **wish: Any) -> Record:
        options = [f"--{kind}", ref]
        for name, value in wish.items():
            options += ["--per" if name == "period_s" else f"--{name}", str(value)]
        return self._run("limits", "set", *options)

    def list_limits(self, kind: str, ref: str) -> list[Record]:
        found: list[Record] = self._run("limits", "list", f"--{kind}", ref)["data"]
        return found

    def delete_limit(self, limit_id: str) -> None:
        self._run("limits", "delete", limit_id)

    def _run(self, *words: str) -> Record:
        result = CliRunner().invoke(self._app, [*words, *self._where])
        if result.exit_code == 0:
            record: Record = json.loads(result.stdout)
            return record
        assert isinstance(result.exception, SystemExit), result.exception
        raise Refused({2: 400}.get(result.exit_code, result.exit_code), result.stderr.strip())
