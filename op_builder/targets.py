"""What GPU code is compiled for, and which device runs it.

A :class:`Target` is machine code (``sm_86``) or PTX (``compute_86``) of one architecture, plain, arch-specific
(``90a``) or of a family (``100f``). ``TORCH_CUDA_ARCH_LIST`` is parsed here; which architectures exist is data of
``ci/matrix.toml``.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from .errors import ArchListError
from .matrix import Capability, Matrix, Version, dotted, load

Kind = Literal["sass", "ptx"]
Suffix = Literal["", "a", "f"]

_KINDS: tuple[Kind, ...] = ("sass", "ptx")
_SUFFIXES: tuple[Suffix, ...] = ("", "a", "f")
_VARIANT = re.compile(r"(sm|ptx)([1-9][0-9]?)([0-9])([af]?)")
_ENTRY = re.compile(r"([0-9]{1,2})\.([0-9])([af]?)(\+PTX)?")
_LOOSE = re.compile(r"(sm|compute|ptx)?_?([0-9]{1,2})\.?([0-9])([af]?)(\+?ptx)?", re.IGNORECASE)


@functools.total_ordering
@dataclass(frozen=True)
class Target:
    """One thing to compile GPU code for. Ordered numerically; machine code before PTX of the same architecture.

    >>> Target(9, 0, "sass", "a").gencode
    '-gencode=arch=compute_90a,code=sm_90a'
    >>> Target.from_variant("ptx75").runs_on((12, 0))
    True
    """

    major: int
    minor: int
    kind: Kind = "sass"
    suffix: Suffix = ""

    def __post_init__(self) -> None:
        if not (1 <= self.major <= 99 and 0 <= self.minor <= 9):
            raise ArchListError(f"{self.major}.{self.minor} is no compute capability", "expected 1.0 to 99.9")
        if self.kind not in _KINDS or self.suffix not in _SUFFIXES:
            raise ArchListError(
                f"({self.kind!r}, {self.suffix!r}) is no kind of GPU target",
                f"kinds are {_KINDS}, suffixes {_SUFFIXES}",
            )

    @property
    def capability(self) -> Capability:
        """Compute capability ``(major, minor)``."""
        return self.major, self.minor

    @property
    def number(self) -> int:
        """``86`` for 8.6, ``100`` for 10.0: how compilers count."""
        return self.major * 10 + self.minor

    @property
    def variant(self) -> str:
        """Name of the part: ``sm90``, ``sm90a``, ``sm100f``, ``ptx75``. Round-trips through :meth:`from_variant`."""
        return f"{'sm' if self.kind == 'sass' else 'ptx'}{self.number}{self.suffix}"

    @property
    def compute(self) -> str:
        """The virtual architecture, ``compute_90a``."""
        return f"compute_{self.number}{self.suffix}"

    @property
    def code(self) -> str:
        """What the compiler emits: ``sm_90a`` for machine code, ``compute_75`` for PTX."""
        return f"{'sm' if self.kind == 'sass' else 'compute'}_{self.number}{self.suffix}"

    @property
    def gencode(self) -> str:
        """nvcc's flag, and what our logs print whichever compiler did the work."""
        return f"-gencode=arch={self.compute},code={self.code}"

    @property
    def list_entry(self) -> str:
        """The spelling of ``TORCH_CUDA_ARCH_LIST`` that asks for it (``+PTX`` also asks for the machine code)."""
        return f"{self.major}.{self.minor}{self.suffix}{'' if self.kind == 'sass' else '+PTX'}"

    @classmethod
    def from_variant(cls, text: str) -> Target:
        """Target of a part's variant name.

        Raises:
            ArchListError: the text is no GPU variant.
        """
        match = _VARIANT.fullmatch(text)
        if match is None:
            raise ArchListError(
                f"{text!r} names no GPU part", "variants look like sm86, sm90a, sm100f, ptx75", "rename the part"
            )
        prefix, major, minor, suffix = match.groups()
        return cls(int(major), int(minor), "sass" if prefix == "sm" else "ptx", _suffix(suffix))

    def runs_on(self, capability: Capability, tegra: bool = False) -> bool:
        """Whether a device of this compute capability executes the part; ``tegra``: it is a system-on-chip."""
        return not why_not(self, capability, tegra)

    def _order(self) -> tuple[int, int, int, int]:
        return self.major, self.minor, _KINDS.index(self.kind), _SUFFIXES.index(self.suffix)

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Target):
            return NotImplemented
        return self._order() < other._order()


def _suffix(text: str) -> Suffix:
    return "a" if text == "a" else "f" if text == "f" else ""


