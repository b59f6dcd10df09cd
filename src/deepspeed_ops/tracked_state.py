"""Optimizer state that notices when somebody else changes it.

A step keeps lists of state tensors; looking each of them up again at every step (two dictionary reads per parameter)
would cost more than the step. These dictionaries count every change of a key instead. Changes *inside* a tensor
(``.data``, ``copy_``) need no notice: addresses are read anew at each step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any


class Epoch:
    """How often any tracked dictionary of one optimizer changed."""

    def __init__(self) -> None:
        self.value = 0


def _counting(method: Callable[..., Any]) -> Callable[..., Any]:
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.epoch.value += 1
        return method(self, *args, **kwargs)

    counted.__name__ = method.__name__
    return counted


class TrackedState(dict[str, Any]):
    """State of one parameter. Copies and pickles as a plain dict."""

    def __init__(self, epoch: Epoch, *args: Any) -> None:
        super().__init__(*args)
        self.epoch = epoch

    def quietly(self, key: str, value: Any) -> None:
        """Set a key without a notice; for the step itself."""
        super().__setitem__(key, value)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    __setitem__ = _counting(dict.__setitem__)
    __delitem__ = _counting(dict.__delitem__)
    __ior__ = _counting(dict.__ior__)
    update = _counting(dict.update)
    pop = _counting(dict.pop)
    popitem = _counting(dict.popitem)
    clear = _counting(dict.clear)
    setdefault = _counting(dict.setdefault)


class TrackedStates(defaultdict[Any, Any]):
    """States by parameter; a missing one appears as an empty :class:`TrackedState`."""

    def __init__(self, epoch: Epoch, content: Any = ()) -> None:
        super().__init__(lambda: TrackedState(epoch))
        self.epoch = epoch
        dict.update(self, content)

    def of(self, parameter: Any) -> TrackedState:
        """State of one parameter, tracked from now on."""
        found = self[parameter]
        if not isinstance(found, TrackedState):
            found = TrackedState(self.epoch, found)
            super().__setitem__(parameter, found)
        return found

    def __reduce__(self) -> Any:
        return _plain_states, (list(self.items()),)

    __setitem__ = _counting(dict.__setitem__)
    __delitem__ = _counting(dict.__delitem__)
    __ior__ = _counting(dict.__ior__)
    update = _counting(dict.update)
    pop = _counting(dict.pop)
    popitem = _counting(dict.popitem)
    clear = _counting(dict.clear)


def _plain_states(items: list[tuple[Any, Any]]) -> defaultdict[Any, Any]:
    states: defaultdict[Any, Any] = defaultdict(dict)
    states.update(items)
    return states
