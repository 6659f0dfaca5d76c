"""State dicts without their nesting: tensors and plain values by dotted names."""

from collections.abc import Mapping

from shardspec.errors import LayoutError
from shardspec.text import shown

__all__ = ["flat_state", "is_plain"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def flat_state(state: Mapping[str, object]) -> dict[str, object]:
    """Return a state dict without its nesting, the keys of inner ones behind those of outer ones.

    Raises
    ------
    LayoutError
        If two values get one name.

    Examples
    --------
    >>> flat_state({"step": 3, "state": {"w": {"lr": 0.1}}})
    {'step': 3, 'state.w.lr': 0.1}
    """
    if not any(isinstance(value, Mapping) for value in state.values()):
        return dict(state)
    found: dict[str, object] = {}
    for key, value in state.items():
        inner = flat_state(value) if isinstance(value, Mapping) else {"": value}
        for name, leaf in inner.items():
            dotted = f"{key}.{name}" if name else str(key)
            if dotted in found:
                raise LayoutError(
                    f"two values of the state dict would both be {shown(dotted)}; rename a key"
                )
            found[dotted] = leaf
    return found


def is_plain(value: object) -> bool:
    """Whether a value is a number, a text, or a list or tuple of such.

    Examples
    --------
    >>> is_plain([1, ("adam", None)]), is_plain(object())
    (True, False)
    """
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)
