"""What the keys of recipes mean, read from the classes that hold them."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cosmos_app.output import print_json
from cosmos_app.recipes import RECIPE_KINDS
from cosmos_core import ConfigError, ConfigProblem
from cosmos_core.config import FieldDoc, TableDoc, describe_config, describe_table, json_schema

_MOST_FOUND = 40


def explain_key(key: str, *, kind: str | None, as_json: bool) -> int:
    """Print what a table or a key of recipes is, or the keys that a word occurs in.

    Args:
        key: dotted path, a word to look for, or "" for the recipe itself.
        kind: of the recipe; by default the first that has the key, ``rl`` before all.
        as_json: print tables and keys as JSON instead.

    Returns:
        The exit code.

    Raises:
        ConfigError: if no key is called so and none mentions the word.
    """
    for name in [kind] if kind else RECIPE_KINDS:
        tables = describe_table(RECIPE_KINDS[name], key)
        keys = [] if tables else _keys_at(RECIPE_KINDS[name], key)
        if tables or keys:
            return _show(name, tables, keys, as_json=as_json)
    found = {name: _mentions(name, key) for name in ([kind] if kind else RECIPE_KINDS)}
    if not any(found.values()):
        raise ConfigError([_unknown(key, kind)])
    if as_json:
        print_json({name: [asdict(one) for one in keys] for name, keys in found.items() if keys})
    else:
        _print_found(key, found)
    return 0


def print_schema(kind: str | None) -> int:
    """Print the JSON Schema of one kind of recipe, ``rl`` by default; return the exit code."""
    print_json(json_schema(RECIPE_KINDS[kind or "rl"]))
    return 0


def _keys_at(cls: type, path: str) -> list[FieldDoc]:
    """Return the keys at a path that holds no table: one of each kind that has its own."""
    parent, _, name = path.rpartition(".")
    keys = dict[tuple[str, str, str], FieldDoc]()
    for table in describe_table(cls, parent):
        for key in table.keys:
            if key.path.rpartition(".")[2] == name:
                of = f'{table.path}.kind = "{table.kind}"' if table.kind and table.path else ""
                shown = replace(key, when=of)
                keys.setdefault((key.type, key.default, key.doc), shown)
    return list(keys.values())


def _mentions(kind: str, word: str) -> list[FieldDoc]:
    """Return the keys whose name is a word, or else has it, or else those whose text has it."""
    keys = dict[str, FieldDoc]()
    for key in describe_config(RECIPE_KINDS[kind]):
        if not _is_kind(key):
            keys.setdefault(key.path, key)
    names = {path: path.rpartition(".")[2] for path in keys}
    for found in (
        [key for path, key in keys.items() if names[path] == word],
        [key for path, key in keys.items() if word in names[path]],
        [key for key in keys.values() if word.lower() in key.doc.lower()],
    ):
        if found:
            return found
    return []


def _is_kind(key: FieldDoc) -> bool:
    return key.path.rpartition(".")[2] == "kind"


def _unknown(key: str, kind: str | None) -> ConfigProblem:
    kinds = [kind] if kind else list(RECIPE_KINDS)
    names = {
        part for name in kinds for one in describe_config(RECIPE_KINDS[name])
        for part in (one.path, one.path.rpartition(".")[2])
    }  # fmt: skip
    close = difflib.get_close_matches(key, sorted(names), n=1)
    return ConfigProblem(
        path=key,
        problem=f"no key of {'any recipe' if kind is None else f'kind {kind!r}'} is called {key!r}",
        hint=f"did you mean {close[0]}?" if close else "'cosmos-app explain' lists the tables",
    )


def _show(kind: str, tables: Sequence[TableDoc], keys: Sequence[FieldDoc], *, as_json: bool) -> int:
    if as_json:
        found = {"tables": tables} if tables else {"keys": keys}
        shown = {name: [asdict(one) for one in ones] for name, ones in found.items()}
        print_json({"kind": kind, **shown})
        return 0
    console = Console(highlight=False)
    if kind != "rl" and (keys or tables[0].path):
        console.print(f'In recipes with kind = "{kind}":', style="dim")
    if keys:
        for key in keys:
            _print_key(console, key)
    elif not tables[0].path:
        _print_root(console, kind, tables[0])
    else:
        _print_tables(console, tables)
    return 0


def _print_root(console: Console, kind: str, table: TableDoc) -> None:
    console.print(f'{table.doc} kind = "{kind}"{", which need not be said" * (kind == "rl")}:')
    console.print(_rows(table.keys))
    others = [name for name in RECIPE_KINDS if name != kind]
    console.print(
        f"\nOther kinds, with --kind: {', '.join(others)}.\n"
        "One table, one key, or keys by a word: cosmos-app explain staleness; explain lr"
    )


def _print_tables(console: Console, tables: Sequence[TableDoc]) -> None:
    """Print all kinds of a table by their first lines, and the keys of one."""
    shown = next((table for table in tables if table.is_default), tables[0])
    if len(tables) > 1:
        console.print(Text.assemble((shown.path, "bold"), " is one of these kinds:"))
        grid = Table.grid(padding=(0, 2))
        for table in tables:
            marked = f"{table.kind} (default)" if table.is_default else table.kind
            grid.add_row(Text(f"  {marked}", "cyan"), _plain(table.doc))
        console.print(grid)
        console.print(f'\nkind = "{shown.kind}" has these keys:')
    else:
        console.print(Text.assemble((shown.path, "bold"), "  ", _plain(shown.doc)))
    console.print(_rows(shown.keys) if shown.keys else "  none")
    if len(tables) > 1:
        other = next(table for table in tables if table is not shown)
        where = shown.path.removesuffix(".N").removesuffix(".NAME")
        console.print(f"\nThose of another: cosmos-app explain {where}.{other.kind}")


def _print_key(console: Console, key: FieldDoc) -> None:
    table, _, name = key.path.rpartition(".")
    console.print(Text.assemble((key.path, "bold"), f"  where {key.when}" if key.when else ""))
    default = "has to be given" if key.required else f"default {key.default}"
    value = key.default if not key.required and key.default != "none" else "..."
    header = f"[{table}]\n" if table else ""
    for text, bottom in (
        (_plain(key.doc), 0),
        (Text(f"{key.type}; {default}", "dim"), 0),
        (Text(f"{header}{name} = {value}", "cyan"), 1),
    ):
        console.print(Padding(text, (0, 0, bottom, 2), expand=False))


def _print_found(word: str, found: dict[str, list[FieldDoc]]) -> None:
    console = Console(highlight=False)
    kind, keys = next((kind, keys) for kind, keys in found.items() if keys)
    console.print(f'Keys with "{word}" in recipes with kind = "{kind}":')
    console.print(_rows(keys[:_MOST_FOUND], whole_path=True))
    if len(keys) > _MOST_FOUND:
        console.print(f"  and {len(keys) - _MOST_FOUND} more; --json has all")
    others = [f"{name} ({len(more)})" for name, more in found.items() if more and name != kind]
    if others:
        console.print(f"\nOther kinds have it too, with --kind: {', '.join(others)}")


def _rows(keys: Iterable[FieldDoc], *, whole_path: bool = False) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=not whole_path, overflow="fold")
    grid.add_column(max_width=24, overflow="fold")
    grid.add_column(ratio=1)
    for key in keys:
        if _is_kind(key):
            continue
        name = key.path if whole_path else key.path.rpartition(".")[2]
        is_table = key.type.startswith("a table")
        default = "required" if key.required else key.default
        choices = f" ({key.type})" if "one of" in key.type else ""
        grid.add_row(
            Text(f"  {name}", "cyan"),
            Text("table" if is_table and key.default != "none" else default, "dim"),
            _plain(key.doc + choices),
        )
    return grid


def _plain(doc: str) -> str:
    """Return a docstring's text with one kind of quotes, and nothing that rich would take."""
    return doc.replace("``", "`").replace("[", "\\[")
