"""The house rules that neither ruff nor import-linter can see, as functions from a source file to violations.

Owns: every rule, its scope and its named exceptions (each with its reason). Does not own: running them over the tree
and proving that each one bites (`test_tidy.py`). A violation is one line that says where, what and what to do.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

PACKAGES = ("controlplane", "operators", "router", "billing", "perfmodel")
# Modules at a package's root that wire the process rather than decide; the Cores contract in pyproject.toml agrees.
SHELL_MODULES = frozenset({"__main__", "app", "config"})
# Hard maxima of the house (docs/architecture.md): one file that everything passes through is how good projects rot.
FILE_LINES_MAX, FUNCTION_LINES_MAX, POSITIONAL_PARAMETERS_MAX = 600, 60, 5

BANNED_WORDS = frozenset(
    "util utils helper helpers common manager managers handler handlers base bases misc".split(),
)
# Last words of a name that say the unit; a name with `_per_` says it too.
UNITS = frozenset(
    "s ms us ns min hours bytes mib gib bits tokens token blocks requests steps pairs usd minor pico micro nano "
    "units count ratio permille ppm flops flop watts w hz elements years cv2".split()
)
# Last words of a number that is a name or a place in an order, not a quantity.
IDENTIFIERS = frozenset("id ids index hash hashes seed sequence generation position segment version".split())
# Numeric fields whose unit is the thing itself; the reason is why no unit can be named.
UNITLESS_FIELDS: dict[str, str] = {
    "status": "an HTTP status",
    "port": "a TCP port",
    "bootstrap_port": "a TCP port",
    "attempt": "an ordinal",
    "epoch": "an ordinal",
    "choices": "the wire's own name n: completions asked for",
    "requests": "a count of requests, named by its dimension",
    "amount": "counts what the sibling field `dimension` says",
    "burst": "counts what the sibling field `dimension` says",
    "needed": "counts what the refused limit's dimension says",
    "left": "counts what the refused limit's dimension says",
    "start": "a byte offset in the body beside `end`",
    "end": "a byte offset in the body beside `start`",
    "price": "micro-USD per 1,000,000 tokens, the one unit of prices",
    "need": "counts what the limit's dimension says",
    "formats": "penalty weight of a group of corrections",
    "engines": "penalty weight of a group of corrections",
    "eras": "penalty weight of a group of corrections",
    "generations": "penalty weight of a group of corrections",
    "families": "penalty weight of a group of corrections",
    "weight": "how much a measured point counts in a fit",
    "penalty": "of a fit, per squared log factor",
    "prior": "the value that a fitted parameter is drawn to, in the parameter's own unit",
    "value": "in the unit that the figure's own name says",
    "p10": "a quantile, in the unit that the figure's own name says",
    "p90": "a quantile, in the unit that the figure's own name says",
    "iterations": "a count of refits",
    "tensor": "a count of devices, the field's own word",
    "data": "a count of ranks, the field's own word",
    "expert": "a count of ranks, the field's own word",
    "in_flight": "requests, the word of the field",
    "batch": "sequences in one step, the field's own word",
    "batch_mean": "sequences in one step, the field's own word",
    "concurrency": "requests in flight at once, the field's own word",
    "micro_batches_to_hide": "a count of micro-batches",
    "replicas": "a count of engines, the field's own word",
    "pue": "a ratio: power usage effectiveness",
    "key_size": "elements of one head's key, as model files say head_dim",
    "value_size": "elements of one head's value",
    "nope_size": "elements of a key without position (MLA)",
    "rope_size": "elements of a key with position (MLA)",
    "query_size": "elements of one head's query",
    "query_rank": "elements of the compressed query (MLA)",
    "kv_rank": "elements of the compressed key and value (MLA)",
    "output_rank": "elements of the compressed output",
    "latent_size": "elements of a latent",
    "shared_intermediate_size": "elements, as model files say it",
    "now": "in the unit that the input's own name says",
    "want": "counts what the limit's dimension says",
    "spent": "counts what the limit's dimension says",
    "returned": "counts what the limit's dimension says",
    "debt": "counts what the limit's dimension says",
    "credits": "counts what the limit's dimension says",
    "held": "counts what the limit's dimension says",
    "out": "counts what the limit's dimension says",
    "granted": "counts what the limit's dimension says",
    "level": "a bucket's fill, in what the limit's dimension counts",
    "fraction": "a bucket's remainder, in parts of its period",
    "cost": "counts what the limit's dimension says",
    "taken": "counts what the limit's dimension says",
    "event_xor": "a 128-bit checksum",
    "withdrawn": "identifiers of blocks",
    "lost": "identifiers of blocks",
    "leaf": "an identifier of a block",
    "base": "an identifier of a block",
    "phase": "one of three named states",
    "refill_until": "a position in a sequence of tokens",
    "preemptions": "a count of itself, by the engine's own metric name",
    "refused": "a count of itself, by the engine's own metric name",
    "event_xor_high": "half of a 128-bit checksum",
    "event_xor_low": "half of a 128-bit checksum",
    "hidden_size": "the field's own name of a model's dimension",
    "head_size": "the field's own name of a model's dimension",
    "intermediate_size": "the field's own name of a model's dimension",
    "vocabulary_size": "the field's own name of a model's dimension",
}
# Files that may name an environment variable outside config.py, and why.
ENVIRONMENT_READERS: dict[str, str] = {
    "perfmodel/adapters/perf_table.py": "whether COLUMNS is set, which rich reads: a pipe without it has no width",
    "controlplane/adapters/processes.py": "sets PROMETHEUS_MULTIPROC_DIR, which prometheus_client reads on import",
}
# Lower-case names at module level that a framework asks for by name.
FRAMEWORK_NAMES = frozenset(
    {"revision", "down_revision", "branch_labels", "depends_on", "logger", "_logger", "log", "_log"}
)


@dataclass(frozen=True)
class Source:
    """One Python file: its path from the repository's root and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file; empty when it cannot be parsed, which `file_parses` reports once."""
        try:
            return ast.parse(self.text, self.path)
        except SyntaxError:
            return ast.Module([], [])

    @cached_property
    def lines(self) -> list[str]:
        """The text by lines, without their ends."""
        return self.text.splitlines()

    @property
    def parts(self) -> tuple[str, ...]:
        """Path components, the last one without `.py`."""
        return PurePosixPath(self.path).with_suffix("").parts

    @property
    def in_product(self) -> bool:
        """Whether the file is part of what we ship."""
        return self.parts[0] in PACKAGES

    @property
    def is_migration(self) -> bool:
        """Alembic's files have Alembic's form."""
        return "migrations" in self.parts

    @property
    def is_core(self) -> bool:
        """Whether the file must be pure: in a package, outside adapters, and not the shell of a process."""
        return self.in_product and "adapters" not in self.parts and self.parts[-1] not in SHELL_MODULES

    def at(self, node: ast.AST, what: str) -> str:
        """`path:line: what`."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {what}"


Rule = Callable[[Source], Iterator[str]]
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(source: Source) -> Iterator[_Function]:
    return (node for node in ast.walk(source.tree) if isinstance(node, _Function))


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or attribute chain, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = _dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return ""


def _module_assignments(source: Source) -> Iterator[tuple[ast.stmt, str, ast.expr | None]]:
    """Statement, name and value of every plain assignment at module level."""
    for statement in source.tree.body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                yield from ((statement, name.id, statement.value) for name in names if isinstance(name, ast.Name))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement, statement.target.id, statement.value


def file_parses(source: Source) -> Iterator[str]:
    """Python can read it."""
    try:
        ast.parse(source.text, source.path)
    except SyntaxError as fault:
        yield f"{source.path}:{fault.lineno}: {fault.msg}"


def file_is_short(source: Source) -> Iterator[str]:
    """At most 600 lines."""
    if len(source.lines) > FILE_LINES_MAX:
        yield f"{source.path}: {len(source.lines)} lines; at most {FILE_LINES_MAX}: split it by what it owns"


def functions_are_short(source: Source) -> Iterator[str]:
    """At most 60 lines from `def` to the last statement; in a migration one table is one list of columns."""
    if source.is_migration:
        return
    for function in _functions(source):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        if length > FUNCTION_LINES_MAX:
            yield source.at(function, f"{function.name} has {length} lines; at most {FUNCTION_LINES_MAX}")


def functions_take_few_positionals(source: Source) -> Iterator[str]:
    """At most five positional parameters, `self` and `cls` aside."""
    if not source.in_product:
        return
    for function in _functions(source):
        names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        count = len([name for name in names if name not in ("self", "cls")])
        if count > POSITIONAL_PARAMETERS_MAX:
            yield source.at(function, f"{function.name} takes {count} positional parameters; make one frozen dataclass")


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]


def names_say_what_they_hold(source: Source) -> Iterator[str]:
    """No utils, helpers, common, manager, handler, base or misc: say what it is."""
    stem = _words(source.parts[-1])
    if stem and stem[-1] in BANNED_WORDS:
        yield f"{source.path}: a file may not be called {source.parts[-1]!r}: name what it owns"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef):
            words = _words(node.name)
            if words and (words[0] in BANNED_WORDS or words[-1] in BANNED_WORDS):
                yield source.at(node, f"class {node.name}: name what it is")
        elif isinstance(node, _Function):
            words = _words(node.name)
            if words and words[-1] in BANNED_WORDS:
                yield source.at(node, f"function {node.name}: name what it does")


def modules_say_what_they_own(source: Source) -> Iterator[str]:
    """A module docstring of three lines or more."""
    if not source.in_product or source.is_migration or source.parts[-1] == "__init__":
        return
    docstring = ast.get_docstring(source.tree) or ""
    if len(docstring.splitlines()) < 3:
        yield f"{source.path}:1: the module docstring needs 3 lines: what it owns, what it does not own, why"


def core_docstrings_exist(source: Source) -> Iterator[str]:
    """Every public class and function of a core has a docstring."""
    if not source.is_core:
        return
    for node in source.tree.body:
        if (
            isinstance(node, ast.ClassDef | _Function)
            and not node.name.startswith("_")
            and ast.get_docstring(node) is None
        ):
            yield source.at(node, f"{node.name} is public and has no docstring")


# Calls that read the world or change it, by the name they are called with.
_IMPURE_CALLS = frozenset(
    "open print input exec eval breakpoint datetime.now datetime.utcnow datetime.today date.today "
    "datetime.datetime.now datetime.datetime.utcnow datetime.datetime.today datetime.date.today np.random.rand "
    "np.random.random np.random.default_rng numpy.random.default_rng np.load np.save".split()
)
_CLOCK_MODULES = frozenset({"time", "random", "secrets", "os", "uuid", "socket"})


def cores_are_pure(source: Source) -> Iterator[str]:
    """No I/O, clock, dice or input in a core: time, ids and dice are arguments."""
    if not source.is_core:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            called = _dotted(node.func)
            seeded = called.endswith("default_rng") and bool(node.args or node.keywords)
            if (called in _IMPURE_CALLS and not seeded) or called.split(".")[0] in _CLOCK_MODULES:
                yield source.at(node, f"{called}() in a core: make it an argument or move it to adapters/")


def cores_do_not_await(source: Source) -> Iterator[str]:
    """Only serve.py awaits; a core may declare an asynchronous port, but not use one."""
    if not source.is_core or source.path == "controlplane/serve.py":
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith):
            yield source.at(node, "await in a core: only controlplane/serve.py waits")


def nothing_is_global(source: Source) -> Iterator[str]:
    """No `global` statement."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield source.at(node, f"global {', '.join(node.names)}: pass the state, build it in app.py")


