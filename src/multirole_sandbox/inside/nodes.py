"""`ListNode` and `TreeNode`, which LeetCode's templates take as given, and their conversion from and to the lists of its tests.

Arguments are converted where the program's function annotates them with one of the classes, as the templates do. A linked list
is the list of its values; a tree lists its nodes level by level, with None for a missing child. A program that defines a class
of these names gets nodes of its own class.
"""

import inspect
from collections.abc import Callable


class ListNode:
    """A node of a linked list."""

    def __init__(self, val: object = 0, next: "ListNode | None" = None) -> None:
        self.val, self.next = val, next


class TreeNode:
    """A node of a binary tree."""

    def __init__(self, val: object = 0, left: "TreeNode | None" = None, right: "TreeNode | None" = None) -> None:
        self.val, self.left, self.right = val, left, right


CLASSES: dict[str, type] = {"ListNode": ListNode, "TreeNode": TreeNode}


def named_in(annotation: object) -> str:
    """Return the class that an annotation names, as in `Optional[ListNode]`, or ""."""
    return next((name for name in CLASSES if name in str(annotation)), "")


def with_nodes(function: Callable, arguments: list, namespace: dict[str, object]) -> list:
    """Return a function's arguments, with nodes where it annotates them."""
    parameters = list(inspect.signature(function).parameters.values())
    notes = [str(parameter.annotation) for parameter in parameters[: len(arguments)]]
    converted = [_built(value, note, namespace) for value, note in zip(arguments, notes, strict=False)]
    return converted + arguments[len(notes) :]


def without_node(function: Callable, value: object) -> object:
    """Return [] for the None that stands for an empty list or tree, else the value."""
    return [] if value is None and named_in(inspect.signature(function).return_annotation) else value


def values_of(node: object) -> list:
    """Return the list of a node. Raises TypeError for any other object."""
    name = type(node).__name__
    values: list = []
    if name == "ListNode":
        while node is not None:
            values.append(node.val)
            node = node.next
    elif name == "TreeNode":
        level = [node]
        for place in level:  # it grows
            values.append(None if place is None else place.val)
            level += [] if place is None else [place.left, place.right]
        while values[-1] is None:
            values.pop()
    else:
        raise TypeError(f"a {name} is no JSON value")
    return values


def _built(value: object, note: str, namespace: dict[str, object]) -> object:
    name = named_in(note)
    if not name or not isinstance(value, list):
        return value
    if "list[" in note.lower():
        return [_built(item, name, namespace) for item in value]
    node = namespace.get(name, CLASSES[name])
    return _list(value, node) if name == "ListNode" else _tree(value, node)


def _list(values: list, node: Callable) -> object:
    first = None
    for value in reversed(values):
        rest, first = first, node(value)
        first.next = rest
    return first


def _tree(values: list, node: Callable) -> object:
    if not values:
        return None
    places, rest = [node(values[0])], iter(values[1:])
    for place in places:  # it grows
        for side in ("left", "right"):
            if (value := next(rest, None)) is not None:
                setattr(place, side, child := node(value))
                places.append(child)
    return places[0]
