"""No class has so many public methods that nobody can know them: a class that needs more is two."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.rules.test_layers import CSRC, sources

MOST = 25
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|^\s*#[^\n]*(?:\\\n[^\n]*)*", re.DOTALL | re.MULTILINE)
_HEAD = re.compile(r"\b(class|struct)\s+(\w+)(?:\s+final)?\s*(?::[^;{]*)?\{")
_NO_METHOD = re.compile(
    r"\s*(?:friend|using|static_assert|enum|class|struct|template\s*<[^;]*friend)"
)


def _body(text: str, begin: int) -> str:
    """What stands between the brace before `begin` and the brace that closes it."""
    depth, at = 1, begin
    while depth:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return text[begin : at - 1]


def _declarations(body: str) -> Iterator[str]:
    """The declarations of a class, without what is between their braces."""
    while (brace := body.find("{")) >= 0:
        inside = _body(body, brace + 1)
        rest = body[brace + len(inside) + 2 :]
        # A function ends with its body; what else has braces, such as a default, goes on.
        ends = ";" if re.search(r"\)[^;()]*$", body[:brace]) else ""
        body = body[:brace] + ends + rest
    yield from re.split(r";|(?<=\w):(?!:)", body)


def public_methods(text: str) -> dict[str, int]:
    """The classes that a header defines, and how many public methods each declares."""
    text = _COMMENT.sub("", text)
    found = {}
    for head in _HEAD.finditer(text):
        public = head.group(1) == "struct"
        count = 0
        for declaration in _declarations(_body(text, head.end())):
            stripped = declaration.strip()
            if stripped in {"public", "protected", "private"}:
                public = stripped == "public"
            elif "(" in stripped and "= delete" not in stripped:
                count += public and _NO_METHOD.match(declaration) is None
        found[head.group(2)] = count
    return found


def test_classes_have_few_public_methods() -> None:
    counted = 0
    for path in sources():
        if path.suffix != ".h":
            continue
        for name, methods in public_methods(path.read_text()).items():
            counted += 1
            assert methods <= MOST, f"{path.relative_to(CSRC)}: {name} has {methods}"
    assert counted > 200


@pytest.mark.parametrize(
    ("text", "methods"),
    [
        ("class A { void f(); };", 0),
        ("struct A { void f(); int g() const { return h(); } };", 2),
        ("class A final : public B<C> { public: A(); ~A(); private: void f(); };", 2),
        (
            "class A {\n public:\n  A(A&&) = delete;\n  void f() {\n    if (a) { b(); }\n  }\n};",
            1,
        ),
        ("class A { public: using F = std::function<void()>; F f = {}; friend void g(); };", 0),
        ("class A { public: struct B { void f(); void g(); }; };", 0),
        ("class A { public: std::string a() const; // b();\n  void c(int d = 1); };", 2),
    ],
)
def test_the_rule_counts(text: str, methods: int) -> None:
    assert public_methods(text)["A"] == methods
