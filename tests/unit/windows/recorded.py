"""Windows, recorded: a disk with its rules for open files, and a machine that answers commands from a table.

What the rooms of ``op_builder`` ask of a system they ask through :class:`op_builder.files.Files` and a ``run``
function; these stand in for a Windows machine's. The rules are those of NTFS as Win32 documents them: an open file
is neither deleted nor replaced, a folder with an open file in it is not renamed, a name that is taken is refused, and a
file that is going keeps its folder from going.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from op_builder.commands import Completed
from op_builder.files import Files

ACCESS_DENIED, SHARING_VIOLATION, ALREADY_EXISTS, DIR_NOT_EMPTY = 5, 32, 183, 145


def refusal(code: int, path: Path) -> OSError:
    """The exception that Python raises on Windows for a Win32 error."""
    kinds: dict[int, tuple[type[OSError], int]] = {
        ALREADY_EXISTS: (FileExistsError, errno.EEXIST),
        DIR_NOT_EMPTY: (OSError, errno.ENOTEMPTY),
    }
    kind, number = kinds.get(code, (PermissionError, errno.EACCES))
    exc = kind(number, f"[WinError {code}]", str(path))
    exc.winerror = code  # type: ignore[attr-defined]
    return exc


@dataclass
class WindowsDisk:
    """The file system of this machine under Windows' rules.

    Attributes:
        held: files that somebody has open, and for how many of our pauses still (None: for ever).
        pauses: seconds slept so far, one entry a pause.
    """

    held: dict[Path, int | None] = field(default_factory=dict)
    pauses: list[float] = field(default_factory=list)

    def files(self) -> Files:
        """The file system for the rooms under test."""
        return Files(True, self.sleep, self.rename, self.replace, self.unlink, self.rmtree)

    def hold(self, path: Path, pauses: int | None = None) -> None:
        """Somebody opens a file: a scanner for some pauses, a process that loaded it for ever."""
        self.held[path] = pauses

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        left = {p: None if n is None else n - 1 for p, n in self.held.items()}
        self.held = {p: n for p, n in left.items() if n is None or n > 0}

    def _below(self, folder: Path) -> list[Path]:
        return [p for p in self.held if p == folder or folder in p.parents]

    def rename(self, source: Path, target: Path) -> None:
        if self._below(source):
            raise refusal(ACCESS_DENIED, source)
        if target.exists():
            raise refusal(ALREADY_EXISTS, target)
        source.rename(target)

    def replace(self, source: Path, target: Path) -> None:
        if self._below(source) or self._below(target):
            raise refusal(ACCESS_DENIED, target)
        source.replace(target)

    def unlink(self, path: Path) -> None:
        if self._below(path):
            raise refusal(SHARING_VIOLATION, path)
        path.unlink()

    def rmtree(self, folder: Path) -> None:
        held = self._below(folder)
        if held:
            for path in folder.rglob("*"):
                if path.is_file() and path not in held:
                    path.unlink()
            raise refusal(SHARING_VIOLATION, held[0])
        shutil.rmtree(folder)


PLACE = r"C:\Program Files\Microsoft Visual Studio\2022\BuildTools"
TOOLS = PLACE + r"\VC\Tools\MSVC\14.44.35207"
CL = TOOLS + r"\bin\Hostx64\x64\cl.exe"
ENGLISH = "Microsoft (R) C/C++ Optimizing Compiler Version 19.44.35211 for x64\r\nCopyright (C) Microsoft"


def variables(place: str = PLACE, sdk: bool = True) -> str:
    """What ``set`` prints after vcvars64.bat, shortened to what has a meaning here."""
    tools = place + r"\VC\Tools\MSVC\14.44.35207"
    include = (
        tools + r"\include" + (r";C:\Program Files (x86)\Windows Kits\10\include\10.0.22621.0\ucrt" if sdk else "")
    )
    rows = {
        "ALLUSERSPROFILE": r"C:\ProgramData",
        "INCLUDE": include,
        "LIB": tools + r"\lib\x64",
        "Path": tools + r"\bin\Hostx64\x64;C:\Windows\system32;C:\Program Files\Git\usr\bin",
        "VCToolsInstallDir": tools + "\\",
        "VSCMD_ARG_TGT_ARCH": "x64",
    }
    return "".join(f"{name}={value}\r\n" for name, value in rows.items())


@dataclass
class WindowsMachine:
    """Answers commands as a Windows machine did; what is None is not installed.

    Attributes:
        vswhere: its standard output.
        script: standard output of the prompt script and ``set``.
        banner: the bytes ``cl`` writes, in the code page of the console.
        ran: every command line so far.
    """

    vswhere: str | None = None
    script: str | None = None
    banner: bytes | None = None
    ran: list[tuple[str, ...]] = field(default_factory=list)

    @classmethod
    def with_visual_studio(
        cls, place: str = PLACE, sdk: bool = True, banner: bytes = ENGLISH.encode()
    ) -> WindowsMachine:
        """Build Tools in a folder."""
        found = [{"instanceId": "1a2b", "installationPath": place, "displayName": "Visual Studio Build Tools 2022"}]
        return cls(json.dumps(found, ensure_ascii=False), variables(place, sdk), banner)

    def run(self, argv: Sequence[str]) -> Completed:
        self.ran.append(tuple(argv))
        program = argv[0].rpartition("\\")[2].rpartition("/")[2].lower().removesuffix(".exe")
        answers: Mapping[str, str | bytes | None] = {"vswhere": self.vswhere, "cmd": self.script, "cl": self.banner}
        answer = answers.get(program)
        if answer is None:
            return Completed(-1, why=f"{argv[0]} cannot run: [WinError 2] The system cannot find the file specified")
        if isinstance(answer, bytes):  # as run_command decodes it; cl writes its banner to standard error
            return Completed(0, "", answer.decode("utf-8", "replace"))
        return Completed(0, answer)