def modules_hold_no_state(source: Source) -> Iterator[str]:
    """Module-level names are constants, types or functions; an empty container is state to come."""
    if not source.in_product:
        return
    for statement, name, value in _module_assignments(source):
        if name.startswith("__") or name in FRAMEWORK_NAMES:
            continue
        bare = name.lstrip("_")
        if bare == bare.lower() and not _is_function(value):
            yield source.at(statement, f"{name} is a variable of the module: build it in app.py and pass it on")
        elif bare == bare.upper() and _is_empty_container(value):
            yield source.at(statement, f"{name} starts empty, so something will fill it: no module state")


def _is_function(value: ast.expr | None) -> bool:
    """A bound method or one of the operator module's functions, given a short name."""
    made = {"attrgetter", "itemgetter", "methodcaller", "partial"}
    if isinstance(value, ast.Call):
        return _dotted(value.func).split(".")[-1] in made
    return isinstance(value, ast.Attribute | ast.Lambda)


def _is_empty_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.List | ast.Set):
        return not value.elts
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.Call):
        return _dotted(value.func).split(".")[-1] in {
            "dict",
            "list",
            "set",
            "defaultdict",
            "deque",
            "OrderedDict",
        } and (not value.args or _dotted(value.func).endswith("defaultdict"))
    return False