def capability_of(number: int) -> Capability:
    """``(10, 0)`` of ``100``, as compilers number architectures."""
    return number // 10, number % 10


def why_not(target: Target, capability: Capability, tegra: bool = False, known: Matrix | None = None) -> str:
    """Why a device cannot execute a target; ``""`` when it can.

    Machine code runs on devices of its major from its minor on, among desktop parts; a system-on-chip runs only its
    own. An ``a`` part runs on exactly its architecture, an ``f`` part within its family, PTX on any device from its
    level on (the driver must also know the PTX version, which is not asked here).

    Args:
        target: the part's target.
        capability: compute capability of the device.
        tegra: the device is a system-on-chip (also taken from the matrix).
        known: the architecture tables; the project's own by default.
    """
    tables = known if known is not None else load()
    own, device = dotted(target.capability), dotted(capability)
    if target.suffix == "a":
        same = target.capability == capability
        return "" if same else f"{target.code} is specific to {own} and runs on nothing else; the device is {device}"
    if target.suffix == "f":
        family = tables.family(target.capability)
        if family and family == tables.family(capability) and capability >= target.capability:
            return ""
        return f"{target.code} runs within its family from {own} on; the device is {device}"
    if target.kind == "ptx":
        enough = capability >= target.capability
        return "" if enough else f"PTX of level {own} never runs below it; the device is {device}"
    if target.capability == capability:
        return ""
    if target.major != capability[0]:
        return f"machine code for {own} runs on devices {target.major}.x only; the device is {device}"
    if target.minor > capability[1]:
        return f"machine code for {own} needs a device of at least {own}; the device is {device}"
    if tegra or tables.is_tegra(capability):
        return f"the device {device} is a system-on-chip, which runs machine code for {device} only, not {own}"
    if tables.is_tegra(target.capability):
        return f"{own} is a system-on-chip, whose machine code runs on {own} only; the device is {device}"
    return ""


def parse_arch_list(
    text: str | None, *, native: Sequence[Capability] = (), known: Matrix | None = None
) -> tuple[Target, ...]:
    """Targets of a ``TORCH_CUDA_ARCH_LIST``, without repetition, in numeric order.

    Takes what torch takes (``8.6``, ``8.6+PTX``, ``9.0a``, ``Ampere``, ``native``) and family forms (``10.0f``),
    separated by ``;``, commas or white space.

    Args:
        text: the list. None or blank asks for nothing in particular: the devices in ``native``, possibly none.
        native: compute capabilities of the GPUs here.
        known: the architecture tables; the project's own by default.

    Raises:
        ArchListError: an entry is not known; the nearest spelling stands in ``fix``.
    """
    tables = known if known is not None else load()
    here = [Target(*capability) for capability in native]
    if text is None or not text.strip():
        return _unique(here)
    entries = [e for e in re.split(r"[;,\s]+", text) if e]
    if not entries:
        raise ArchListError(
            f"TORCH_CUDA_ARCH_LIST={text!r} names no architecture",
            "it holds separators only",
            "unset it, or write for example " + _example(tables),
        )
    found: list[Target] = []
    for entry in entries:
        if entry == "native":
            if not here:
                raise ArchListError(
                    f"TORCH_CUDA_ARCH_LIST={text!r} asks for the GPUs of this machine",
                    "no GPU is visible here",
                    "name the architectures, for example " + _example(tables),
                )
            found += here
        else:
            found += _entry(entry, tables)
    return _unique(found)


def _unique(targets: Iterable[Target]) -> tuple[Target, ...]:
    return tuple(sorted(set(targets)))


def _example(known: Matrix) -> str:
    shipped = [dotted(c) for c, a in known.archs.items() if a.ship]
    return f'TORCH_CUDA_ARCH_LIST="{";".join(shipped[-3:])}"'


def named_archs(known: Matrix | None = None) -> dict[str, tuple[Target, ...]]:
    """Marketing names and what they stand for: machine code of every listed member, and PTX of the highest.

    Systems-on-chip have a name of their own, ``<name>+Tegra``, without PTX.
    """
    tables = known if known is not None else load()
    names: dict[str, list[Target]] = {}
    for capability, arch in tables.archs.items():
        if arch.listed:
            names.setdefault(arch.name + ("+Tegra" if arch.tegra else ""), []).append(Target(*capability))
    return {
        name: tuple(members) if name.endswith("+Tegra") else (*members, Target(*members[-1].capability, "ptx"))
        for name, members in names.items()
    }


