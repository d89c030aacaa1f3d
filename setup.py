"""The description on a package index, and kernels compiled for the platform of a wheel.

README.md is the description; its links to files of the project are made absolute. With FARPIPE_KERNELS=1 the commands
of a first hour are run in the package as it will be installed, and the kernels that they compile come with the wheel,
which is then one of a platform and a release of Python. The environment that builds it needs farpipe's dependencies.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

HERE = Path(__file__).parent
HOME = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Homepage"]
README = (HERE / "README.md").read_text(encoding="utf-8")
RELATIVE = r"(?![a-z]+:|#)"

with_pictures = re.sub(rf"(!\[[^]]*\]\(){RELATIVE}", rf"\1{HOME}/raw/main/", README)
description = re.sub(rf"(\]\(){RELATIVE}", rf"\1{HOME}/blob/main/", with_pictures)


class WithKernels(build_py):
    """Builds the package, and compiles its kernels into it."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        with TemporaryDirectory() as cache:
            environment = os.environ | {
                "PYTHONPATH": str(Path(self.build_lib).absolute()),
                "PYTHONDONTWRITEBYTECODE": "1",
                "NUMBA_CACHE_DIR": cache,
                "NUMBA_CPU_NAME": "generic",
            }
            subprocess.run([sys.executable, "-m", "farpipe.cli.kernels"], check=True, env=environment)


class OfPlatform(Distribution):
    """A wheel of one platform."""

    def has_ext_modules(self) -> bool:
        return True


kernels = {"cmdclass": {"build_py": WithKernels}, "distclass": OfPlatform} if os.environ.get("FARPIPE_KERNELS") else {}
setup(long_description=description, long_description_content_type="text/markdown", **kernels)
