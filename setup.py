"""Thin by design: what the parts are and how they are built is op_builder's work, what wheels are called is
``deepspeed_ops.wheel``'s, what each distribution holds ``deepspeed_ops.distributions``'. Everything static stands in
``pyproject.toml``."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "src"))

from deepspeed_ops.op_builder.errors import OpsError

from deepspeed_ops import distributions, version, wheel

VERSION = version.of_tree(ROOT)
DATA_ONLY = ("deepspeed_ops.csrc", "deepspeed_ops.ci")
try:
    ASKED = distributions.asked()
except OpsError as exc:
    sys.exit(f"error: {exc}")


class OpsDistribution(Distribution):
    """What ``pyproject.toml`` says, under the name of the distribution asked for."""

    def parse_config_files(self, *args, **kwargs):
        super().parse_config_files(*args, **kwargs)
        self.metadata.name = ASKED.name
        if not ASKED.alone:
            self.entry_points = {}
            self.install_requires = [f"{distributions.DISTRIBUTIONS['deepspeed-ops'].name}=={VERSION.version}"]
            self.extras_require = {}
            self._finalize_requires()  # setuptools normalises requirements once, at the end of the method above


class Build(build):
    """Also runs ``build_ext``, although no setuptools extension exists."""

    sub_commands = (("build_py", None), ("build_ext", None))


class BuildPy(build_py):
    """Copies fresh: what an earlier build left in ``build_lib`` must not get into this wheel."""

    def find_package_modules(self, package, package_dir):
        return [] if package in DATA_ONLY else super().find_package_modules(package, package_dir)

    def run(self):
        if not self.editable_mode:
            wheel.clean_build_lib(Path(self.build_lib))
        super().run()
        if not self.editable_mode and "deepspeed_ops" in ASKED.tops:
            wheel.write_version(Path(self.build_lib), VERSION)


class BuildExt(build_ext):
    """Builds the ops that the environment asks for (``DS_BUILD_OPS``, ``DS_BUILD_<OP>``); ``-j N`` is honoured.

    ``--parts DIR`` takes the finished parts of a folder instead, which can be of another platform.
    """

    user_options = [*build_ext.user_options, ("parts=", None, "finished parts to take instead of building any")]  # noqa: RUF012

    def initialize_options(self):
        super().initialize_options()
        self.parts = None

    def run(self):
        here = ROOT if self.inplace else Path(self.build_lib) / "deepspeed_ops"
        if "deepspeed_ops" not in ASKED.tops or getattr(self.distribution, "parts_built_in", None) == here:
            return  # names have no parts; `build_ext -j8 bdist_wheel` and `install` come here twice
        self.distribution.parts_built_in = here
        try:
            ready = Path(self.parts).absolute() if self.parts else None
            wheel.build_parts(here / "parts", jobs=int(self.parallel) if self.parallel else None, ready=ready)
        except OpsError as exc:
            sys.exit(f"error: {exc}")
        if not self.inplace and ASKED == distributions.WHOLE:
            wheel.write_git_version_info(Path(self.build_lib), VERSION)

    def get_outputs(self):
        return []

    def get_output_mapping(self):
        return {}


class BdistWheel(bdist_wheel):
    """``py3-none-any`` without parts, ``py3-none-<platform>`` with parts; the platform is read from the parts."""

    def parts(self):
        return Path(self.get_finalized_command("build").build_lib) / "deepspeed_ops" / "parts"

    def run(self):
        if not self.skip_build:
            self.run_command("build")
        if wheel.manifests(self.parts()):
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True  # makes `install` put everything into platlib
        super().run()

    def get_tag(self):
        tag = "any" if self.root_is_pure else wheel.platform_tag(self.parts())
        if self.plat_name_supplied and self.plat_name.replace("-", "_").replace(".", "_") != tag:
            sys.exit(
                f"--plat-name {self.plat_name}: the parts of this wheel prove {tag!r}, and nothing else is asserted"
            )
        return "py3", "none", tag


class Sdist(sdist):
    """Carries the version it was made with: an unpacked sdist has no git to ask."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        wheel.write_version(Path(base_dir) / "src", VERSION)


if __name__ == "__main__":
    version.save_build_string(ROOT)
    setup(
        version=VERSION.version,
        packages=ASKED.holds(
            [*find_packages("src"), "deepspeed_ops.op_builder", "deepspeed_ops.op_builder.ops", *DATA_ONLY]
        ),
        package_dir={
            "": "src",
            "deepspeed_ops.op_builder": "op_builder",
            "deepspeed_ops.csrc": "csrc",
            "deepspeed_ops.ci": "ci",
        },
        package_data={
            "deepspeed": ["py.typed"],
            "deepspeed_ops": ["py.typed", "ds_report.schema.json"],
            "deepspeed_ops.csrc": ["**/*.cpp", "**/*.cu", "**/*.cuh", "**/*.h"],
            "deepspeed_ops.ci": ["matrix.toml"],
        },
        include_package_data=False,
        distclass=OpsDistribution,
        cmdclass={
            "build": Build,
            "build_py": BuildPy,
            "build_ext": BuildExt,
            "bdist_wheel": BdistWheel,
            "sdist": Sdist,
        },
    )
