"""Typed errors: one class per cause, each saying what failed, why, and the one command that fixes it.

Every error of this project derives from :class:`OpsError`. ``what`` names the op, argument or file and the value
found; ``why`` states expected against found; ``fix`` is one command or one setting to paste. ``exit_code`` is what a
command line tool exits with. Classes that stand for bad arguments are also :class:`ValueError`/:class:`TypeError`, so
that callers who catch the built-in class keep working.
"""

from __future__ import annotations


class OpsError(RuntimeError):
    """Base class.

    Args:
        what: the thing that failed, with the value found.
        why: expected against found.
        fix: one command or setting that cures it; may be empty where the user can do nothing.
    """

    exit_code = 1

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        self.what, self.why, self.fix = what, why, fix
        super().__init__(what, why, fix)

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class UsageError(OpsError, ValueError):
    """An argument or a setting has a value we refuse."""

    exit_code = 2


class TensorError(OpsError, ValueError):
    """A tensor argument has the wrong shape, layout, device or overlap."""

    exit_code = 2


class DtypeError(OpsError, TypeError):
    """A tensor or scalar argument has the wrong dtype."""

    exit_code = 2


class ArchListError(UsageError):
    """``TORCH_CUDA_ARCH_LIST`` (or an arch argument) names something that is not a GPU target."""

    exit_code = 3


class SettingError(UsageError):
    """An environment variable is unknown (``DS_BUILD_*``) or has the wrong form (``CUDA_HOME`` as a list)."""

    exit_code = 4


class MatrixError(UsageError):
    """``ci/matrix.toml`` lacks something asked for, or contradicts itself."""

    exit_code = 5


class CompilerMissing(OpsError):
    """A part has to be built and no usable compiler was found."""

    exit_code = 10


class CompileFailed(OpsError):
    """A compiler ran and failed; ``why`` shows its first real error line, ``log`` the path of the whole output."""

    exit_code = 11

    def __init__(self, what: str, why: str = "", fix: str = "", log: str = "") -> None:
        super().__init__(what, why, fix)
        self.log = log


class JitForbidden(OpsError):
    """A part would have to be built and ``DS_JIT=0`` forbids it."""

    exit_code = 12


class StoreError(OpsError):
    """The part store cannot be written or read (permissions, disk full, broken file system)."""

    exit_code = 20


class CorruptPart(StoreError):
    """A part's size or sha256 differs from its manifest, or the manifest is unreadable."""

    exit_code = 21


class NoMatchingPart(OpsError):
    """No part fits this host or device and none can be built here; ``why`` is the resolver's trace."""

    exit_code = 30


class LoadFailed(OpsError):
    """The dynamic loader or the GPU driver refused a part; the part is quarantined and the next candidate tried."""

    exit_code = 31


class DriverError(OpsError):
    """The GPU driver is absent, too old, or a driver call failed."""

    exit_code = 32


class HostUnsupported(OpsError):
    """No part runs in this process whatever is installed: a 32-bit Python."""

    exit_code = 33


class OpBuildError(OpsError):
    """An op asked for by ``DS_BUILD_<OP>=1`` cannot be built."""

    exit_code = 40


class IoFailed(OpsError, OSError):
    """A file cannot be opened, read, written or flushed; ``errno``, ``filename``, ``offset`` and ``length`` say where.

    Args:
        what: the operation, with path, offset and length.
        why: the system's error by name, and the position it happened at.
        fix: what cures it, where that is known.
        errno: the system's error number; ``ENODATA`` where the file ends too early.
        filename: the file.
        offset: where the request begins, bytes.
        length: of the request, bytes.
    """

    exit_code = 45

    def __init__(
        self,
        what: str,
        why: str = "",
        fix: str = "",
        *,
        errno: int | None = None,
        filename: str | None = None,
        offset: int = 0,
        length: int = 0,
    ) -> None:
        super().__init__(what, why, fix)
        self.errno, self.filename, self.offset, self.length = errno, filename, offset, length


class CorruptFile(OpsError):
    """A saved file was damaged or cut short, or is none of ours."""

    exit_code = 46


class NotHere(OpsError, AttributeError):
    """The name belongs to DeepSpeed's engine and this distribution does not hold it (``deepspeed.initialize``)."""

    exit_code = 50


class EngineMissing(OpsError):
    """The farm has no container engine: none is installed, its daemon does not answer, or the base image is absent."""

    exit_code = 60


class ImageFailed(OpsError):
    """An image could not be built or run, or breaks what its cell promises; ``why`` has the engine's first error."""

    exit_code = 61
