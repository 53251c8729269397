"""Does a chat template want message content as one string or as a list of parts? Pure.

vLLM's detection by syntax tree (renderers/hf.py), followed step by step: to find another answer would be to render
another prompt.
May import: the standard library, jinja2, router.tokenize.chat.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import jinja2.nodes

from router.tokenize.chat import ContentFormat


class _NotAName(Exception):
    """An assignment or loop the detection does not follow; vLLM then says "string"."""


def detect_format(tree: jinja2.nodes.Template) -> ContentFormat:
    """ "openai" if the template loops over message.content, else "string"."""
    try:
        return "openai" if next(_content_loops(tree), None) is not None else "string"
    except _NotAName:
        return "string"


def _target_name(node: jinja2.nodes.Node) -> str:
    if not isinstance(node, jinja2.nodes.Name):
        raise _NotAName
    return node.name


def _reads(node: jinja2.nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Is `node` the variable `name` (or its attribute `key`), possibly filtered, tested or sliced?"""
    while True:
        wraps = isinstance(node, jinja2.nodes.Filter | jinja2.nodes.Test)
        slices = isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Slice)
        if not (wraps or slices):
            break
        node = getattr(node, "node", None)
    if key is None:
        return _is_name(node, name)
    if isinstance(node, jinja2.nodes.Getitem):
        return _is_name(node.node, name) and isinstance(node.arg, jinja2.nodes.Const) and bool(node.arg.value == key)
    return isinstance(node, jinja2.nodes.Getattr) and _is_name(node.node, name) and node.attr == key


def _is_name(node: jinja2.nodes.Node | None, name: str) -> bool:
    return isinstance(node, jinja2.nodes.Name) and node.ctx == "load" and node.name == name


def _aliases(tree: jinja2.nodes.Node, name: str) -> set[str]:
    found, queue = {name}, deque([name])
    while queue:
        current = queue.popleft()
        for assign in tree.find_all(jinja2.nodes.Assign):
            if _reads(assign.node, current) and (name := _target_name(assign.target)) not in found:
                found.add(name)
                queue.append(name)
    return found


def _message_names(tree: jinja2.nodes.Node) -> list[str]:
    aliases = _aliases(tree, "messages")
    return [
        _target_name(loop.target)
        for loop in tree.find_all(jinja2.nodes.For)
        if any(_reads(loop.iter, name) for name in aliases)
    ]


def _content_loops(tree: jinja2.nodes.Template) -> Iterator[jinja2.nodes.For]:
    names = _message_names(tree)

    def is_content(node: jinja2.nodes.Node) -> bool:
        return any(_reads(node, name, "content") for name in names)

    in_macros: dict[int, set[str]] = {}
    for macro in tree.find_all(jinja2.nodes.Macro):
        parameters = _content_parameters(tree, macro, is_content)
        for loop in macro.find_all(jinja2.nodes.For):
            in_macros[id(loop)] = parameters
    for loop in tree.find_all(jinja2.nodes.For):
        plain = loop.iter.name if isinstance(loop.iter, jinja2.nodes.Name) else None
        if is_content(loop.iter) or plain in in_macros.get(id(loop), {"content"}):
            _target_name(loop.target)
            yield loop


def _content_parameters(tree: jinja2.nodes.Template, macro: jinja2.nodes.Macro, is_content: Any) -> set[str]:
    """Parameters of a macro that are given message.content somewhere."""
    names = [argument.name for argument in macro.args]
    found: set[str] = set()
    for call in tree.find_all(jinja2.nodes.Call):
        if not (isinstance(call.node, jinja2.nodes.Name) and call.node.name == macro.name):
            continue
        found.update(name for name, argument in zip(names, call.args, strict=False) if is_content(argument))
        found.update(k.key for k in call.kwargs if k.key in names and is_content(k.value))
    return found