def _entry(entry: str, known: Matrix) -> list[Target]:
    named = named_archs(known).get(entry)
    if named is not None:
        for target in named:
            _refuse_dropped(entry, target.capability, known)
        return list(named)
    match = _ENTRY.fullmatch(entry)
    capability = (int(match[1]), int(match[2])) if match else (0, 0)
    arch = known.archs.get(capability)
    if match is None or arch is None:
        raise _unknown(entry, known)
    suffix = _suffix(match[3])
    _refuse_dropped(entry, capability, known)
    if (suffix == "a" and arch.a is None) or (suffix == "f" and arch.f is None):
        forms = [dotted(capability) + s for s, since in (("", arch.first), ("a", arch.a), ("f", arch.f)) if since]
        raise ArchListError(
            f"GPU architecture {entry!r} does not exist",
            f"{dotted(capability)} has the forms {', '.join(forms)}",
            f"use {forms[-1]}",
        )
    kinds = _KINDS if match[4] else _KINDS[:1]
    return [Target(*capability, kind, suffix) for kind in kinds]


def _refuse_dropped(entry: str, capability: Capability, known: Matrix) -> None:
    arch, oldest = known.archs[capability], next(iter(known.cuda))
    if arch.last is not None and arch.last < oldest:
        lowest = next(c for c, a in known.archs.items() if a.last is None or a.last >= oldest)
        raise ArchListError(
            f"GPU architecture {entry!r} ({arch.name}) is too old",
            f"its last compiler is CUDA {dotted(arch.last)}; the oldest one used here is {dotted(oldest)}",
            f"use {dotted(lowest)} or higher",
        )


def spellings(known: Matrix | None = None) -> tuple[str, ...]:
    """Every entry a list may hold."""
    tables = known if known is not None else load()
    out: list[str] = [*named_archs(tables), "native"]
    for capability, arch in tables.archs.items():
        forms = [s for s, since in (("", arch.first), ("a", arch.a), ("f", arch.f)) if since]
        out += [f"{dotted(capability)}{form}{ptx}" for form in forms for ptx in ("", "+PTX")]
    return tuple(out)


def nearest(entry: str, known: Matrix | None = None) -> str:
    """The entry that ``entry`` was most likely meant to be: ``9.0`` for ``sm_90``, ``Ampere`` for ``ampere``."""
    valid = spellings(known)
    loose = _LOOSE.fullmatch(entry)
    if loose is not None:
        prefix, major, minor, suffix, ptx = loose.groups()
        virtual = ptx or (prefix or "").lower() in ("compute", "ptx")
        guess = f"{int(major)}.{minor}{suffix.lower()}{'+PTX' if virtual else ''}"
        if guess in valid:
            return guess
        tables, number = known if known is not None else load(), int(major) * 10 + int(minor)
        closest: Capability = min(tables.archs, key=lambda c: abs(c[0] * 10 + c[1] - number))
        return dotted(closest)
    folded = {v.casefold(): v for v in valid}
    close = difflib.get_close_matches(entry.casefold(), folded, 1, cutoff=0.0)
    return folded[close[0]] if close else valid[0]


def _unknown(entry: str, known: Matrix) -> ArchListError:
    return ArchListError(
        f"GPU architecture {entry!r} is not known",
        "expected entries such as 8.6, 8.6+PTX, 9.0a or Ampere, separated by ; or blanks; known: "
        + ", ".join(dotted(c) for c in known.archs),
        f"use {nearest(entry, known)!r}",
    )


def supported_by(target: Target, release: Version, known: Matrix | None = None) -> bool:
    """Whether the compiler of a CUDA release (``(12, 8)``) targets it; False for architectures not in the matrix."""
    tables = known if known is not None else load()
    arch = tables.archs.get(target.capability)
    return arch is not None and arch.known_to(release, target.suffix)


def ship_set(known: Matrix | None = None) -> tuple[tuple[Target, tuple[int, int]], ...]:
    """What wheels and conda packages hold: one part per architecture, with the oldest release that has it."""
    tables = known if known is not None else load()
    sass = [Target(*c) for c, a in tables.archs.items() if a.ship]
    ptx = [Target(*c, "ptx") for c in tables.ship_ptx]
    return tuple((t, tables.oldest_release(t.capability, t.suffix).release) for t in sorted(sass + ptx))


def cell_set(release: Version, known: Matrix | None = None) -> tuple[Target, ...]:
    """Machine code of every architecture that has cells in the farm, as far as one CUDA release's compiler makes it."""
    tables = known if known is not None else load()
    row = tables.release(release)
    wanted = (Target(*c) for c, arch in tables.archs.items() if arch.cell)
    return tuple(t for t in sorted(wanted) if supported_by(t, row.release, tables))
