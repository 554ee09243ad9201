"""The catalog: what methods there are, what they are for and where to import them.

Nothing heavy is imported until `Method.load` is called.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


class UnknownNameError(LookupError):
    """There is no method, family or kind of that name; the message offers the nearest ones."""


@dataclass(frozen=True)
class Family:
    """A group of methods that share an interface and an extra."""

    name: str
    title: str
    summary: str
    extra: str

    @property
    def methods(self) -> list[Method]:
        """The family's methods."""
        return [method for method in all_methods().values() if method.family == self.name]


@dataclass(frozen=True)
class Method:
    """A method of the library.

    Parameters
    ----------
    slug : str
        Its name in commands and file names.
    name, title : str
        As the paper calls it, and what it is.
    family, kind : str
    summary, when, not_when : str
        What it does; when to use it, and when not to.
    module : str
        Where users import it from.
    objects : tuple of str
        What they import: the first is the method itself.
    venue : str
        Where its paper was published.
    """

    slug: str
    name: str
    title: str
    family: str
    kind: str
    summary: str
    when: str
    not_when: str
    module: str
    objects: tuple[str, ...]
    venue: str

    @property
    def import_line(self) -> str:
        """The line that imports the method."""
        return f"from {self.module} import {self.objects[0]}"

    @property
    def extra(self) -> str:
        """The extra that brings what the method needs."""
        return all_families()[self.family].extra

    @property
    def install_line(self) -> str:
        """The command that installs what the method needs."""
        return f'pip install "thalweg[{self.extra}]"'

    @property
    def claims_module(self) -> str:
        """The module that holds the method's claims."""
        return f"thalweg.claims.{self.family}.{self.slug.replace('-', '_')}"

    def load(self) -> Any:
        """Import the method and return its main object.

        Raises
        ------
        MissingExtraError
            If the family's extra is not installed.
        """
        return getattr(importlib.import_module(self.module), self.objects[0])

    def evidence(self) -> list[dict[str, Any]]:
        """Return the published records of the method's claims, the headline first."""
        for folder in (_HERE / "evidence" / "published", _HERE.parents[1] / "docs" / "evidence"):
            path = folder / f"{self.slug}.json"
            if path.exists():
                records: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
                return records
        return []


@functools.cache
def all_families() -> dict[str, Family]:
    """Return the families by name."""
    return {name: Family(name, **table) for name, table in _tables()["families"].items()}


@functools.cache
def all_methods() -> dict[str, Method]:
    """Return the methods by slug, sorted by family and slug."""
    found = [
        Method(slug, **{**table, "objects": tuple(table["objects"])})
        for slug, table in _tables()["methods"].items()
    ]
    return {m.slug: m for m in sorted(found, key=lambda m: (m.family, m.slug))}


def method(slug: str) -> Method:
    """Return the method ``slug``.

    Raises
    ------
    UnknownNameError
        If there is none; the message offers the nearest slugs.

    Examples
    --------
    >>> method("eqol").import_line
    'from thalweg.bandits import EQOL'
    >>> method("eqoll")
    Traceback (most recent call last):
        ...
    thalweg.catalog.UnknownNameError: no method 'eqoll'; did you mean eqol?
    """
    return all_methods()[_known("method", slug, list(all_methods()))]


def select(names: Sequence[str]) -> list[Method]:
    """Return the methods that slugs, family names and ``"all"`` stand for, each once.

    Raises
    ------
    UnknownNameError
        If a name is none of these.
    """
    known = ["all", *all_families(), *all_methods()]
    chosen = {_known("method or family", name, known) for name in names}
    return [m for m in all_methods().values() if chosen & {"all", m.family, m.slug}]


def find(
    words: Sequence[str] = (), family: str | None = None, kind: str | None = None
) -> list[Method]:
    """Return the methods of a family and kind whose texts contain all ``words``, whatever the case.

    Raises
    ------
    UnknownNameError
        If there is no such family or kind.
    """
    if family is not None:
        _known("family", family, list(all_families()))
    if kind is not None:
        _known("kind", kind, sorted({m.kind for m in all_methods().values()}))
    return [
        m
        for m in all_methods().values()
        if family in (None, m.family)
        and kind in (None, m.kind)
        and all(word.lower() in _text(m) for word in words)
    ]


def _text(m: Method) -> str:
    parts = (m.slug, m.name, m.title, m.family, m.kind, m.summary, m.when, *m.objects)
    return " ".join(parts).lower()


def _known(what: str, name: str, names: list[str]) -> str:
    if name in names:
        return name
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"
    raise UnknownNameError(f"no {what} {name!r}; {hint}")


@functools.cache
def _tables() -> dict[str, Any]:
    return tomllib.loads((_HERE / "catalog.toml").read_text(encoding="utf-8"))