def _dataclasses(source: Source) -> Iterator[tuple[ast.ClassDef, set[str]]]:
    """Every dataclass of the file with the names of the flags that are True."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for decorator in node.decorator_list:
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            if _dotted(call).split(".")[-1] == "dataclass":
                keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
                yield node, {word.arg or "" for word in keywords if getattr(word.value, "value", None) is True}


def core_dataclasses_are_frozen(source: Source) -> Iterator[str]:
    """frozen and slots; one that must change says "Mutable: <why>" in its docstring, and keeps its slots."""
    if not source.is_core:
        return
    for node, flags in _dataclasses(source):
        if "slots" not in flags:
            yield source.at(node, f"{node.name}: @dataclass needs slots=True")
        if "frozen" not in flags and not re.search(r"\bMutable\b\W*\w", ast.get_docstring(node) or ""):
            yield source.at(node, f"{node.name}: @dataclass needs frozen=True, or 'Mutable: <why>' in its docstring")


def _is_numeric(annotation: ast.expr) -> bool:
    """int, float, an optional one, or a tuple of them."""
    if isinstance(annotation, ast.Name):
        return annotation.id in ("int", "float")
    if isinstance(annotation, ast.BinOp):
        return _is_numeric(annotation.left) or _is_numeric(annotation.right)
    if isinstance(annotation, ast.Subscript) and _dotted(annotation.value) == "tuple":
        inner = annotation.slice
        return any(_is_numeric(element) for element in (inner.elts if isinstance(inner, ast.Tuple) else [inner]))
    return False


def numbers_name_their_unit(source: Source) -> Iterator[str]:
    """A numeric field of a core dataclass ends in its unit, in `count` or in `ratio`."""
    if not source.is_core:
        return
    for node, _ in _dataclasses(source):
        for field in node.body:
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            name = field.target.id
            if not _is_numeric(field.annotation) or name.lstrip("_") in UNITLESS_FIELDS or "_per_" in name:
                continue
            if name.split("_")[-1] not in UNITS | IDENTIFIERS:
                yield source.at(
                    field,
                    f"{node.name}.{name} is a number without a unit: end it in one of UNITS, or add it to "
                    "UNITLESS_FIELDS in tests/tidy_rules.py with the reason",
                )


def _is_number(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Constant):
        return type(value.value) in (int, float)
    if isinstance(value, ast.UnaryOp):
        return _is_number(value.operand)
    if isinstance(value, ast.BinOp):
        return _is_number(value.left) and _is_number(value.right)
    return False


def constants_have_a_source(source: Source) -> Iterator[str]:
    """A comment above each numeric constant of a module, or above the block of them that it stands in."""
    if not source.in_product or source.is_migration:
        return
    for statement, name, value in _module_assignments(source):
        if not _is_number(value) or name != name.upper():
            continue
        above = statement.lineno - 2
        while above >= 0 and re.match(r"_?[A-Z][A-Z0-9_]*(:.*)? = ", source.lines[above]):
            above -= 1
        if above < 0 or not source.lines[above].startswith("#"):
            yield source.at(statement, f"{name} needs a comment above it: where the number comes from, or why it is so")


def environment_is_read_once(source: Source) -> Iterator[str]:
    """os.environ and os.getenv only in config.py."""
    if not source.in_product or source.parts[-1] == "config" or source.path in ENVIRONMENT_READERS:
        return
    for node in ast.walk(source.tree):
        from_os = isinstance(node, ast.ImportFrom) and node.module == "os"
        imported = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) and from_os else set()
        if _dotted(node) in ("os.environ", "os.getenv", "os.environb") or imported & {"environ", "getenv"}:
            yield source.at(node, "the environment is read in config.py only: take the setting as an argument")


def tests_use_no_mocks(source: Source) -> Iterator[str]:
    """No unittest.mock: pass a fake that ships and passes the contract suite."""
    for node in ast.walk(source.tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        joined = [f"{module}.{name}" if module else name for name in names]
        if any(name.startswith(("unittest.mock", "mock.", "pytest_mock")) or name == "mock" for name in joined):
            yield source.at(node, "mocks are banned: write a fake in tests/fakes that passes the port's contract suite")
        if isinstance(node, _Function) and any(argument.arg == "mocker" for argument in node.args.args):
            yield source.at(node, "mocks are banned: write a fake in tests/fakes that passes the port's contract suite")


def suppressions_have_a_reason(source: Source) -> Iterator[str]:
    """`noqa` names its rules, `type: ignore` its codes, and both say why on the same line."""
    for number, line in enumerate(source.lines, 1):
        if re.search(r"#\s*noqa\b(?!:\s*[A-Z]+\d+(,\s*[A-Z]+\d+)*\s+\S)", line):
            yield f"{source.path}:{number}: noqa needs its rule and a reason after it"
        if re.search(r"#\s*type:\s*ignore(?!\[[\w, -]+\]\s+#?\s*\w)", line):
            yield f"{source.path}:{number}: type: ignore needs its code and a reason after it"


def nothing_is_left_to_do(source: Source) -> Iterator[str]:
    """No unfinished marks and no stubs in what we ship."""
    if not source.in_product or source.is_migration:  # a migration without a way back says so with that exception
        return
    for number, line in enumerate(source.lines, 1):
        if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line):
            yield f"{source.path}:{number}: unfinished: do it, or file an issue and remove the mark"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if _dotted(raised) == "NotImplementedError":
                yield source.at(node, "NotImplementedError is a stub: use a Protocol for a port")


def package_roots_offer_cores_only(source: Source) -> Iterator[str]:
    """`import router` must not pull in I/O: a package's `__init__` imports no adapter."""
    if not source.in_product or len(source.parts) != 2 or source.parts[-1] != "__init__":
        return
    for node in ast.walk(source.tree):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if any("adapters" in module.split(".") for module in modules):
            yield source.at(node, "a package's root may not import an adapter")


SOURCE_RULES: tuple[Rule, ...] = (
    file_parses,
    file_is_short,
    functions_are_short,
    functions_take_few_positionals,
    names_say_what_they_hold,
    modules_say_what_they_own,
    core_docstrings_exist,
    cores_are_pure,
    cores_do_not_await,
    nothing_is_global,
    modules_hold_no_state,
    core_dataclasses_are_frozen,
    numbers_name_their_unit,
    constants_have_a_source,
    environment_is_read_once,
    tests_use_no_mocks,
    suppressions_have_a_reason,
    nothing_is_left_to_do,
    package_roots_offer_cores_only,
)
